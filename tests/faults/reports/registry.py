"""The 55 public reports, the test of each, and the guard that the test protects.

A guard is code that keeps the reported fault away. Its edits take it out of a copy of the tree: ``old`` stands exactly
once in the file, ``new`` is what the code would be without it. Where two parts each suffice, a guard's edits take both.
``tests/faults/guards.py`` removes one guard at a time and expects the test to fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Edit:
    """One textual change of a file of the tree."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Guard:
    """What keeps a fault away, and how to take it out."""

    report: int
    """Number of the report that it is for."""
    where: str
    """Dotted path of the code."""
    what: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Report:
    """One public report with its test, ``test_report_NN_...``."""

    number: int
    source: str
    """``owner/repository#issue``, with which the test's docstring begins."""
    test: str
    """The test's id, as pytest takes it."""
    guards: Sequence[Guard]


@dataclass(frozen=True)
class CannotApply:
    """A report about a component that does not exist here."""

    number: int
    source: str
    missing: str


def _guard(report: int, where: str, what: str, *edits: tuple[str, str]) -> Guard:
    """A guard whose edits are all in the module that *where* starts with."""
    module = where.partition(":")[0]
    file = module.replace(".", "/") + ".py"
    return Guard(report, where.replace(":", "."), what, tuple(Edit(file, old, new) for old, new in edits))


def _both(report: int, where: str, what: str, *edits: Edit) -> Guard:
    return Guard(report, where, what, edits)


SESSION, SUPERVISOR, PROCESS = "synapse_host.session:", "synapse_host.supervisor:", "synapse_host.process:"
BIRTH, DEATH_OF = "synapse_host.birth:", "synapse_host.death:"
GENERATIONS, STANDING, TURNS = "synapse_host.generations:", "synapse_host.standing:", "synapse_host.turns:"
GET_WINDOW = "getattr(windows, window_name(request, phase))"
REFUSED = "except (ConnectionRefusedError, FileNotFoundError):\n            with suppress(FileNotFoundError):\n"

