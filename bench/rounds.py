"""How anything is compared here: contestants take turns within a round, and a ratio is made inside its own round.

A machine's speed drifts from second to second; two contestants measured one after the other inside one round met the
same machine. What is reported is the median over rounds with the lowest and highest round beside it.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bench import machine

Sample: TypeAlias = Callable[[], float | Awaitable[float]]
"""One contestant's turn: returns its figure (seconds, or a rate; all contestants of a row the same kind)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of the rounds, with the lowest and the highest one."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Summarise *values* (at least one)."""
        return Spread(statistics.median(values), min(values), max(values))

    def to_list(self) -> list[float]:
        """Return [low, high]."""
        return [self.low, self.high]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: what we do, what the other one does, and the ratio with its spread.

    ``ratio`` says how many times better we are than the rival (above 1: faster, or less), except where ``absolute``
    is set: then ``ours`` itself is held against the target. ``better`` is ``lower`` or ``higher``, for ours and rival.
    ``status``: ``measured``, ``not installed`` (the rival), or ``failed``. ``load``: the machine's, when it was made.
    """

    group: str
    name: str
    unit: str
    better: str
    ours: Spread | None = None
    rival_name: str = ""
    rival: Spread | None = None
    ratio: Spread | None = None
    target: float | None = None
    absolute: bool = False
    status: str = "measured"
    note: str = ""
    rounds: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    load: float | None = field(default_factory=machine.load)

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without a target or a measurement."""
        if self.target is None:
            return None
        if self.absolute:
            if self.ours is None:
                return None
            return self.ours.median <= self.target if self.better == "lower" else self.ours.median >= self.target
        return None if self.ratio is None else self.ratio.median >= self.target

    def to_dict(self) -> dict[str, Any]:
        """Return the row's document (interfaces.md: name, ours, rival, ratio, spread)."""
        return {
            "group": self.group,
            "name": self.name,
            "unit": self.unit,
            "better": self.better,
            "ours": None if self.ours is None else self.ours.median,
            "ours_spread": None if self.ours is None else self.ours.to_list(),
            "rival_name": self.rival_name,
            "rival": None if self.rival is None else self.rival.median,
            "rival_spread": None if self.rival is None else self.rival.to_list(),
            "ratio": None if self.ratio is None else self.ratio.median,
            "spread": None if self.ratio is None else self.ratio.to_list(),
            "target": self.target,
            "target_on": "ours" if self.absolute else "ratio",
            "reached": self.reached,
            "status": self.status,
            "rounds": self.rounds,
            "note": self.note,
            "machine": machine.cpu(),
            "load": self.load,
            **({"extra": self.extra} if self.extra else {}),
        }


async def interleaved(contestants: Mapping[str, Sample], rounds: int) -> dict[str, list[float]]:
    """Let every contestant take one turn a round, the order rotating; return each one's figures, round by round."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            value = contestants[name]()
            figures[name].append(float(await value if inspect.isawaitable(value) else value))
    return figures


def row(
    figures: Mapping[str, Sequence[float]],
    ours: str,
    rival: str,
    *,
    group: str,
    name: str,
    unit: str,
    better: str,
    scale: float = 1.0,
    rival_name: str = "",
    target: float | None = None,
    note: str = "",
    extra: dict[str, Any] | None = None,
) -> Row:
    """Return the row of two contestants of :func:`interleaved`; *scale* turns figures into *unit*."""
    mine, theirs = figures[ours], figures[rival]
    pairs = zip(mine, theirs, strict=True)
    ratios = [b / a if better == "lower" else a / b for a, b in pairs]
    return Row(
        group=group,
        name=name,
        unit=unit,
        better=better,
        ours=Spread.of([value * scale for value in mine]),
        rival_name=rival_name or rival,
        rival=Spread.of([value * scale for value in theirs]),
        ratio=Spread.of(ratios),
        target=target,
        note=note,
        rounds=len(mine),
        extra=extra or {},
    )


def p50(times: Sequence[float]) -> float:
    """Return the median of one turn's calls."""
    return statistics.median(times)
