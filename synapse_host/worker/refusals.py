"""What a lane answers instead of a reply: one function for each sentence, all of them naming the lane."""

from __future__ import annotations

import errno
from typing import Final

from engines.protocol.errors import ErrorCode, LocalProtocolError
from engines.protocol.messages import Err
from synapse_host.errors import (
    WORKER_ERRORS,
    DeadlineExceeded,
    EngineCrashed,
    InvalidRequest,
    ModelInUse,
    QueueFull,
    SynapseError,
)
from synapse_host.placement.spec import LaneSpec

NOT_READY: Final = ", before its worker was ready"


def late(lane_id: str, stage: str, where: str = "") -> DeadlineExceeded:
    """The caller's deadline passed."""
    return DeadlineExceeded(
        f"lane {lane_id}: the deadline passed during {stage}{where}", details={"lane_id": lane_id, "stage": stage}
    )


def full(lane_id: str, waiting: int) -> QueueFull:
    """The queue has no room."""
    return QueueFull(
        f"lane {lane_id}: {waiting} requests wait already", details={"lane_id": lane_id, "waiting": waiting}
    )


def stopping(lane_id: str) -> QueueFull:
    """The host closes; nothing was sent."""
    return QueueFull(f"lane {lane_id}: the host is stopping", details={"lane_id": lane_id, "reason": "stopping"})


def stopped(lane_id: str, stage: str) -> EngineCrashed:
    """The host closed while a worker had the request."""
    said = {"exit_status": None, "signal": None, "log_tail": "", "reason": "stopping"}
    return _not_struck(lane_id, stage, "exit", "the host stopped while the request ran", **said)


def in_use(spec: LaneSpec, waiting: int) -> ModelInUse:
    """Unload while requests run, wait or drain."""
    return ModelInUse(
        f"lane {spec.lane_id}: {spec.model} is in use; try again when its requests are done",
        details={"lane_id": spec.lane_id, "model": spec.model, "waiting": waiting},
    )


def unsendable(lane_id: str, stage: str, exc: LocalProtocolError) -> InvalidRequest:
    """The request breaks the protocol; nothing was written."""
    return InvalidRequest(
        f"lane {lane_id}: the request can't be sent: {exc}", details={"lane_id": lane_id, "stage": stage}
    )


def replaced(lane_id: str, stage: str) -> EngineCrashed:
    """The request was for one worker generation, and that is history."""
    return _not_struck(lane_id, stage, "exit", "the worker that held what this request needs is gone")


def unkillable(lane_id: str, pid: int) -> EngineCrashed:
    """The old worker's death isn't confirmed, so nothing may replace it."""
    return _not_struck(lane_id, "spawn", "exit", f"the last worker (pid {pid}) can't be killed yet")


def no_resources(lane_id: str, exc: OSError) -> EngineCrashed:
    """The host lacks descriptors, memory or processes for a spawn."""
    text = f"the host could not start a worker: {exc.strerror or exc}"
    return _not_struck(lane_id, "spawn", "handshake", text, errno=errno.errorcode.get(exc.errno or 0))


def no_memory(lane_id: str, stage: str) -> SynapseError:
    """The host itself has no memory for a reply; its worker is not to blame."""
    return WORKER_ERRORS[ErrorCode.OOM](
        f"lane {lane_id}: the host has no memory for the reply; ask for less at once or free some",
        details={"lane_id": lane_id, "stage": stage},
    )


def broken(lane_id: str, stage: str) -> EngineCrashed:
    """A bug of ours ended what a request needs; its worker is replaced, since nothing is known of it now."""
    return _not_struck(lane_id, stage, "exit", "the host itself failed here, see its log; the worker is replaced")


def _not_struck(lane_id: str, stage: str, cause: str, text: str, **more: str | None) -> EngineCrashed:
    details = {"lane_id": lane_id, "stage": stage, "cause": cause, "quarantined": False, **more}
    return EngineCrashed(f"lane {lane_id}: {text}", details=details)


def answered(spec: LaneSpec, stage: str, reply: Err) -> SynapseError:
    """The worker's ERR."""
    return _worker_error(spec, stage, reply.code, reply.msg or reply.code.value)


def nonfinite(spec: LaneSpec, stage: str) -> SynapseError:
    """The reply's numbers are unusable."""
    text = "the worker's reply holds NaN or infinity; it was discarded"
    return _worker_error(spec, stage, ErrorCode.NONFINITE_OUTPUT, text)


def _worker_error(spec: LaneSpec, stage: str, code: ErrorCode, text: str) -> SynapseError:
    details = {"lane_id": spec.lane_id, "stage": stage, "model": spec.model}
    return WORKER_ERRORS[code](f"lane {spec.lane_id}: {text}", details=details)
