"""How a worker generation ended: the diagnosis that its strike, its callers and the log share."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from synapse_host.placement.child import signal_name
from synapse_host.worker.process import WorkerProcess

Cause: TypeAlias = Literal["exit", "eof", "protocol", "silence", "handshake"]


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
