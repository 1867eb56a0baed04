"""Real children: environment, pipes, exit, groups."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from synapse_host.placement import probe
from synapse_host.worker.process import Death, WorkerProcess, diagnose
from tests.support.lanes import alive, until

pytestmark = pytest.mark.process


class Child:
    """A Python child and what it wrote."""

    def __init__(self, code: str, *arguments: str, **options) -> None:
        self.written = {"stdout": b"", "stderr": b""}
        self.exits = 0
        self.process = WorkerProcess(
            [sys.executable, "-S", "-c", code, *arguments],
            env=options.pop("env", {}),
            cwd=None,
            output=self.output,
            on_exit=self.exited,
            **options,
        )

    def output(self, stream, data):
        self.written[stream] += data

    def exited(self):
        self.exits += 1

    async def wrote(self, text: bytes) -> None:
        await until(lambda: text in self.written["stdout"])


@pytest.fixture
def sigchld_ignored():
    """As inherited from a parent that ignores it: the kernel keeps no exit status of our children."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGCHLD")
async def test_a_status_that_somebody_else_took_is_unknown_and_not_zero(sigchld_ignored):
    child = Child("import time; print('up', flush=True); time.sleep(60)")
    await child.wrote(b"up")
    os.kill(child.process.pid, signal.SIGKILL)
    assert await child.process.wait(10)
    assert child.process.returncode is None and child.exits == 1
    death = await diagnose(child.process, "exit", "it ended", generation=1, llama=True)
    assert (death.exit_status, death.signal) == (None, None) and "exit status unknown" in death.describe()
    # A probe's answer is taken by its line alone then, not for one that contradicts its status.
    refused = 'print(\'{"status": "refused", "code": "cuda_no_driver"}\'); raise SystemExit(2)'
    assert probe.probe((sys.executable, "-c", refused), limit=30).code == "cuda_no_driver"
    silent = probe.probe((sys.executable, "-c", "raise SystemExit('boom')"), limit=30)
    assert (silent.code, silent.why) == ("probe_crashed", "its probe ended with an unknown status: boom")
    assert probe.version_line((sys.executable, "-c", "print('x 1')"), cwd=None, env={}) == "x 1"
    assert probe.probe((sys.executable, "-c", "import time; time.sleep(60)"), limit=0.5).code == "probe_timeout"


@pytest.mark.parametrize(
    ("signal_", "status", "cause", "llama", "taken", "end"),
    [
        ("SIGILL", None, "exit", True, False, ": llama-cpp-python was built for another CPU, rebuild it"),
        ("SIGILL", None, "eof", False, False, ": a library of this engine was built for another CPU (SIGILL)"),
        ("SIGKILL", None, "eof", True, False, " (SIGKILL)"),
        (None, 3, "handshake", True, False, " (exit status 3)"),
        (None, 3, "protocol", True, False, ""),
        (None, None, "exit", True, True, " (exit status unknown: another part of this program took it)"),
    ],
)
def test_a_death_in_one_sentence(signal_, status, cause, llama, taken, end):
    death = Death(1, cause, "it ended", 7, status, signal_, True, llama=llama, taken=taken)
    assert death.describe() == "it ended" + end


async def test_output_status_and_session():
    child = Child("import os, sys; print(os.getsid(0) == os.getpid()); sys.stderr.write('e'); sys.exit(7)")
    assert await child.process.wait(30)
    await child.process.drain()
    assert child.process.returncode == 7 and child.exits == 1
    assert child.written == {"stdout": b"True\n", "stderr": b"e"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' word for it")
async def test_when_memory_ends_the_kernel_takes_a_worker_before_the_host():
    before = Path("/proc/self/oom_score_adj").read_text()
    child = Child("import time; print('end', flush=True); time.sleep(600)")
    await child.wrote(b"end")
    assert Path(f"/proc/{child.process.pid}/oom_score_adj").read_text() == "1000\n"
    assert Path("/proc/self/oom_score_adj").read_text() == before
    await child.process.destroy()


GRANDCHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session={new})
print("pid", child.pid, "end", flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["sys.exit(0)", "time.sleep(600)"])
async def test_a_grandchild_in_the_group_dies_with_the_child(then):
    child = Child(GRANDCHILD.format(new=False, then=then))
    await child.wrote(b"end")
    pid = int(child.written["stdout"].split()[1])
    assert await child.process.destroy()
    await until(lambda: not alive(pid))


async def test_owns_the_child_its_descendants_and_nobody_else():
    child = Child(GRANDCHILD.format(new=True, then="time.sleep(600)"))
    await child.wrote(b"end")
    pid = int(child.written["stdout"].split()[1])
    process = child.process
    assert process.owns(process.pid) and process.owns(pid)
    assert not any(map(process.owns, (os.getpid(), 1, 0, -1, None)))
    # A wrapper's worker in a session of its own is killed through its pid.
    process.worker_pid = pid
    assert await process.destroy()
    await until(lambda: not alive(pid))


async def test_dump_asks_for_a_traceback_and_never_after_the_end():
    child = Child(
        "import faulthandler, signal, sys, time\n"
        "faulthandler.register(signal.SIGUSR1, file=sys.stderr)\nprint('end', flush=True)\ntime.sleep(600)"
    )
    await child.wrote(b"end")
    child.process.dump()
    await until(lambda: b"most recent call first" in child.written["stderr"])
    assert await child.process.destroy()
    child.process.dump()
    child.process.kill()


def no_pidfd(pid, flags=0):
    raise OSError("no pidfd here")


async def test_without_pidfd_a_thread_sees_the_exit(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    child = Child(GRANDCHILD.format(new=False, then="sys.exit(3)"))
    await child.wrote(b"end")
    pid = int(child.written["stdout"].split()[1])
    assert await child.process.wait(30)
    assert child.process.returncode == 3
    await until(lambda: not alive(pid))
    await child.process.drain()


@pytest.mark.parametrize("refused", [1, 2, 3, "thread"])
async def test_a_spawn_that_cannot_be_watched_leaves_nothing(monkeypatch, refused):
    """The limit of watches, or that of processes: told as the process's own refusal is."""
    loop = asyncio.get_running_loop()
    add_reader, calls = loop.add_reader, []

    def watch(*args):
        calls.append(args)
        if len(calls) == refused:
            raise OSError(28, "no watches left")
        add_reader(*args)

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(loop, "add_reader", watch)
    if refused == "thread":
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="no thread can be started" if refused == "thread" else "no watches left"):
        Child("import time; time.sleep(600)")
