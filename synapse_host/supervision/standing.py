"""Whether a lane takes requests: its strikes, a refused worker, the end of the host; and what callers hear if not."""

from __future__ import annotations

import asyncio
import logging
import shlex
from typing import Any

from msgspec import structs

from synapse_host.errors import EngineCrashed, LaneRefused, ProbeRequired
from synapse_host.placement.spec import LaneSpec
from synapse_host.supervision.quarantine import Quarantine, fingerprint_of
from synapse_host.worker.exchange import Exchange
from synapse_host.worker.process import Death
from synapse_host.worker.refusals import stopping

_log = logging.getLogger(__name__)


class Standing:
    """One lane's standing. ``quarantine`` counts; this says what follows from it."""

    def __init__(self, spec: LaneSpec, *, cool_down: float) -> None:
        self.spec = spec
        self.quarantine = Quarantine(spec.kind, cool_down=cool_down)
        self.refusal: LaneRefused | None = None
        """The deployment error that shut the lane until an unload or reload."""
        self.closing = False
        self.last_crash: EngineCrashed | None = None
        """What the last strike's caller heard."""
        self._last_words = ""
        self._loop = asyncio.get_running_loop()

    def admit(self, *, probing: bool = False) -> None:
        """Raise what a closed, refused or quarantined lane answers; a probe or unload asks only if it is closed."""
        if self.refusal is None and not self.closing and self.quarantine.open:
            return
        if self.closing:
            raise stopping(self.spec.lane_id)
        if probing:
            return
        if self.refusal is not None:
            raise LaneRefused(self.refusal.message, details=dict(self.refusal.details))
        now = self._loop.time()
        if not self.quarantine.admits(now):
            raise self._shut(self.quarantine.remaining(now))

    def reopen(self) -> None:
        """Clear a quarantine or a refusal at once, as a reload does; strikes of an open lane stay."""
        if self.refusal is not None or not self.quarantine.admits(self._loop.time()):
            self.clear()

    def clear(self) -> None:
        """Clear refusal and strikes, as an unload does."""
        self.refusal = None
        self.quarantine.clear()

    def charge(self, death: Death, stage: str, exchange: Exchange | None) -> EngineCrashed:
        """Count a death as a strike, on the request it happened on, and return what its caller hears."""
        now = self._loop.time()
        fingerprint = None
        if exchange is not None:
            fingerprint = fingerprint_of(exchange.request, exchange.payload, self.spec.model)
        open_before = self.quarantine.admits(now)
        self.quarantine.strike(death.generation, now, fingerprint)
        shut = not self.quarantine.admits(now)
        remaining = self.quarantine.remaining(now)
        if shut and open_before:
            seconds = "until it is probed" if remaining is None else f"{remaining:.0f}"
            lane_id, model, reason = self.spec.lane_id, self.spec.model, f"{stage}: {death.describe()}"
            _log.warning("lane quarantined: lane=%s model=%s seconds=%s reason=%s", lane_id, model, seconds, reason)
        details: dict[str, Any] = {
            "lane_id": self.spec.lane_id,
            "stage": stage,
            "cause": death.cause,
            "exit_status": death.exit_status,
            "signal": death.signal,
            "log_tail": death.log_tail,
            "quarantined": shut,
            "fingerprint": None if fingerprint is None else structs.asdict(fingerprint),
        }
        if self.quarantine.same_input is not None:
            details["same_input"] = True
        self._last_words = f"{stage}: {death.describe()}"
        self.last_crash = EngineCrashed(
            f"lane {self.spec.lane_id}: {death.describe()}",
            details=details,
            retry_after_ms=round(remaining * 1000) if shut and remaining is not None else None,
        )
        return self.last_crash

    def _shut(self, remaining: float | None) -> EngineCrashed | ProbeRequired:
        """Return the answer of a quarantined lane; *remaining*: None where only a probe opens it."""
        lane_id = self.spec.lane_id
        details = {"lane_id": lane_id, "quarantined": True}
        last = self._last_words
        if (same := self.quarantine.same_input) is not None:
            digest = "" if same.ids_sha256 is None else f", fingerprint {same.ids_sha256[:4]}…"
            last += f"; the same input both times{digest}"
        why = f"its worker died twice in a row (last, {last})."
        see = f"See: synapse logs {shlex.quote(lane_id)}."
        if remaining is None:
            return ProbeRequired(
                f"lane {lane_id} is quarantined until it is probed or a new host starts: {why}",
                details=details,
                advice={
                    "python": f"Probe it: await host.probe({lane_id!r}).",
                    "operator": f"{see} Clear it: synapse probe {shlex.quote(lane_id)}.",
                },
            )
        # The lane is named: a model may be served by several, and one of them is shut.
        lane = lane_id.removesuffix(f":{self.spec.model}")
        unload = f"Clear it: synapse unload {shlex.quote(self.spec.model)} --lane {shlex.quote(lane)}."
        return EngineCrashed(
            f"lane {lane_id} is quarantined for another {remaining:.0f} s: {why}",
            details=details,
            retry_after_ms=max(1, round(remaining * 1000)),
            advice={
                "python": f"Clear it: await host.unload({self.spec.model!r}, lane={lane_id!r}).",
                "operator": f"{see} {unload}",
            },
        )
