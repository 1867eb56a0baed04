"""The 55 public reports, the test of each, and the guard that the test protects.

A guard is code that keeps the reported fault away. Its edits take it out of a copy of the tree: ``old`` stands exactly
once in the file, ``new`` is what the code would be without it. Where two parts each suffice, a guard's edits take both.
``tests/faults/guards.py`` removes one guard at a time and expects the test to fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEATH: Final = "tests/faults/reports/test_death.py"
REPLIES: Final = "tests/faults/reports/test_replies.py"
DESCRIPTORS: Final = "tests/faults/reports/test_descriptors.py"
NUMBERS: Final = "tests/faults/reports/test_numbers.py"


@dataclass(frozen=True)
class Edit:
    """One textual change of a file of the tree."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Guard:
    """What keeps a fault away, and how to take it out."""

    where: str
    """Dotted path of the code."""
    what: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Report:
    """One public report with its test."""

    number: int
    source: str
    """``owner/repository#issue``; the page's first where it names several."""
    file: str
    slug: str
    guards: tuple[Guard, ...]

    @property
    def test(self) -> str:
        """The test's id, as pytest takes it."""
        return f"{self.file}::test_report_{self.number:02}_{self.slug}"


@dataclass(frozen=True)
class CannotApply:
    """A report about a component that does not exist here."""

    number: int
    source: str
    missing: str


def _guard(where: str, what: str, *edits: tuple[str, str]) -> Guard:
    """A guard whose edits are all in the module that *where* starts with."""
    module = where.partition(":")[0]
    file = module.replace(".", "/") + ".py"
    return Guard(where.replace(":", "."), what, tuple(Edit(file, old, new) for old, new in edits))


def _both(where: str, what: str, *edits: Edit) -> Guard:
    return Guard(where, what, edits)


SESSION, SUPERVISOR, PROCESS = "synapse_host.session:", "synapse_host.supervisor:", "synapse_host.process:"
BIRTH, DEATH_OF = "synapse_host.birth:", "synapse_host.death:"
GENERATIONS, STANDING, TURNS = "synapse_host.generations:", "synapse_host.standing:", "synapse_host.turns:"
GET_WINDOW = "getattr(windows, window_name(request, phase))"
REFUSED = "except (ConnectionRefusedError, FileNotFoundError):\n            with suppress(FileNotFoundError):\n"

