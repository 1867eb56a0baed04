"""What an operator may ask of a running host: one JSON object in a line, told apart by ``op``."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from synapse_host.errors import InvalidRequest


class Ps(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="ps"):
    """What is up: no worker is touched."""


class Ping(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="ping"):
    """PING the workers of one lane, or of all lanes that have one."""

    lane: str | None = None
    deadline: float | None = None


class Logs(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="logs"):
    """What workers wrote. ``after`` (lane to position, from an earlier answer) asks for what is new since then, and
    ``wait`` for how many seconds to wait when nothing is."""

    lane: str | None = None
    after: dict[str, int] = {}
    wait: float = 0.0


class LoadModel(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="load"):
    """Start a lane's worker and load its model; answered when it is loaded."""

    model: str
    lane: str | None = None
    deadline: float | None = None


class UnloadModel(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="unload"):
    """Unload a model and forget its lane's strikes."""

    model: str
    lane: str | None = None


class ProbeLane(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="probe"):
    """Prove a lane with a fresh worker, LOAD and one served request; success opens it, whatever shut it."""

    lane: str
    deadline: float | None = None


class Metrics(Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="metrics"):
    """The metrics as Prometheus text."""


Operation: TypeAlias = Ps | Ping | Logs | LoadModel | UnloadModel | ProbeLane | Metrics

_decoder: Final = msgspec.json.Decoder(Operation)


def decode(line: bytes) -> Operation:
    """Return the request of one line; InvalidRequest says what is wrong with it."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise InvalidRequest(
            f"not a request: {str(exc)[:200]}; send one JSON object with 'op' in a line",
            details={"reason": "control_line"},
        ) from exc
