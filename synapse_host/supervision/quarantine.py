"""What counts against a lane, and when it is shut: protocol-v3 section 5. Pure: times are arguments."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from msgspec import Struct

from engines.protocol.messages import Request, type_name
from synapse_host.placement.spec import LaneKind

LIMIT: Final = 2
"""Strikes in a row that quarantine a lane."""


class Fingerprint(Struct, frozen=True):
    """The request a strike happened on, so that an operator sees 'the same input twice'."""

    operation: str
    model: str
    ids_sha256: str | None
    """Hex digest of the raw ids; None for a request without any."""


def fingerprint_of(request: Request, payload: Any, model: str) -> Fingerprint:
    """Return what identifies a request's content: operation, model, digest of the ids."""
    digest = None if payload is None else hashlib.sha256(memoryview(payload).tobytes()).hexdigest()
    return Fingerprint(type_name(request), model, digest)


class Quarantine:
    """Counts strikes in a row: genuine crashes, protocol faults and hangs.

    A strike belongs to a worker generation, and a generation dies of its first one: however many waiters see the
    failure, it counts once. Catalog lanes open again after the cool-down with no strikes; legacy lanes stay shut until
    :meth:`probed`.
    """

    def __init__(self, kind: LaneKind, *, cool_down: float) -> None:
        self._kind = kind
        self._cool_down = cool_down
        self._strikes: list[Fingerprint | None] = []
        self._shut_at: float | None = None
        self._struck_generation = 0

    def strike(self, generation: int, now: float, fingerprint: Fingerprint | None) -> bool:
        """Record a strike, on the request of *fingerprint* if one was open; False when *generation* was charged."""
        if generation <= self._struck_generation:
            return False
        self._struck_generation = generation
        self._lapse(now)
        self._strikes = [*self._strikes, fingerprint][-LIMIT:]
        if len(self._strikes) == LIMIT and self._shut_at is None:
            self._shut_at = now
        return True

    def served(self, generation: int) -> None:
        """A serving reply of a living generation was drained: the only thing in traffic that clears strikes."""
        if self._strikes and self._shut_at is None and generation > self._struck_generation:
            self._strikes = []

    def clear(self) -> None:
        """Unload or reload: a catalog lane starts over; a legacy lane that is shut stays shut."""
        if self._kind == "catalog" or self._shut_at is None:
            self._reset()

    def probed(self) -> None:
        """A fresh worker was loaded and has served one request: any lane starts over."""
        self._reset()

    @property
    def open(self) -> bool:
        """True while nothing shuts the lane; when False only :meth:`admits` knows whether the cool-down is over."""
        return self._shut_at is None

    def admits(self, now: float) -> bool:
        """Return whether a request may go on; at the very end of the cool-down it may."""
        if self._shut_at is None:
            return True
        self._lapse(now)
        return self._shut_at is None

    def strikes(self, now: float) -> int:
        """Return the strikes in a row."""
        self._lapse(now)
        return len(self._strikes)

    def remaining(self, now: float) -> float | None:
        """Return the seconds until a catalog lane opens; 0.0 when open, None when only a probe opens it."""
        if self.admits(now):
            return 0.0
        if self._kind == "legacy" or self._shut_at is None:
            return None
        return self._shut_at + self._cool_down - now

    @property
    def same_input(self) -> Fingerprint | None:
        """The request content that the last two strikes happened on; None when it differed or there was none."""
        if len(self._strikes) < LIMIT:
            return None
        first, *_, last = self._strikes
        return first if first == last else None

    def _lapse(self, now: float) -> None:
        if self._kind == "catalog" and self._shut_at is not None and now >= self._shut_at + self._cool_down:
            self._reset()

    def _reset(self) -> None:
        self._strikes = []
        self._shut_at = None
