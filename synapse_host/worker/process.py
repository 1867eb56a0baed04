"""One worker process: spawn, reduced environment, both pipes drained, exit watched, killed with its whole group.

:class:`Death` is the diagnosis of its end, which a strike, its callers and the log share.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeAlias

from msgspec import Struct

from synapse_host.placement.child import reap, signal_name
from synapse_host.worker.output import Stream

DUMP_GRACE: Final = 0.2
"""Seconds between SIGUSR1 (a traceback of every thread) and SIGKILL."""
DRAIN_LIMIT: Final = 0.25
"""Seconds the pipes are drained for after a worker's death: a grandchild may hold them open for ever."""
REAP_LIMIT: Final = 5.0
"""Seconds to wait for a killed process; one in an uninterruptible call must not block the host."""
CHUNK: Final = 64 * 1024
OOM_SCORE_ADJ: Final = "1000"
"""The most that Linux knows: the out-of-memory killer looks at nothing else first (proc_pid_oom_score_adj(5))."""


Output = Callable[[Stream, bytes], None]
Cause: TypeAlias = Literal["exit", "eof", "protocol", "silence", "handshake"]


class WorkerProcess:
    """A child that leads its own session. ``exited`` resolves once it is reaped, its group already killed.

    Make it from the loop's thread: a worker's parent-death signal is tied to the thread that spawned it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        output: Output,
        on_exit: Callable[[], None],
        stdin: int | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._output = output
        self._on_exit = on_exit
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        options: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            # Its own group keeps Ctrl-C at the host away from it.
            options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        self._popen = subprocess.Popen(  # noqa: S603 - an argument list from the matrix, never a shell
            list(command),
            # A lane lock that must stay held until the worker is gone, else nothing.
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            close_fds=True,
            env=dict(env),
            cwd=cwd,
            **options,
        )
        self.pid = self._popen.pid
        _first_to_go(self.pid)
        self.worker_pid: int | None = None
        """The pid of the worker itself, from HELLO: a launcher's is another than its own."""
        self._pidfd: int | None = None
        self._job: Any = None
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self._open_pipes: dict[Stream, IO[bytes]] = {"stdout": self._popen.stdout, "stderr": self._popen.stderr}
        self._drained: asyncio.Future[None] = self._loop.create_future()
        try:
            if sys.platform == "win32":
                from synapse_host.worker import windows

                self._job = windows.contain(int(self._popen._handle))  # type: ignore[attr-defined,unused-ignore]
            self._watch_pipes()
            self._watch_exit()
        except BaseException:
            # Nobody would ever watch it.
            for stream in list(self._open_pipes):
                self._close_pipe(stream)
            self._close_pidfd()
            self._kill_group()
            self._popen.kill()
            self._popen.wait()
            raise

    @property
    def running(self) -> bool:
        """False once the process is reaped."""
        return not self.exited.done()

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the signal's number; None while it runs, or where somebody else took its status."""
        return self.exited.result() if self.exited.done() else None

    def owns(self, pid: int | None) -> bool:
        """Return whether *pid* is this child or a descendant of it."""
        if pid is None or pid <= 0:
            return False
        if pid == self.pid:
            return True
        if sys.platform != "win32":
            # Only a descendant can be in our child's session, even when its parent has gone.
            with suppress(OSError, OverflowError):
                if os.getsid(pid) == self.pid:
                    return True
        import psutil

        try:
            return any(parent.pid == self.pid for parent in psutil.Process(pid).parents())
        except (psutil.Error, OverflowError):
            return False

    def dump(self) -> None:
        """Ask the worker's faulthandler for a traceback of every thread."""
        if sys.platform == "win32":
            return
        pid = self.worker_pid or self.pid
        if self.running and self.owns(pid):
            with suppress(OSError):
                os.kill(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the child and everything in its process group. Safe at any time: nothing is reaped before."""
        if not self.running:
            return
        if sys.platform == "win32":
            if self._job is not None:
                self._job.terminate()
            self._popen.kill()
            return
        # A wrapper's worker may lead another group; it is ours to kill as long as it descends from our live child.
        if self.worker_pid is not None and self.worker_pid != self.pid and self.owns(self.worker_pid):
            with suppress(OSError):
                os.kill(self.worker_pid, signal.SIGKILL)
        self._kill_group()
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self, limit: float) -> bool:
        """Wait until the process is reaped, at most *limit* seconds; return whether it is."""
        if self.running:
            await asyncio.wait({self.exited}, timeout=limit)
        return not self.running

    async def drain(self, limit: float = DRAIN_LIMIT) -> None:
        """Read what is left in both pipes, at most *limit* seconds, and close them."""
        if self._open_pipes:
            await asyncio.wait({self._drained}, timeout=limit)
        for stream in list(self._open_pipes):
            self._close_pipe(stream)

    async def destroy(self) -> bool:
        """Kill, reap and drain; return whether the death is confirmed."""
        self.kill()
        reaped = await self.wait(REAP_LIMIT)
        await self.drain()
        return reaped

    # --- pipes -------------------------------------------------------------------------------------------------------

    def _watch_pipes(self) -> None:
        for stream, pipe in self._open_pipes.items():
            if sys.platform == "win32":
                self._thread(self._read_pipe, stream, pipe.fileno())
            else:
                os.set_blocking(pipe.fileno(), False)
                self._loop.add_reader(pipe.fileno(), self._readable, stream, pipe.fileno())

    def _readable(self, stream: Stream, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._output(stream, data)
        else:
            self._close_pipe(stream)

    def _read_pipe(self, stream: Stream, fd: int) -> None:
        with suppress(OSError, RuntimeError):
            while data := os.read(fd, CHUNK):
                self._loop.call_soon_threadsafe(self._output, stream, data)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._close_pipe, stream)

    def _close_pipe(self, stream: Stream) -> None:
        pipe = self._open_pipes.pop(stream, None)
        if pipe is None:
            return
        if sys.platform != "win32":
            self._loop.remove_reader(pipe.fileno())
        with suppress(OSError):
            pipe.close()
        if not self._open_pipes and not self._drained.done():
            self._drained.set_result(None)

    # --- exit --------------------------------------------------------------------------------------------------------

    def _watch_exit(self) -> None:
        if sys.platform == "linux":
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:
                pass
            else:
                self._loop.add_reader(self._pidfd, self._exit_seen)
                return
        self._thread(self._wait_in_thread)

    def _wait_in_thread(self) -> None:
        """Wait for the exit without reaping: the group must be killed while the leader's pid can't be reused."""
        if sys.platform == "win32":
            self._popen.wait()
        elif sys.platform == "darwin":
            queue = select.kqueue()
            try:
                event = select.kevent(
                    self.pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD | select.KQ_EV_ONESHOT, select.KQ_NOTE_EXIT
                )
                # An error means that the process is a zombie already.
                with suppress(OSError):
                    queue.control([event], 1, None)
            finally:
                queue.close()
        else:
            with suppress(OSError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._exit_seen)

    def _exit_seen(self) -> None:
        self._close_pidfd()
        if self.exited.done():
            return
        self._kill_group()
        returncode = reap(self._popen)
        if self._job is not None:
            self._job.close()
        self.exited.set_result(returncode)
        self._on_exit()

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _kill_group(self) -> None:
        if sys.platform != "win32":
            # EPERM: on macOS a group with nothing but a zombie in it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    @staticmethod
    def _thread(target: Callable[..., None], *args: Any) -> None:
        try:
            threading.Thread(target=target, args=args, name="synapse-process", daemon=True).start()
        except RuntimeError as exc:
            # As for the process itself, whose limit is the same.
            raise OSError(errno.EAGAIN, "no thread can be started") from exc


def _first_to_go(pid: int) -> None:
    """Let the kernel take *pid*, and what it starts, before the host when memory ends; its loss costs one request.

    Linux only: macOS takes no such word from an ordinary user, and Windows kills nobody but refuses allocations.
    """
    if sys.platform == "linux":
        # Raising it is everybody's right. It may have exited already, or /proc may be read-only.
        with suppress(OSError):
            Path(f"/proc/{pid}/oom_score_adj").write_text(OOM_SCORE_ADJ)


class Death(Struct):
    """How a worker generation ended, with what it left behind."""

    generation: int
    cause: Cause
    message: str
    pid: int | None
    exit_status: int | None
    signal: str | None
    reaped: bool
    """False when the process could not be confirmed dead: nothing may replace it yet."""
    llama: bool = True
    """False for a worker of another engine: it has no llama-cpp-python to rebuild."""
    taken: bool = False
    """True where it ended by itself and somebody else took its exit status: how it ended isn't known."""
    log_tail: str = ""
    """The last output of this generation."""

    def describe(self) -> str:
        """Return one sentence for people."""
        if self.signal == "SIGILL" and not self.llama:
            return f"{self.message}: a library of this engine was built for another CPU (SIGILL)"
        if self.signal == "SIGILL":
            return f"{self.message}: llama-cpp-python was built for another CPU, rebuild it"
        if self.signal is not None and self.cause in ("exit", "eof", "handshake"):
            return f"{self.message} ({self.signal})"
        if self.exit_status is not None and self.cause in ("exit", "eof", "handshake"):
            return f"{self.message} (exit status {self.exit_status})"
        if self.taken:
            return f"{self.message} (exit status unknown: another part of this program took it)"
        return self.message


class StartFailed(Exception):
    """The worker died, hung or talked nonsense before the ACK: a strike."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.describe())
        self.death = death


async def diagnose(process: WorkerProcess, cause: Cause, message: str, *, generation: int, llama: bool) -> Death:
    """Kill and reap *process*, drain its pipes, and say how it ended."""
    own_end = cause != "silence" and not process.running
    reaped = await process.destroy()
    returncode = process.returncode
    return Death(
        generation=generation,
        cause=cause,
        message=message,
        pid=process.pid,
        # What we did to it explains nothing: only its own end is reported.
        exit_status=returncode if own_end and returncode is not None and returncode >= 0 else None,
        signal=signal_name(returncode) if own_end else None,
        reaped=reaped,
        taken=own_end and returncode is None,
        llama=llama,
    )