GUARDS: Final[tuple[Guard, ...]] = (
    _guard(
        1,
        SESSION + "Session._tick",
        "silence past the window kills this lane's worker",
        ("if self._watchdog.expired(now, late=now - self._due):", "if False:"),
    ),
    _guard(
        2,
        SESSION + "Session._lost",
        "the end of the stream and the exit each end the open request",
        ('self._fail("eof", f"the worker\'s connection ended {where}{torn}")', "pass"),
        ('self._loop.call_later(EXIT_GRACE, self._fail, "exit", "the worker exited")', "pass"),
    ),
    _guard(
        3,
        PROCESS + "WorkerProcess._exit_seen",
        "a dead child is reaped when its exit is seen",
        ("self._kill_group()\n        returncode = self._popen.wait()", "returncode = -9"),
    ),
    _guard(
        4,
        STANDING + "Standing.charge",
        "every unplanned death is a strike",
        ("self.quarantine.strike(Strike(death.generation, death.cause, now, fingerprint))", "pass"),
    ),
    _guard(
        5,
        SUPERVISOR + "Supervisor.died",
        "a dead exchange hands its turn on",
        (
            "exchange.waiter.set_exception(error)\n        self._release(exchange)",
            "exchange.waiter.set_exception(error)",
        ),
    ),
    _guard(
        6,
        PROCESS + "WorkerProcess.kill",
        "SIGKILL, which a stopped process takes too",
        ("os.kill(self.pid, signal.SIGKILL)", "os.kill(self.pid, signal.SIGTERM)"),
        ("os.killpg(self.pid, signal.SIGKILL)", "os.killpg(self.pid, signal.SIGTERM)"),
    ),
    _guard(
        7,
        SUPERVISOR + "Supervisor.died",
        "the open request gets its typed error",
        (
            "            exchange.waiter.set_exception(error)\n        self._release",
            "            pass\n        self._release",
        ),
    ),
    _guard(
        8,
        "engines.runtime.transport:PeerWatcher._run",
        "a worker whose host is gone ends in mid-computation",
        (
            '"also when it comes in mid-exchange".\n            self._exit(0)',
            '"also when it comes in mid-exchange".\n            pass',
        ),
    ),
    _guard(9, PROCESS + "WorkerProcess", "a worker inherits no descriptor", ("close_fds=True", "close_fds=False")),
    _both(
        10,
        "engines.runtime.dispatch.Dispatcher._err",
        "an error leaves as valid UTF-8",
        Edit("engines/runtime/dispatch.py", 'text = msg.encode(errors="replace").decode()', "text = msg"),
        Edit("engines/protocol/errors.py", 'msg = msg.encode("utf-8", "backslashreplace").decode("utf-8")', "pass"),
    ),
    _guard(
        10,
        "engines.runtime.dispatch:Dispatcher._err",
        "an error is short enough for any frame",
        ("if not text or len(encode(err)) <= limit:", "if True:"),
    ),
    _guard(
        11,
        SESSION + "Session.begin",
        "the window covers the sending of the request",
        (
            "if self._timer is None or self._due > due:",
            "if not self._channel.sending and (self._timer is None or self._due > due):",
        ),
    ),
    _guard(
        12,
        DEATH_OF + "diagnose",
        "the diagnosis waits for the exit that explains the end of the stream",
        (
            "exit_status=returncode if own_end and returncode is not None and returncode >= 0 else None",
            "exit_status=None",
        ),
    ),
    _guard(
        13,
        "engines.runtime.main:die_with_parent",
        "the kernel kills a worker whose parent died",
        ("ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)", "pass"),
    ),
    _guard(
        14,
        SUPERVISOR + "Supervisor.died",
        "health forgets a dead worker at once",
        ("self._workers.forget(session)", "pass"),
    ),
    _guard(
        15,
        SESSION + "Session.stop",
        "a planned stop ends in SIGKILL and the reaping",
        (
            "self._channel.abort()\n        await process.destroy()\n\n    async def buried",
            "self._channel.abort()\n\n    async def buried",
        ),
    ),
    _guard(
        16,
        "synapse_host.watchdog:Watchdog.expired",
        "the host decides, from outside",
        ("self._heard(now)\n        return True", "return False"),
    ),
    _guard(
        16, SESSION + "Session._bury", "a silent worker of ours is asked for its stacks", ("process.dump()\n", "pass\n")
    ),
    _guard(
        17,
        "synapse_host.quarantine:Quarantine.strike",
        "two strikes in a row shut the lane",
        ("self._shut_at = strike.at", "pass"),
    ),
    _guard(
        18,
        "synapse_host.watchdog:window",
        "UNLOAD has a silence window",
        (GET_WINDOW, f'float("inf") if phase is Phase.CONTROL else {GET_WINDOW}'),
    ),
    _guard(
        19,
        DEATH_OF + "diagnose",
        "a death names its signal",
        ("signal=signal_name(returncode) if own_end else None", "signal=None"),
    ),
    _guard(19, DEATH_OF + "diagnose", "a death carries the last output", ("log_tail=ring.render()", 'log_tail=""')),
    _guard(
        19,
        "synapse_host.logring:LogRing.write",
        "the ring keeps the last bytes, not the first",
        ("data = data[len(data) - self.capacity :]", "data = data[: self.capacity]"),
    ),
    _guard(
        20,
        GENERATIONS + "Generations._spawn",
        "no worker beside one that may still live",
        ("if process is not None and process.running:\n                # Never", "if False:\n                # Never"),
    ),
    _guard(
        20,
        PROCESS + "WorkerProcess.destroy",
        "the host waits for a killed process for a bounded time",
        ("reaped = await self.wait(REAP_LIMIT)", "reaped = await self.wait(1e6)"),
    ),
    _guard(
        21,
        SESSION + "Session._tick",
        "without an exchange there is no watchdog",
        (
            "exchange, self.open = self.open, None\n                self._watchdog.stop(",
            "exchange, self.open = self.open, None\n                float(",
        ),
        (
            "if self.dead or exchange is None:\n            return\n        now",
            "if self.dead:\n            return\n        if exchange is None:\n"
            "            self._fail('silence', 'idle')\n            return\n        now",
        ),
    ),
    _guard(
        22,
        SESSION + "Session.stop",
        "SHUTDOWN may take its grace and no more",
        ("await process.wait(grace)", "await process.wait(1e6)"),
    ),
    _guard(
        22,
        PROCESS + "WorkerProcess",
        "a worker leads a group of its own: all of it dies, and nothing else",
        ('{"start_new_session": True}', "{}"),
    ),
    _guard(
        23,
        SUPERVISOR + "Supervisor.aclose",
        "all stops share one, and wait for it",
        ("if self._closer is None:", "if True:"),
    ),
    _guard(
        24,
        SUPERVISOR + "Supervisor.overdue",
        "a caller that leaves frees nothing: its exchange keeps the stream until the reply is drained",
        (
            "expire(exchange.waiter, self.spec.lane_id, exchange.stage)",
            "expire(exchange.waiter, self.spec.lane_id, exchange.stage)\n"
            "        self._workers.session.open = None\n        self._release(exchange)",
        ),
    ),
    _guard(
        25,
        "engines.protocol.connection:Connection._check_reply",
        "a reply names the request it answers",
        ("if known.req_id != request.req_id:", "if False:"),
    ),
    _guard(
        26,
        "synapse_host.parts:collect",
        "each exchange's rows land in their own place",
        ("answer[part.rows.start : part.rows.stop] = await send(part)", "answer[: len(part.rows)] = await send(part)"),
    ),
    _guard(
        27,
        "engines.llama.binding:NativeContext.run_rows",
        "every row is a sequence of its own",
        (
            "self._sequences[:n] = np.repeat(self._id_addresses[:rows], lengths)",
            "self._sequences[:n] = self._id_addresses[0]",
        ),
    ),
    _guard(28, TURNS + "Turns.take", "a full queue answers", ("if len(self._waiters) >= self._limit:", "if False:")),
    _guard(
        29,
        PROCESS + "WorkerProcess._watch_pipes",
        "both pipes are read all the time",
        ("self._loop.add_reader(pipe.fileno(), self._readable, name, pipe.fileno())", "pass"),
    ),
    _guard(
        30,
        PROCESS + "WorkerProcess.destroy",
        "the kill comes before any wait for the pipes",
        ("self.kill()\n        reaped", "await self.drain(1e6)\n        self.kill()\n        reaped"),
    ),
    _guard(
        31,
        PROCESS + "WorkerProcess.drain",
        "draining after a death is bounded",
        ("await asyncio.wait({self._drained}, timeout=limit)", "await asyncio.wait({self._drained})"),
    ),
    _guard(
        32,
        BIRTH + "Birth.run",
        "whatever a start ends in, its listener is closed",
        ("listener.close()\n\n    def _listen", "pass\n\n    def _listen"),
    ),
    _guard(
        33,
        SESSION + "Session.start",
        "no descriptors left is a typed error without a strike",
        ("raise no_resources(self.spec.lane_id, exc) from exc", "raise"),
    ),
    _guard(
        34,
        "synapse_host.listener:_clear_stale",
        "a dead socket is removed",
        (REFUSED + "                path.unlink()", REFUSED + "                pass"),
    ),
    _guard(
        34,
        "synapse_host.listener:_clear_stale",
        "what is no socket is left alone",
        ("if not stat.S_ISSOCK(entry.st_mode):", "if not stat.S_ISSOCK(entry.st_mode) and path.unlink():"),
    ),
    _guard(
        34,
        "synapse_host.listener:_clear_stale",
        "a living listener is left alone",
        ("probe.connect(os.fspath(path))", "raise ConnectionRefusedError"),
    ),
    _guard(
        35,
        "synapse_host.listener:RuntimeDirectory._unlink",
        "only the very file that was bound is unlinked",
        ("if made == (entry.st_dev, entry.st_ino):", "if True:"),
    ),
    _guard(
        35,
        "synapse_host.listener:RuntimeDirectory._unlink",
        "a missing file is fine",
        (
            "with suppress(OSError):\n            entry = path.lstat()\n            if made",
            "with suppress(ZeroDivisionError):\n            entry = path.lstat()\n            if made",
        ),
    ),
    _guard(
        36,
        "synapse_host.listener:RuntimeDirectory.socket_path",
        "a path that doesn't fit a socket address is replaced by a short one",
        ("return len(os.fsencode(path)) < SUN_PATH", "return True"),
    ),
    _guard(
        36,
        "synapse_host.listener:RuntimeDirectory.socket_path",
        "its length is counted in bytes",
        ("return len(os.fsencode(path)) < SUN_PATH", "return len(str(path)) < SUN_PATH"),
    ),
    _guard(
        37,
        "synapse_host.listener:UnixListener.accept",
        "accepting goes on after a stranger",
        (
            'connection.close()\n            _log.warning("a foreign',
            'connection.close()\n            raise ConnectionError\n            _log.warning("a foreign',
        ),
    ),
    _guard(
        37,
        "synapse_host.pipe:PIPE_TYPE_BYTE",
        "the pipe is a stream of bytes",
        ("PIPE_TYPE_BYTE: Final = 0x0", "PIPE_TYPE_BYTE: Final = 0x4"),
    ),
    _guard(
        38,
        "engines.protocol.framing:FrameReader.next_control",
        "a length is compared with max_frame before anything is allocated",
        ("self._refuse(size, None)", "pass"),
    ),
    _guard(
        40,
        SUPERVISOR + "Supervisor.replied",
        "a reply that is not finite reaches nobody",
        ("if not finite:", "if False:"),
    ),
    _guard(
        41,
        "synapse_host.gates:_embed_gates",
        "a certification counts answers that are not finite",
        ('yield _zero("non_finite", "finite", inputs.cosine.count(None))', "pass"),
    ),
    _guard(
        41,
        "synapse_host.certificates:void_because",
        "a certificate belongs to one device",
        ("for field, noun in _NOUNS.items():", 'for field, noun in (x for x in _NOUNS.items() if x[0] != "device"):'),
    ),
    _guard(
        42,
        SUPERVISOR + "Supervisor._serve",
        "nothing is sent twice",
        (
            "return await self._begin(session, request, payload, stage, deadline=deadline, permit=permit)",
            "try:\n"
            "            return await self._begin(\n"
            "                session, request, payload, stage, deadline=deadline, permit=permit\n"
            "            )\n"
            "        except EngineCrashed as exc:\n"
            "            if exc.quarantined:\n"
            "                raise\n"
            "            return await self.submit(build, deadline=deadline, stage=stage)",
        ),
    ),
    _guard(
        42,
        "synapse_host.quarantine:Quarantine.same_input",
        "an operator is told that it was the same input twice",
        ("return first is not None and first == second", "return False"),
    ),
    _guard(
        43,
        "engines.llama.model:LlamaModel._run",
        "a context holds every token of its call",
        (
            "long = self._row_shape(min(size, _round_up(self.limit, GRANULE)), native_pooling, long=True)",
            "long = shape",
        ),
    ),
    _guard(
        43,
        "engines.llama.inputs:plan_chunks",
        "a call has no more rows than its context has sequences",
        (" or len(rows) == MAX_SEQUENCES):", "):"),
    ),
    _guard(
        43,
        "engines.llama.config:_integer",
        "LOAD's sizes are checked before a file is opened",
        ("and low <= int(digits) <= high", ""),
    ),
    _guard(
        44,
        "engines.llama.model:LlamaModel.rerank",
        "a Qwen3 GGUF is not served as a reranker",
        ("        if self._qwen3:\n", "        if False:\n"),
    ),
    _guard(
        44,
        "synapse_host.reranking:scaled",
        "the sigmoid is applied once",
        ("return sigmoid(logits) if not raw", "return sigmoid(sigmoid(logits)) if not raw"),
    ),
    _guard(
        45,
        "engines.llama.model:LlamaModel._row_shape",
        "a context has a sequence for each row",
        ("n_seq_max=1 if long else inputs.MAX_SEQUENCES", "n_seq_max=1"),
    ),
    _guard(
        45,
        "engines.llama.inputs:pool",
        "rows are pooled by their own bounds",
        (
            "return np.ascontiguousarray(states[ends - 1])",
            "return np.ascontiguousarray(states[ends - 1 - (ends > 512)])",
        ),
    ),
    _both(
        46,
        "synapse_host.admission.check_lengths",
        "a row without tokens is refused",
        Edit("synapse_host/admission.py", "if length < 1:", "if False:"),
        Edit("synapse_host/arguments.py", "if array.size == 0:", "if False:"),
    ),
    _guard(46, "synapse_host.arguments:check_texts", "no text at all is refused", ("if not count:", "if False:")),
    _both(
        47,
        "synapse_host.admission.check_lengths",
        "a row beyond the model's maximum is refused",
        Edit("synapse_host/admission.py", "if length > max_tokens:", "if False:"),
        Edit("synapse_host/arguments.py", "if length is not None and length > max_tokens:", "if False:"),
    ),
    _guard(
        47,
        "engines.protocol.connection:Connection._check_reply",
        "a reply has the model's width",
        ("(loaded is not None and dims != loaded)", "False"),
    ),
    _guard(
        48,
        "engines.cuda.binding:session",
        "the session may not fall back, and is asked where it runs",
        ('options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")', "pass"),
        ("if made.get_providers()[0] != wanted or elsewhere:", "if False:"),
    ),
    _guard(
        49,
        "synapse_host.gates:_rerank_gates",
        "a score's distance to the reference is a gate",
        ('yield bound("max_error", "agreement", _max_error(reference, scores))', "pass"),
    ),
    _guard(
        49,
        "synapse_host.certificates:void_because",
        "another OS build voids a certificate",
        ("for field, noun in _NOUNS.items():", 'for field, noun in (x for x in _NOUNS.items() if x[0] != "os_build"):'),
    ),
    _guard(
        50,
        "engines.ane.stderr_scan:StderrScan.check",
        "a compiler's failure on stderr refuses the load",
        ("if FAILED.search(line):", "if False:"),
    ),
    _guard(
        50,
        "engines.ane.artifact:prepared",
        "what was compiled belongs to one OS build",
        ("if found.os_build != os_build:", "if False:"),
    ),
    _guard(
        50,
        "synapse_host.watchdog:window",
        "LOAD has a silence window",
        (GET_WINDOW, f'float("inf") if phase is Phase.SETUP else {GET_WINDOW}'),
    ),
    _guard(
        51,
        "synapse_host.gates:_embed_gates",
        "a batch's row must equal the row alone",
        ('yield bound("batch_single", "batch", _batch_single(inputs))', "pass"),
    ),
    _guard(
        52,
        "synapse_host.health:LaneHealth.pong",
        "growth is measured from a generation's first PONG",
        ("if self.first_rss_mb is None:", "if True:"),
    ),
    _guard(
        53,
        "engines.machine:affinity",
        "threads and permits follow the affinity",
        ("return len(os.sched_getaffinity(0))", "return os.cpu_count() or 1"),
    ),
    _guard(
        54,
        PROCESS + "WorkerProcess",
        "a worker is a fresh interpreter, never a fork",
        (
            "            bufsize=0,\n",
            "            bufsize=0,\n            preexec_fn=lambda: _forked(list(command)),\n",
        ),
        (
            "class WorkerProcess:\n",
            "def _forked(command: list[str]) -> None:\n"
            "    import runpy\n\n"
            "    os.closerange(3, 1024)\n"
            "    sys.argv[:] = command[1:]\n"
            "    try:\n"
            "        runpy.run_path(command[1], run_name='__main__')\n"
            "    finally:\n"
            "        os._exit(0)\n\n\n"
            "class WorkerProcess:\n",
        ),
    ),
    _guard(
        55,
        TURNS + "Turns.drain",
        "the running request may finish",
        ("while self.held and self._until > self._loop.time():", "while False:"),
    ),
)


def _reports() -> Iterator[Report]:
    """Find the tests of the reports; a test without a guard has none."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                name := re.match(r"test_report_(\d\d)_", node.name)
            ):
                source = re.match(r"[\w.-]+/[\w.-]+#\d+", ast.get_docstring(node) or "")
                test = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                number = int(name[1])
                guards = [guard for guard in GUARDS if guard.report == number]
                yield Report(number, source[0] if source else "", test, guards)


REPORTS: Final = sorted(_reports(), key=lambda report: report.number)
CANNOT_APPLY: Final[tuple[CannotApply, ...]] = (
    CannotApply(
        39,
        "python/cpython#110778",
        "shared memory: tensors cross a socket here, and no segment exists that a resource tracker could unlink",
    ),
)