REPORTS: Final[tuple[Report, ...]] = (
    Report(
        1,
        "huggingface/text-embeddings-inference#694",
        DEATH,
        "one_input_stops_the_server",
        (
            _guard(
                SESSION + "Session._tick",
                "silence past the window kills this lane's worker",
                ("if self._watchdog.expired(now, late=now - self._due):", "if False:"),
            ),
        ),
    ),
    Report(
        2,
        "triton-inference-server/server#5381",
        DEATH,
        "death_by_the_kernel",
        (
            _guard(
                SESSION + "Session._lost",
                "the end of the stream and the exit each end the open request",
                (
                    'self._fail("eof", f"the worker\'s connection ended {where}{torn}")',
                    "pass",
                ),
                (
                    'self._loop.call_later(EXIT_GRACE, self._fail, "exit", "the worker exited")',
                    "pass",
                ),
            ),
        ),
    ),
    Report(
        3,
        "triton-inference-server/server#7230",
        DEATH,
        "zombie_and_good_health",
        (
            _guard(
                PROCESS + "WorkerProcess._exit_seen",
                "a dead child is reaped when its exit is seen",
                ("self._kill_group()\n        returncode = self._popen.wait()", "returncode = -9"),
            ),
        ),
    ),
    Report(
        4,
        "triton-inference-server/server#8841",
        DEATH,
        "an_abort_is_counted",
        (
            _guard(
                STANDING + "Standing.charge",
                "every unplanned death is a strike",
                ("self.quarantine.strike(Strike(death.generation, death.cause, now, fingerprint))", "pass"),
            ),
        ),
    ),
    Report(
        5,
        "triton-inference-server/server#8448",
        DEATH,
        "a_death_with_500_requests_queued",
        (
            _guard(
                SUPERVISOR + "Supervisor.died",
                "a dead exchange hands its turn on",
                (
                    "exchange.waiter.set_exception(error)\n        self._release(exchange)",
                    "exchange.waiter.set_exception(error)",
                ),
            ),
        ),
    ),
    Report(
        6,
        "vllm-project/vllm#41530",
        DEATH,
        "one_of_three_is_stopped",
        (
            _guard(
                PROCESS + "WorkerProcess.kill",
                "SIGKILL, which a stopped process takes too",
                ("os.kill(self.pid, signal.SIGKILL)", "os.kill(self.pid, signal.SIGTERM)"),
                ("os.killpg(self.pid, signal.SIGKILL)", "os.killpg(self.pid, signal.SIGTERM)"),
            ),
        ),
    ),
    Report(
        7,
        "vllm-project/vllm#2050",
        DEATH,
        "ten_waiters_of_a_dead_worker",
        (
            _guard(
                SUPERVISOR + "Supervisor.died",
                "the open request gets its typed error",
                (
                    "            exchange.waiter.set_exception(error)\n        self._release",
                    "            pass\n        self._release",
                ),
            ),
        ),
    ),
    Report(
        8,
        "vllm-project/vllm#55510",
        DEATH,
        "the_host_is_killed",
        (
            _guard(
                "engines.runtime.transport:PeerWatcher._run",
                "a worker whose host is gone ends in mid-computation",
                (
                    '"also when it comes in mid-exchange".\n            self._exit(0)',
                    '"also when it comes in mid-exchange".\n            pass',
                ),
            ),
        ),
    ),
    Report(
        9,
        "huggingface/trl#6628",
        DEATH,
        "ends_of_pipes_that_siblings_hold",
        (
            _guard(
                PROCESS + "WorkerProcess",
                "a worker inherits no descriptor",
                ("close_fds=True", "close_fds=False"),
            ),
        ),
    ),
    Report(
        10,
        "huggingface/sentence-transformers#3920",
        DEATH,
        "an_error_that_cannot_be_sent",
        (
            _both(
                "engines.runtime.dispatch.Dispatcher._err",
                "an error leaves as valid UTF-8",
                Edit("engines/runtime/dispatch.py", 'text = msg.encode(errors="replace").decode()', "text = msg"),
                Edit(
                    "engines/protocol/errors.py",
                    'msg = msg.encode("utf-8", "backslashreplace").decode("utf-8")',
                    "pass",
                ),
            ),
            _guard(
                "engines.runtime.dispatch:Dispatcher._err",
                "an error is short enough for any frame",
                ("if not text or len(encode(err)) <= limit:", "if True:"),
            ),
        ),
    ),
    Report(
        11,
        "noxdafox/pebble#97",
        DEATH,
        "the_peer_dies_while_the_host_sends",
        (
            _guard(
                SESSION + "Session.begin",
                "the window covers the sending of the request",
                (
                    "if self._timer is None or self._due > due:",
                    "if not self._channel.sending and (self._timer is None or self._due > due):",
                ),
            ),
        ),
    ),
    Report(
        12,
        "python/cpython#10441",
        DEATH,
        "exit_inside_a_request",
        (
            _guard(
                DEATH_OF + "diagnose",
                "the diagnosis waits for the exit that explains the end of the stream",
                (
                    "exit_status=returncode if own_end and returncode is not None and returncode >= 0 else None",
                    "exit_status=None",
                ),
            ),
        ),
    ),
    Report(
        13,
        "joblib/loky#360",
        DEATH,
        "the_host_is_killed_while_c_code_holds_the_gil",
        (
            _guard(
                "engines.runtime.main:die_with_parent",
                "the kernel kills a worker whose parent died",
                ("ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)", "pass"),
            ),
        ),
    ),
    Report(
        14,
        "Lightning-AI/LitServe#532",
        DEATH,
        "a_worker_that_crashed_while_idle",
        (
            _guard(
                SUPERVISOR + "Supervisor.died",
                "health forgets a dead worker at once",
                ("self._workers.forget(session)", "pass"),
            ),
        ),
    ),
    Report(
        15,
        "dask/distributed#1303",
        DEATH,
        "a_worker_that_ignores_every_polite_word",
        (
            _guard(
                SESSION + "Session.stop",
                "a planned stop ends in SIGKILL and the reaping",
                (
                    "self._channel.abort()\n        await process.destroy()\n\n    async def buried",
                    "self._channel.abort()\n\n    async def buried",
                ),
            ),
        ),
    ),
    Report(
        16,
        "dask/distributed#8537",
        DEATH,
        "a_loop_that_holds_the_gil",
        (
            _guard(
                "synapse_host.watchdog:Watchdog.expired",
                "the host decides, from outside",
                ("self._heard(now)\n        return True", "return False"),
            ),
            _guard(
                SESSION + "Session._bury",
                "a silent worker of ours is asked for its stacks",
                ("process.dump()\n", "pass\n"),
            ),
        ),
    ),
    Report(
        17,
        "dask/distributed#1863",
        DEATH,
        "no_storm_of_restarts",
        (
            _guard(
                "synapse_host.quarantine:Quarantine.strike",
                "two strikes in a row shut the lane",
                ("self._shut_at = strike.at", "pass"),
            ),
        ),
    ),
    Report(
        18,
        "ollama/ollama#7779",
        DEATH,
        "unload_that_never_answers",
        (
            _guard(
                "synapse_host.watchdog:window",
                "UNLOAD has a silence window",
                (GET_WINDOW, f'float("inf") if phase is Phase.CONTROL else {GET_WINDOW}'),
            ),
        ),
    ),
    Report(
        19,
        "ollama/ollama#14093",
        DEATH,
        "stopped_unexpectedly_and_no_word_why",
        (
            _guard(
                DEATH_OF + "diagnose",
                "a death names its signal",
                ("signal=signal_name(returncode) if own_end else None", "signal=None"),
            ),
            _guard(
                DEATH_OF + "diagnose",
                "a death carries the last output",
                ("log_tail=ring.render()", 'log_tail=""'),
            ),
            _guard(
                "synapse_host.logring:LogRing.write",
                "the ring keeps the last bytes, not the first",
                ("data = data[len(data) - self.capacity :]", "data = data[: self.capacity]"),
            ),
        ),
    ),
    Report(
        20,
        "ollama/ollama#12472",
        DEATH,
        "a_kill_that_does_not_take",
        (
            _guard(
                GENERATIONS + "Generations._spawn",
                "no worker beside one that may still live",
                (
                    "if process is not None and process.running:\n                # Never",
                    "if False:\n                # Never",
                ),
            ),
            _guard(
                PROCESS + "WorkerProcess.destroy",
                "the host waits for a killed process for a bounded time",
                ("reaped = await self.wait(REAP_LIMIT)", "reaped = await self.wait(1e6)"),
            ),
        ),
    ),
    Report(
        21,
        "sgl-project/sglang#3836",
        DEATH,
        "idle_is_not_silence",
        (
            _guard(
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
        ),
    ),
    Report(
        22,
        "NVIDIA/TensorRT-LLM#15612",
        DEATH,
        "a_hang_while_stopping",
        (
            _guard(
                SESSION + "Session.stop",
                "SHUTDOWN may take its grace and no more",
                ("await process.wait(grace)", "await process.wait(1e6)"),
            ),
            _guard(
                PROCESS + "WorkerProcess",
                "a worker leads a group of its own: all of it dies, and nothing else",
                ('{"start_new_session": True}', "{}"),
            ),
        ),
    ),
    Report(
        23,
        "xorbitsai/inference#3202",
        DEATH,
        "stop_called_many_times",
        (
            _guard(
                SUPERVISOR + "Supervisor.aclose",
                "all stops share one, and wait for it",
                ("if self._closer is None:", "if True:"),
            ),
        ),
    ),
    Report(
        24,
        "redis/redis-py#2624",
        REPLIES,
        "a_cancelled_command_leaves_its_reply",
        (
            _guard(
                SUPERVISOR + "Supervisor.overdue",
                "a caller that leaves frees nothing: its exchange keeps the stream until the reply is drained",
                (
                    "expire(exchange.waiter, self.spec.lane_id, exchange.stage)",
                    "expire(exchange.waiter, self.spec.lane_id, exchange.stage)\n"
                    "        self._workers.session.open = None\n        self._release(exchange)",
                ),
            ),
        ),
    ),
    Report(
        25,
        "huggingface/sentence-transformers#2955",
        REPLIES,
        "two_callers_share_a_pool",
        (
            _guard(
                "engines.protocol.connection:Connection._check_reply",
                "a reply names the request it answers",
                ("if known.req_id != request.req_id:", "if False:"),
            ),
        ),
    ),
    Report(
        26,
        "ollama/ollama#6187",
        REPLIES,
        "shuffled_batches",
        (
            _guard(
                "synapse_host.parts:collect",
                "each exchange's rows land in their own place",
                (
                    "answer[part.rows.start : part.rows.stop] = await send(part)",
                    "answer[: len(part.rows)] = await send(part)",
                ),
            ),
        ),
    ),
    Report(
        27,
        "ollama/ollama#6262",
        REPLIES,
        "vectors_that_change_with_the_batch",
        (
            _guard(
                "engines.llama.binding:NativeContext.run_rows",
                "every row is a sequence of its own",
                (
                    "self._sequences[:n] = np.repeat(self._id_addresses[:rows], lengths)",
                    "self._sequences[:n] = self._id_addresses[0]",
                ),
            ),
        ),
    ),
    Report(
        28,
        "huggingface/text-embeddings-inference#424",
        REPLIES,
        "a_full_queue",
        (
            _guard(
                TURNS + "Turns.take",
                "a full queue answers",
                ("if len(self._waiters) >= self._limit:", "if False:"),
            ),
        ),
    ),
    Report(
        29,
        "bytedance/SandboxFusion#53",
        DESCRIPTORS,
        "output_that_nobody_reads",
        (
            _guard(
                PROCESS + "WorkerProcess._watch_pipes",
                "both pipes are read all the time",
                ("self._loop.add_reader(pipe.fileno(), self._readable, name, pipe.fileno())", "pass"),
            ),
        ),
    ),
    Report(
        30,
        "agronholm/anyio#1166",
        DESCRIPTORS,
        "output_while_stopping",
        (
            _guard(
                PROCESS + "WorkerProcess.destroy",
                "the kill comes before any wait for the pipes",
                ("self.kill()\n        reaped", "await self.drain(1e6)\n        self.kill()\n        reaped"),
            ),
        ),
    ),
    Report(
        31,
        "python/cpython#151983",
        DESCRIPTORS,
        "a_grandchild_that_holds_stdout",
        (
            _guard(
                PROCESS + "WorkerProcess.drain",
                "draining after a death is bounded",
                ("await asyncio.wait({self._drained}, timeout=limit)", "await asyncio.wait({self._drained})"),
            ),
        ),
    ),
    Report(
        32,
        "MagicStack/uvloop#185",
        DESCRIPTORS,
        "a_spawn_that_fails",
        (
            _guard(
                BIRTH + "Birth.run",
                "whatever a start ends in, its listener is closed",
                ("listener.close()\n\n    def _listen", "pass\n\n    def _listen"),
            ),
        ),
    ),
    Report(
        33,
        "quintel/pyetm#205",
        DESCRIPTORS,
        "few_descriptors",
        (
            _guard(
                SESSION + "Session.start",
                "no descriptors left is a typed error without a strike",
                ("raise no_resources(self.spec.lane_id, exc) from exc", "raise"),
            ),
        ),
    ),
    Report(
        34,
        "Kludex/uvicorn#433",
        DESCRIPTORS,
        "a_socket_that_is_left",
        (
            _guard(
                "synapse_host.listener:_clear_stale",
                "a dead socket is removed",
                (
                    REFUSED + "                path.unlink()",
                    REFUSED + "                pass",
                ),
            ),
            _guard(
                "synapse_host.listener:_clear_stale",
                "what is no socket is left alone",
                ("if not stat.S_ISSOCK(entry.st_mode):", "if not stat.S_ISSOCK(entry.st_mode) and path.unlink():"),
            ),
            _guard(
                "synapse_host.listener:_clear_stale",
                "a living listener is left alone",
                ("probe.connect(os.fspath(path))", "raise ConnectionRefusedError"),
            ),
        ),
    ),
    Report(
        35,
        "benoitc/gunicorn#1298",
        DESCRIPTORS,
        "who_may_unlink",
        (
            _guard(
                "synapse_host.listener:RuntimeDirectory._unlink",
                "only the very file that was bound is unlinked",
                ("if made == (entry.st_dev, entry.st_ino):", "if True:"),
            ),
            _guard(
                "synapse_host.listener:RuntimeDirectory._unlink",
                "a missing file is fine",
                (
                    "with suppress(OSError):\n            entry = path.lstat()\n            if made",
                    "with suppress(ZeroDivisionError):\n            entry = path.lstat()\n            if made",
                ),
            ),
        ),
    ),
    Report(
        36,
        "dotnet/runtime#79503",
        DESCRIPTORS,
        "long_paths",
        (
            _guard(
                "synapse_host.listener:RuntimeDirectory.socket_path",
                "a path that doesn't fit a socket address is replaced by a short one",
                ("return len(os.fsencode(path)) < SUN_PATH", "return True"),
            ),
            _guard(
                "synapse_host.listener:RuntimeDirectory.socket_path",
                "its length is counted in bytes",
                ("return len(os.fsencode(path)) < SUN_PATH", "return len(str(path)) < SUN_PATH"),
            ),
        ),
    ),
    Report(
        37,
        "python/cpython#124779",
        DESCRIPTORS,
        "connect_and_drop",
        (
            _guard(
                "synapse_host.listener:UnixListener.accept",
                "accepting goes on after a stranger",
                (
                    'connection.close()\n            _log.warning("a foreign',
                    'connection.close()\n            raise ConnectionError\n            _log.warning("a foreign',
                ),
            ),
            _guard(
                "synapse_host.pipe:PIPE_TYPE_BYTE",
                "the pipe is a stream of bytes",
                ("PIPE_TYPE_BYTE: Final = 0x0", "PIPE_TYPE_BYTE: Final = 0x4"),
            ),
        ),
    ),
    Report(
        38,
        "python/cpython#10305",
        DESCRIPTORS,
        "length_fields",
        (
            _guard(
                "engines.protocol.framing:FrameReader.next_control",
                "a length is compared with max_frame before anything is allocated",
                ("self._refuse(size, None)", "pass"),
            ),
        ),
    ),
    Report(
        40,
        "ggml-org/llama.cpp#14812",
        NUMBERS,
        "nan_after_a_thousand_requests",
        (
            _guard(
                SUPERVISOR + "Supervisor.replied",
                "a reply that is not finite reaches nobody",
                ("if not finite:", "if False:"),
            ),
        ),
    ),
    Report(
        41,
        "ollama/ollama#15582",
        NUMBERS,
        "nan_on_one_device_only",
        (
            _guard(
                "synapse_host.gates:_embed_gates",
                "a certification counts answers that are not finite",
                ('yield _zero("non_finite", "finite", inputs.cosine.count(None))', "pass"),
            ),
            _guard(
                "synapse_host.certificates:void_because",
                "a certificate belongs to one device",
                ('compare("the device", bound.device, now.device)', "pass"),
            ),
        ),
    ),
    Report(
        42,
        "huggingface/text-embeddings-inference#932",
        NUMBERS,
        "a_poison_request",
        (
            _guard(
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
                "synapse_host.quarantine:Quarantine.same_input",
                "an operator is told that it was the same input twice",
                ("return first is not None and first == second", "return False"),
            ),
        ),
    ),
    Report(
        43,
        "ggml-org/llama.cpp#12836",
        NUMBERS,
        "sizes_on_which_the_library_asserts",
        (
            _guard(
                "engines.llama.model:LlamaModel._run",
                "a context holds every token of its call",
                (
                    "long = self._row_shape(min(size, _round_up(self.limit, GRANULE)), native_pooling, long=True)",
                    "long = shape",
                ),
            ),
            _guard(
                "engines.llama.inputs:plan_chunks",
                "a call has no more rows than its context has sequences",
                (" or len(rows) == MAX_SEQUENCES):", "):"),
            ),
            _guard(
                "engines.llama.config:_integer",
                "LOAD's sizes are checked before a file is opened",
                ("and low <= int(digits) <= high", ""),
            ),
        ),
    ),
    Report(
        44,
        "ggml-org/llama.cpp#25447",
        NUMBERS,
        "rerank_scores_that_are_no_scores",
        (
            _guard(
                "engines.llama.model:LlamaModel.rerank",
                "a Qwen3 GGUF is not served as a reranker",
                ("        if self._qwen3:\n", "        if False:\n"),
            ),
            _guard(
                "synapse_host.reranking:scaled",
                "the sigmoid is applied once",
                ("return sigmoid(logits) if not raw", "return sigmoid(sigmoid(logits)) if not raw"),
            ),
        ),
    ),
    Report(
        45,
        "abetlen/llama-cpp-python#2051",
        NUMBERS,
        "lengths_around_a_batch",
        (
            _guard(
                "engines.llama.model:LlamaModel._row_shape",
                "a context has a sequence for each row",
                ("n_seq_max=1 if long else inputs.MAX_SEQUENCES", "n_seq_max=1"),
            ),
            _guard(
                "engines.llama.inputs:pool",
                "rows are pooled by their own bounds",
                (
                    "return np.ascontiguousarray(states[ends - 1])",
                    "return np.ascontiguousarray(states[ends - 1 - (ends > 512)])",
                ),
            ),
        ),
    ),
    Report(
        46,
        "ggml-org/llama.cpp#5733",
        NUMBERS,
        "nothing_to_compute",
        (
            _both(
                "synapse_host.admission.check_lengths",
                "a row without tokens is refused",
                Edit("synapse_host/admission.py", "if length < 1:", "if False:"),
                Edit("synapse_host/tokenize.py", "if array.size == 0:", "if False:"),
            ),
            _guard(
                "synapse_host.arguments:check_texts",
                "no text at all is refused",
                ("if not count:", "if False:"),
            ),
        ),
    ),
    Report(
        47,
        "ggml-org/llama.cpp#7277",
        NUMBERS,
        "an_input_that_is_too_long",
        (
            _guard(
                "synapse_host.admission:check_lengths",
                "a row beyond the model's maximum is refused",
                ("if length > max_tokens:", "if False:"),
            ),
            _guard(
                "engines.protocol.connection:Connection._check_reply",
                "a reply has the model's width",
                ("(loaded is not None and dims != loaded)", "False"),
            ),
        ),
    ),
    Report(
        48,
        "microsoft/onnxruntime#23372",
        NUMBERS,
        "cuda_that_is_not_there",
        (
            _guard(
                "engines.cuda.binding:session",
                "the session may not fall back, and is asked where it runs",
                ('options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")', "pass"),
                ("if made.get_providers()[0] != wanted or elsewhere:", "if False:"),
            ),
        ),
    ),
    Report(
        49,
        "microsoft/onnxruntime#32569",
        NUMBERS,
        "wrong_but_finite",
        (
            _guard(
                "synapse_host.gates:_rerank_gates",
                "a score's distance to the reference is a gate",
                ('yield bound("max_error", "agreement", _max_error(reference, scores))', "pass"),
            ),
            _guard(
                "synapse_host.certificates:void_because",
                "another OS build voids a certificate",
                ('compare("the operating system build", bound.os_build, now.os_build)', "pass"),
            ),
        ),
    ),
    Report(
        50,
        "apple/coremltools#2758",
        NUMBERS,
        "core_ml_compilers",
        (
            _guard(
                "engines.ane.stderr_scan:StderrScan.check",
                "a compiler's failure on stderr refuses the load",
                ("if FAILED.search(line):", "if False:"),
            ),
            _guard(
                "engines.ane.artifact:prepared",
                "what was compiled belongs to one OS build",
                ("if found.os_build != os_build:", "if False:"),
            ),
            _guard(
                "synapse_host.watchdog:window",
                "LOAD has a silence window",
                (GET_WINDOW, f'float("inf") if phase is Phase.SETUP else {GET_WINDOW}'),
            ),
        ),
    ),
    Report(
        51,
        "microsoft/onnxruntime#9799",
        NUMBERS,
        "numbers_that_depend_on_the_shape",
        (
            _guard(
                "synapse_host.gates:_embed_gates",
                "a batch's row must equal the row alone",
                ('yield bound("batch_single", "batch", _batch_single(inputs))', "pass"),
            ),
        ),
    ),
    Report(
        52,
        "microsoft/onnxruntime#9313",
        NUMBERS,
        "memory_that_grows",
        (
            _guard(
                "synapse_host.health:LaneHealth.pong",
                "growth is measured from a generation's first PONG",
                ("if self.first_rss_mb is None:", "if True:"),
            ),
        ),
    ),
    Report(
        53,
        "microsoft/onnxruntime#10166",
        NUMBERS,
        "threads_under_a_cpuset",
        (
            _guard(
                "engines.machine:affinity",
                "threads and permits follow the affinity",
                ("return len(os.sched_getaffinity(0))", "return os.cpu_count() or 1"),
            ),
        ),
    ),
    Report(
        54,
        "vllm-project/vllm#12754",
        NUMBERS,
        "a_fresh_interpreter",
        (
            _guard(
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
        ),
    ),
    Report(
        55,
        "ray-project/ray#64181",
        NUMBERS,
        "running_requests_at_sigterm",
        (
            _guard(
                TURNS + "Turns.drain",
                "the running request may finish",
                ("while self.held and self._until > self._loop.time():", "while False:"),
            ),
        ),
    ),
)

CANNOT_APPLY: Final[tuple[CannotApply, ...]] = (
    CannotApply(
        39,
        "python/cpython#110778",
        "shared memory: tensors cross a socket here, and no segment exists that a resource tracker could unlink",
    ),
)
