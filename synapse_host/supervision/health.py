"""What ``host.health()`` says of a lane: one record, made of stamped facts from HELLO, PONG, progress and replies.

Reading it touches no worker. PING feeds it in the background: it never queues behind inference and never spawns.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType, structs

from engines.protocol.messages import Hello, Pong
from synapse_host.placement.spec import LaneSpec
from synapse_host.worker.process import Death
from synapse_host.worker.session import Underway


class Fault(Struct, frozen=True):
    """How the lane's last strike came about; the fields are those of :class:`~synapse_host.errors.EngineCrashed`."""

    generation: int
    worker_pid: int | None
    stage: str
    cause: str
    exit_status: int | None
    signal: str | None
    fingerprint: dict[str, Any] | None


class Health(Struct, frozen=True, kw_only=True):
    """One lane's entry in ``host.health()["lanes"]``; times in seconds, sizes in MiB, None where nothing is known."""

    model: str
    state: str
    engine: str | None = None
    device: str | None = None
    worker_pid: int | None = None
    generation: int = 0
    kind: str | None = None
    strikes: int = 0
    quarantine_remaining_s: float | None = 0.0
    waiting: int = 0
    models: list[str] = []
    load_s: float | None = None
    progress: Underway | None = None
    age_s: float | None = None
    rss_growth_mb: int | None = None
    rss_mb: int | None = None
    models_loaded: int | None = None
    placement_share: float | None = None
    buckets: list[int] | None = None
    resident_shapes: dict[str, list[int]] | None = None
    resident_packed: dict[str, list[int]] | None = None
    kernel_revision: str | None = None
    packed_widths: list[int] = []
    worker_version: str | None = None
    worker_engine: str | None = None
    build_flags: dict[str, str] = {}
    last_fault: Fault | None = None
    reason: str | UnsetType = UNSET
    """Why no engine may serve a refused lane; absent for others."""


_PONG: Final[dict[str, None]] = dict.fromkeys(
    ("rss_growth_mb", "rss_mb", "models_loaded", "placement_share", "buckets", "resident_shapes", "resident_packed")
)
"""What is history when the worker is gone; what HELLO said stays."""


class LaneHealth:
    """The stamped facts of one lane's current worker generation. Times are the loop's."""

    def __init__(self, spec: LaneSpec) -> None:
        self.age_from: float | None = None
        self.used: float | None = None
        """When the worker last answered something other than PING; None where there is none."""
        self.facts = Health(
            model=spec.model, state="stopped", engine=spec.engine_id, device=spec.device, kind=spec.kind
        )
        self._first_rss_mb: int | None = None

    def struck(self, death: Death, details: dict[str, Any]) -> None:
        """Note that the worker died; *details* are those of its EngineCrashed."""
        said = {key: details[key] for key in ("stage", "cause", "exit_status", "signal", "fingerprint")}
        fault = Fault(generation=death.generation, worker_pid=death.pid, **said)
        self.ended()
        self.facts = structs.replace(self.facts, last_fault=fault)

    def ended(self) -> None:
        """Forget what was true of the worker only while it lived."""
        self.age_from = self.used = None
        self.facts = structs.replace(self.facts, **_PONG)

    def greeted(self, hello: Hello, now: float) -> None:
        """Note that a new generation has shaken hands."""
        self.age_from = now
        self._first_rss_mb = None
        self.facts = structs.replace(
            self.facts,
            **_PONG,
            kernel_revision=_known(hello.kernel_revision),
            packed_widths=[] if hello.packed is UNSET else hello.packed.widths,
            worker_version=hello.engine.version,
            worker_engine=hello.engine.engine,
            build_flags=_known(hello.engine.build_flags) or {},
        )

    def pong(self, pong: Pong, now: float) -> None:
        """Stamp what a PONG says; the first RSS of a generation is what growth is measured from."""
        self.age_from = now
        if self._first_rss_mb is None:
            self._first_rss_mb = pong.rss_mb
        self.facts = structs.replace(
            self.facts,
            rss_growth_mb=pong.rss_mb - self._first_rss_mb,
            rss_mb=pong.rss_mb,
            models_loaded=pong.models_loaded,
            placement_share=_known(pong.placement_share),
            buckets=_known(pong.buckets),
            resident_shapes=_known(pong.ane_resident_shapes),
            resident_packed=_known(pong.ane_resident_packed),
        )

    def age(self, now: float) -> float | None:
        """Return the seconds since the worker was last heard of; None where there is none."""
        return None if self.age_from is None else now - self.age_from

    def rests(self, now: float, after: float) -> bool:
        """Return whether a worker has had nothing to do for *after* seconds. A PING is no work."""
        return self.used is not None and now - self.used >= after


def _known(value: Any) -> Any:
    return None if value is UNSET else value
