"""Every error a caller can meet: one class per code, with its class, retry hint and exit code.

The table is interfaces.md's; ``docs/operations.md`` says what to do about each. What an error tells is bounded here,
once for all: it quotes what callers pass, what files hold and what workers say, any of which may have megabytes.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from engines.protocol.errors import ErrorCode

Place: TypeAlias = Literal["python", "command", "operator"]
"""Where a message is read: in a program, from a command with a host of its own, from a verb about a running host."""
MAX_MESSAGE: Final = 4096
"""Characters of a message; of a longer one its beginning and its end are kept."""
MAX_TEXT: Final = 16_384
"""Characters of one text in ``details``: more than a worker's log tail has."""
MAX_INNER_TEXT: Final = 256
"""Characters of a text in a list or an object of ``details``, and of a key."""
MAX_ENTRIES: Final = 1024
"""Entries of one list or object in ``details``."""
MAX_DEPTH: Final = 8

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_LANE: Final = 3
EXIT_HARDWARE: Final = 4
EXIT_DEADLINE: Final = 5
EXIT_INTERRUPTED: Final = 130


def bounded(text: str, limit: int) -> str:
    """Return a text that UTF-8 can hold, with at most *limit* characters and a few that say how many are left out."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def json_ready(value: Any, depth: int = 0) -> Any:
    """Return *value* as JSON has it, within the bounds above: bytes as text, other objects as they print."""
    limit = MAX_TEXT if depth < 2 else MAX_INNER_TEXT
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return bounded(value, limit)
    if isinstance(value, bytes | bytearray):
        return bounded(bytes(value[: 2 * limit]).decode("utf-8", "backslashreplace"), limit)
    if hasattr(value, "__index__") and not isinstance(value, type):
        number = int(value)
        return number if number.bit_length() <= 64 else f"a number of {number.bit_length()} bits"
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            entries = list(value.items())[:MAX_ENTRIES]
            return {str(json_ready(key, 2)): json_ready(item, depth + 1) for key, item in entries}
        if isinstance(value, Sequence | set | frozenset):
            return [json_ready(item, depth + 1) for item in list(value)[:MAX_ENTRIES]]
    return bounded(str(value), limit)


class SynapseError(Exception):
    """A request or command failed. ``details`` is a JSON-ready dict; it and ``message`` are bounded.

    ``advice`` is what to do next where that differs by the reader's place: one sentence for each, none where nothing
    can be done from there. ``message`` and ``str()`` speak to a program; :meth:`said` speaks to the others.
    """

    code: ClassVar[str]
    transient: ClassVar[bool] = False
    default_retry_after_ms: ClassVar[int | None] = None
    safe_to_retry: ClassVar[bool] = False
    exit_code: int = EXIT_FAILED

    def __init_subclass__(
        cls, *, code: str | None = None, retry_ms: int | None = None, exit_code: int | None = None
    ) -> None:
        """Take a class's row of interfaces.md's table; with a time to wait it is transient and safe to retry."""
        if code is not None:
            cls.code = code
        if retry_ms is not None:
            cls.transient, cls.safe_to_retry, cls.default_retry_after_ms = True, True, retry_ms
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(
        self,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        retry_after_ms: int | None = None,
        advice: Mapping[Place, str] | None = None,
    ) -> None:
        self._what = bounded(message, MAX_MESSAGE)
        self._advice = {place: bounded(text, MAX_MESSAGE) for place, text in (advice or {}).items()}
        self.message = self.said("python")
        super().__init__(self.message)
        self.details: dict[str, Any] = json_ready(details or {})
        self.retry_after_ms = retry_after_ms if retry_after_ms is not None else self.default_retry_after_ms

    def with_details(self, **more: Any) -> Self:
        """Return a copy that has *more* details: an error may be raised to several callers."""
        return self._copy(self._what, more)

    def _copy(self, what: str, more: dict[str, Any]) -> Self:
        details = {**self.details, **more}
        return type(self)(what, details=details, retry_after_ms=self.retry_after_ms, advice=self._advice)

    def said(self, place: Place) -> str:
        """Return the message in the words of a reader's place."""
        advice = self._advice.get(place)
        return f"{self._what} {advice}" if advice else self._what

    def located(self, where: str, prefix: str = "") -> Self:
        """Return the same error said of a place of a file, ``file:line``; *prefix* of its message is left out."""
        what = self._what
        if not what.startswith(f"{where} "):  # a text at hand is called what the message calls it already
            what = f"{where}: {what.removeprefix(prefix)}"
        return self._copy(what, {"where": where})

    def to_dict(self, place: Place = "python") -> dict[str, Any]:
        """Return the ``error`` object of interfaces.md, said for *place*; ``retry_after_ms`` only where it has one."""
        document: dict[str, Any] = {"code": self.code, "class": "transient" if self.transient else "permanent"}
        if self.retry_after_ms is not None:
            document["retry_after_ms"] = self.retry_after_ms
        document["safe_to_retry_same_request"] = self.safe_to_retry
        document["message"] = self.said(place)
        document["details"] = self.details
        return document


