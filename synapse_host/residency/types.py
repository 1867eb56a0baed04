"""The nouns of residency: keys, slots, workers, tickets, and the actions that come out (see
``synapse_host.residency.core``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias


class Key(NamedTuple):
    """One function of one worker's model; identical models in two workers have two keys."""

    worker: str
    kind: Literal["shape", "packed"]
    tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets over all workers. The executable limit was measured to fail at 115 to 118 system-wide (ane.md 4)."""

    per_model: int = 4
    total: int = 8
    executables: int = 100
    nbytes: int | None = None

    def fits(self, worker: str, model: Model, charged: Sequence[Slot]) -> bool:
        """Whether another function of *worker*'s *model* fits beside what is *charged*."""
        return (
            len(charged) < self.total
            and sum(slot.key.worker == worker for slot in charged) < self.per_model
            and sum(slot.model.layers for slot in charged) + model.layers <= self.executables
            and (self.nbytes is None or sum(slot.model.nbytes for slot in charged) + model.nbytes <= self.nbytes)
        )


class State(Enum):
    """The state of a slot; it is charged in every one of these."""

    ADMITTING = "admitting"
    RESIDENT = "resident"
    EVICTING = "evicting"
    FAILED = "failed"


class Refusal(Enum):
    """Why a request was refused."""

    EXHAUSTED = "exhausted"
    """Transient: no budget in time, or the device is full."""
    NEVER_FITS = "never fits"
    FAILED = "failed"
    """The admission or the start failed; the shell knows the error."""
    CLOSED = "closed"
    """The worker is gone for good."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Send ANE_ADMIT_*, in a task of its own, if it is still ``wanted`` then; report with ``admitted``,
    ``admit_failed`` or ``withdrawn``."""

    slot: int
    key: Key


@dataclass(frozen=True, slots=True)
class Evict:
    """Send ANE_EVICT_* and report with ``evicted`` or ``evict_failed``."""

    slot: int
    key: Key


@dataclass(frozen=True, slots=True)
class Granted:
    """The ticket holds a lease now, until ``release``."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The ticket is gone."""

    ticket: int
    why: Refusal
    key: Key


@dataclass(frozen=True, slots=True)
class Restart:
    """Kill now and confirm the exit (``exited``, or ``unconfirmed``); after a forced one leases are still out."""

    worker: str


@dataclass(frozen=True, slots=True)
class Revive:
    """Start the worker and LOAD its model, whose smallest rung is charged already; report with ``restored`` or
    ``revive_failed``."""

    worker: str


Action: TypeAlias = Admit | Evict | Granted | Refused | Restart | Revive


@dataclass(frozen=True, slots=True)
class Model:
    """What a function of a model costs."""

    layers: int
    nbytes: int
    smallest: int


@dataclass(slots=True)
class Slot:
    """A charged place; no other ever has its number, so a report that comes late names nothing."""

    id: int
    key: Key
    model: Model
    state: State = State.ADMITTING
    in_flight: bool = True
    """An exchange about this slot is on the wire."""
    leases: int = 0
    last_used: int = 0
    retried: bool = False
    sent: bool = False
    """Its admission was put on the wire."""
    background: bool = False
    """It was admitted before anybody asked for it, in case it will be needed."""
    waits_for: int | None = None
    """The victim whose eviction this admission waits for, after the worker said that it is out of resources."""


class Phase(Enum):
    """Where a worker's process is. Only while UP is anything leased or evicted."""

    DOWN = "down"
    """No process: the last exit is confirmed, or it never ran."""
    STARTING = "starting"
    """Its Revive was issued; the rung that LOAD brings is charged."""
    UP = "up"
    DRAINING = "draining"
    """It is to go once nothing of it is leased or on the wire, at ``drain_until`` in any case."""
    STOPPING = "stopping"
    """Its Restart was issued; everything stays charged until the exit is confirmed."""
    CLOSED = "closed"
    """Its exit can't be confirmed: everything stays charged, and nothing is leased any more."""


@dataclass(slots=True)
class Worker:
    """One lane's worker; ``generation`` counts its processes."""

    model: Model
    generation: int = 0
    phase: Phase = Phase.DOWN
    drain_until: float = 0.0


@dataclass(slots=True)
class Ticket:
    """A request that waits (``slot`` is None), or holds its one lease; that of a process that is gone holds nothing."""

    id: int
    key: Key
    expires: float
    slot: int | None = None
