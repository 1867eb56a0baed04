"""What ``host.health()`` says of one lane, put together from all that knows a part of it; no worker is asked."""

from __future__ import annotations

from typing import Any

from synapse_host.supervision.health import LaneHealth
from synapse_host.supervision.lifecycle import Generations
from synapse_host.supervision.standing import Standing


def record(
    health: LaneHealth,
    standing: Standing,
    workers: Generations,
    *,
    now: float,
    stale_after: float,
    waiting: int,
    load_s: float | None,
) -> dict[str, Any]:
    """Return what ``host.health()`` says of one lane (interfaces.md): its state, its worker and the facts in *health*.

    *waiting*: requests in line; *load_s*: seconds the last LOAD took.
    """
    session, spec, quarantine = workers.session, standing.spec, standing.quarantine
    process = None if session is None else session.process
    loaded = session is not None and session.model_ref is not None
    return {
        "state": _state(standing, workers, now, stale=health.stale(now, stale_after)),
        "engine": spec.engine_id,
        "device": spec.device,
        "kind": spec.kind,
        "worker_pid": None if process is None else process.pid,
        "generation": workers.number,
        "strikes": quarantine.strikes(now),
        "quarantine_remaining_s": quarantine.remaining(now),
        "waiting": waiting,
        "models": [spec.model] if loaded else [],
        "load_s": load_s if loaded else None,
        "progress": None if session is None else session.underway(now),
        **health.fields(now),
    }


def _state(standing: Standing, workers: Generations, now: float, *, stale: bool) -> str:
    if standing.closing:
        return "stopped"
    if standing.refusal is not None:
        return "refused"
    if not standing.quarantine.admits(now):
        return "quarantined"
    if workers.start_under_way():
        return "loading"
    if workers.session is None:
        return "stopped"
    if workers.session.serving:
        return "serving"
    return "unknown" if stale else "idle"
