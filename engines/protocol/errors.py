"""What can go wrong on the wire, and the closed list of codes a worker may answer."""

from __future__ import annotations

from enum import StrEnum


class ProtocolError(Exception):
    """The rules of the worker protocol were broken."""


class LocalProtocolError(ProtocolError):
    """We were about to break the rules ourselves: a bug on this side; nothing was written."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules. The stream can't be trusted any more: close, kill, strike.

    ``reason`` is a short word for counting: oversize, length, torn, out_of_turn, malformed, version, or
    invalid for the rest (counters, ids, counts that don't fit the request).
    """

    def __init__(self, message: str, *, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason


class VersionMismatch(RemoteProtocolError):
    """A well-formed HELLO with another protocol version: a deployment error, not a strike.

    Spec: "module accepts only an exact match".
    """

    def __init__(self, observed: int, expected: int) -> None:
        super().__init__(f"HELLO speaks protocol version {observed}, this host speaks {expected}", reason="version")
        self.observed = observed
        self.expected = expected


class ErrorCode(StrEnum):
    """Every code an ERR frame may carry (protocol-v3, section 3). Any other is a protocol fault."""

    ARTIFACT_INVALID = "artifact_invalid"
    CONFIG_INVALID = "config_invalid"
    OOM = "oom"
    MODEL_UNSUPPORTED = "model_unsupported"
    OPERATION_MISMATCH = "operation_mismatch"
    PACKAGE_DIGEST_MISMATCH = "package_digest_mismatch"
    UNSUPPORTED_REQUEST = "unsupported_request"
    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_LOADED = "model_not_loaded"
    INFERENCE_FAILED = "inference_failed"
    NONFINITE_OUTPUT = "nonfinite_output"
    BACKEND_MISSING = "backend_missing"
    SHAPE_NOT_ADMITTED = "shape_not_admitted"
    INVALID_SHAPE = "invalid_shape"
    ANE_RESIDENCY_LIMIT = "ane_residency_limit"
    ANE_RESOURCES_EXHAUSTED = "ane_resources_exhausted"
    INVALID_PLACEMENT = "invalid_placement"
    PLACEMENT_UNREPORTED = "placement_unreported"
    SPECIALIZATION_MISSING = "specialization_missing"
    LAYOUT_UNQUALIFIED = "layout_unqualified"
    UNSUPPORTED_PACKED_WIDTH = "unsupported_packed_width"
    PACKED_ROWS_TOO_WIDE = "packed_rows_too_wide"


class EngineError(Exception):
    """A request failed and the worker lives: it becomes an ERR frame and is never a strike."""

    def __init__(self, code: ErrorCode, msg: str) -> None:
        # Paths and library messages may hold undecodable bytes (surrogates); JSON can't, and an ERR must always leave.
        msg = msg.encode("utf-8", "backslashreplace").decode("utf-8")
        super().__init__(f"{code.value}: {msg}")
        self.code = code
        self.msg = msg
