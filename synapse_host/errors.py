"""Every error a caller can meet: one class per code, with its class, retry hint and exit code.

The table is interfaces.md's; ``docs/operations.md`` says what to do about each.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, TypeAlias

from engines.protocol.errors import ErrorCode

Place: TypeAlias = Literal["python", "command", "operator"]
"""Where a message is read: in a program, from a command with a host of its own, from a verb about a running host."""

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_LANE: Final = 3
EXIT_HARDWARE: Final = 4
EXIT_DEADLINE: Final = 5
EXIT_INTERRUPTED: Final = 130


class SynapseError(Exception):
    """A request or command failed. ``details`` is a JSON-ready dict.

    ``advice`` is what to do next where that differs by the reader's place: one sentence for each, none where nothing
    can be done from there. ``message`` and ``str()`` speak to a program; :meth:`said` speaks to the others.
    """

    code: ClassVar[str]
    transient: ClassVar[bool] = False
    default_retry_after_ms: ClassVar[int | None] = None
    safe_to_retry: bool = False
    exit_code: int = EXIT_FAILED

    def __init__(
        self,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        retry_after_ms: int | None = None,
        advice: Mapping[Place, str] | None = None,
    ) -> None:
        self._what = message
        self._advice = advice or {}
        self.message = self.said("python")
        super().__init__(self.message)
        self.details: dict[str, Any] = details or {}
        self.retry_after_ms = retry_after_ms if retry_after_ms is not None else self.default_retry_after_ms

    def said(self, place: Place) -> str:
        """Return the message in the words of a reader's place."""
        advice = self._advice.get(place)
        return f"{self._what} {advice}" if advice else self._what

    def to_dict(self, place: Place = "python") -> dict[str, Any]:
        """Return the ``error`` object of interfaces.md, said for *place*; ``retry_after_ms`` only where it has one."""
        document: dict[str, Any] = {"code": self.code, "class": "transient" if self.transient else "permanent"}
        if self.retry_after_ms is not None:
            document["retry_after_ms"] = self.retry_after_ms
        document["safe_to_retry_same_request"] = self.safe_to_retry
        document["message"] = self.said(place)
        document["details"] = self.details
        return document


class EngineCrashed(SynapseError):
    """The worker died, hung or talked nonsense; or the lane is quarantined (``details["quarantined"]``).

    details: lane_id, stage (the operation), cause (exit, eof, protocol, silence, handshake), exit status or signal
    name, log_tail, quarantined.
    """

    code = "engine_crashed"
    transient = True
    default_retry_after_ms = 250
    safe_to_retry = True

    def __init__(
        self,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        retry_after_ms: int | None = None,
        advice: Mapping[Place, str] | None = None,
    ) -> None:
        super().__init__(message, details=details, retry_after_ms=retry_after_ms, advice=advice)
        self.exit_code = EXIT_LANE if self.quarantined else EXIT_FAILED

    @property
    def quarantined(self) -> bool:
        """True when the lane is shut and nothing was sent."""
        return bool(self.details.get("quarantined"))


class ProbeRequired(SynapseError):
    """A legacy lane is quarantined until ``host.probe(lane)`` succeeds or the host is made anew."""

    code = "probe_required"
    exit_code = EXIT_LANE


class LaneRefused(SynapseError):
    """The worker is not the one this host was deployed with; details: reason, expected, observed."""

    code = "lane_refused"
    exit_code = EXIT_LANE


class NotCertified(SynapseError):
    """The lane needs a valid certificate for this model on this machine."""

    code = "not_certified"
    exit_code = EXIT_LANE


class DeadlineExceeded(SynapseError):
    """The caller's deadline passed; the worker is unharmed and the late reply is discarded."""

    code = "deadline_exceeded"
    transient = True
    exit_code = EXIT_DEADLINE


class QueueFull(SynapseError):
    """Too many requests wait for this lane."""

    code = "queue_full"
    transient = True
    default_retry_after_ms = 100
    safe_to_retry = True


class ShapeCompiling(SynapseError):
    """The deadline passed while a shape compiles; the compilation goes on. details: lane_id, shape."""

    code = "shape_compiling"
    transient = True
    default_retry_after_ms = 1000
    safe_to_retry = True


class AneLaneBusy(SynapseError):
    """Another host of this user drives the Neural Engine."""

    code = "ane_lane_busy"
    transient = True
    default_retry_after_ms = 1000
    safe_to_retry = True


class ModelInUse(SynapseError):
    """Unload while requests run or drain."""

    code = "model_in_use"


class SequenceTooLong(SynapseError):
    """details: index, tokens, max_tokens."""

    code = "sequence_too_long"
    exit_code = EXIT_USAGE


class InvalidRequest(SynapseError):
    """The request makes no sense; nothing was sent."""

    code = "invalid_request"
    exit_code = EXIT_USAGE


class UnknownModel(SynapseError):
    """No such model; details: known."""

    code = "unknown_model"
    exit_code = EXIT_USAGE


class BundleInvalid(SynapseError):
    """A model bundle can't be used."""

    code = "bundle_invalid"
    exit_code = EXIT_USAGE


class MatrixInvalid(SynapseError):
    """hw_matrix.yaml has an error; the message names file, line, key and the nearest valid key."""

    code = "matrix_invalid"
    exit_code = EXIT_USAGE


class StorageFull(SynapseError):
    """A file system or quota has no room for what a command or request writes. details: path, where it is known."""

    code = "storage_full"


class Interrupted(SynapseError):
    """Ctrl-C, SIGTERM or a lost terminal ended a command; what it had started has ended."""

    code = "interrupted"
    safe_to_retry = True
    exit_code = EXIT_INTERRUPTED


def of_os(
    exc: OSError, message: str, *, otherwise: type[SynapseError], details: dict[str, Any] | None = None
) -> SynapseError:
    """Return the error for a failed system call: StorageFull where there is no room, else one of class *otherwise*."""
    kind = StorageFull if exc.errno in _NO_ROOM else otherwise
    return kind(message, details=details)


_NO_ROOM: Final = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


class WorkerError(SynapseError):
    """The worker answered ERR and lives; ``code`` is one of :class:`~engines.protocol.errors.ErrorCode`."""

    code = "inference_failed"


class BackendMissing(WorkerError):
    """The hardware, driver or library of this engine is missing."""

    code = "backend_missing"
    exit_code = EXIT_HARDWARE


def _worker_error(code: ErrorCode) -> type[WorkerError]:
    name = "".join(part.capitalize() for part in code.value.split("_"))
    fields: dict[str, Any] = {
        "code": code.value,
        "__doc__": f"The worker answered ``{code.value}``.",
        "__module__": __name__,
    }
    if code in (ErrorCode.OOM, ErrorCode.ANE_RESOURCES_EXHAUSTED):
        fields |= {"transient": True, "default_retry_after_ms": 250, "safe_to_retry": True}
    if code is ErrorCode.INVALID_REQUEST:
        fields |= {"exit_code": EXIT_USAGE}
    return type(name, (WorkerError,), fields)


WORKER_ERRORS: Final[dict[ErrorCode, type[WorkerError]]] = {
    code: BackendMissing if code is ErrorCode.BACKEND_MISSING else _worker_error(code) for code in ErrorCode
}
"""The class each ERR code becomes."""