class EngineCrashed(SynapseError, code="engine_crashed", retry_ms=250):
    """The worker died, hung or talked nonsense; or the lane is quarantined (``details["quarantined"]``).

    details: lane_id, stage (the operation), cause (exit, eof, protocol, silence, handshake), exit status or signal
    name, log_tail, quarantined.
    """

    @property
    def exit_code(self) -> int:  # type: ignore[override]  # the others have a constant
        """3 while the lane is shut, else 1."""
        return EXIT_LANE if self.quarantined else EXIT_FAILED

    @property
    def quarantined(self) -> bool:
        """True when the lane is shut and nothing was sent."""
        return bool(self.details.get("quarantined"))


class ProbeRequired(SynapseError, code="probe_required", exit_code=EXIT_LANE):
    """A legacy lane is quarantined until ``host.probe(lane)`` succeeds or the host is made anew."""


class LaneRefused(SynapseError, code="lane_refused", exit_code=EXIT_LANE):
    """The worker is not the one this host was deployed with; details: reason, expected, observed."""


class NotCertified(SynapseError, code="not_certified", exit_code=EXIT_LANE):
    """The lane needs a valid certificate for this model on this machine."""


class DeadlineExceeded(SynapseError, code="deadline_exceeded", exit_code=EXIT_DEADLINE):
    """The caller's deadline passed; the worker is unharmed and the late reply is discarded."""

    transient = True


class QueueFull(SynapseError, code="queue_full", retry_ms=100):
    """Too many requests wait for this lane."""


class ShapeCompiling(SynapseError, code="shape_compiling", retry_ms=1000):
    """The deadline passed while a shape compiles; the compilation goes on. details: lane_id, shape."""


class AneLaneBusy(SynapseError, code="ane_lane_busy", retry_ms=1000):
    """Another host of this user drives the Neural Engine."""


class ModelInUse(SynapseError, code="model_in_use"):
    """Unload while requests run or drain."""


class SequenceTooLong(SynapseError, code="sequence_too_long", exit_code=EXIT_USAGE):
    """details: index, tokens, max_tokens."""


class InvalidRequest(SynapseError, code="invalid_request", exit_code=EXIT_USAGE):
    """The request makes no sense; nothing was sent."""


class UnknownModel(SynapseError, code="unknown_model", exit_code=EXIT_USAGE):
    """No such model; details: known."""


class BundleInvalid(SynapseError, code="bundle_invalid", exit_code=EXIT_USAGE):
    """A model bundle can't be used."""


class MatrixInvalid(SynapseError, code="matrix_invalid", exit_code=EXIT_USAGE):
    """hw_matrix.yaml has an error; the message names file, line, key and the nearest valid key."""


class StorageFull(SynapseError, code="storage_full"):
    """A file system or quota has no room for what a command or request writes. details: path, where it is known."""


class Interrupted(SynapseError, code="interrupted", exit_code=EXIT_INTERRUPTED):
    """Ctrl-C, SIGTERM or a lost terminal ended a command; what it had started has ended."""

    safe_to_retry = True


def of_os(
    exc: OSError, message: str, *, otherwise: type[SynapseError], details: dict[str, Any] | None = None
) -> SynapseError:
    """Return the error for a failed system call: StorageFull where there is no room, else one of class *otherwise*."""
    kind = StorageFull if exc.errno in _NO_ROOM else otherwise
    return kind(message, details=details)


_NO_ROOM: Final = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


class WorkerError(SynapseError, code="inference_failed"):
    """The worker answered ERR and lives; ``code`` is one of :class:`~engines.protocol.errors.ErrorCode`."""


class BackendMissing(WorkerError, code="backend_missing", exit_code=EXIT_HARDWARE):
    """The hardware, driver or library of this engine is missing."""


def _worker_error(code: ErrorCode) -> type[WorkerError]:
    name = "".join(part.capitalize() for part in code.value.split("_"))
    said = {"__doc__": f"The worker answered ``{code.value}``.", "__module__": __name__}
    retry = 250 if code in (ErrorCode.OOM, ErrorCode.ANE_RESOURCES_EXHAUSTED) else None
    exit_code = EXIT_USAGE if code is ErrorCode.INVALID_REQUEST else EXIT_FAILED
    made: type[WorkerError] = type(name, (WorkerError,), said, code=code.value, retry_ms=retry, exit_code=exit_code)
    return made


WORKER_ERRORS: Final[dict[ErrorCode, type[WorkerError]]] = {
    code: BackendMissing if code is ErrorCode.BACKEND_MISSING else _worker_error(code) for code in ErrorCode
}
"""The class each ERR code becomes."""


def revive(document: dict[str, Any]) -> SynapseError:
    """Return the error that a document of :meth:`SynapseError.to_dict` describes; an unknown code keeps its words."""
    code = str(document.get("code"))
    kind = _kinds().get(code, WorkerError)
    error = kind(
        str(document.get("message")), details=document.get("details"), retry_after_ms=document.get("retry_after_ms")
    )
    if kind is WorkerError:
        error.code = code  # type: ignore[misc]
    return error


def _kinds() -> dict[str, type[SynapseError]]:
    found: dict[str, type[SynapseError]] = {code.value: kind for code, kind in WORKER_ERRORS.items()}
    own = (kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, SynapseError))
    # Where host and worker share a code (invalid_request), the host's class has the same exit code.
    return found | {kind.code: kind for kind in own if hasattr(kind, "code") and kind is not WorkerError}
