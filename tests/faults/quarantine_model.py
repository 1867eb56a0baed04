"""R14: the quarantine against a model of thirty lines, and a random walk that compares the two."""

from __future__ import annotations

import random
from typing import Any

from synapse_host.placement.spec import LaneKind
from synapse_host.supervision.quarantine import Fingerprint, Quarantine
from tests.faults.arena import campaign_row
from tests.faults.ledger import Row


class Model:
    """protocol-v3 section 5 in plain words: a count, a time, the generations that are charged."""

    def __init__(self, kind: LaneKind, cool_down: float) -> None:
        self.kind, self.cool_down = kind, cool_down
        self.count, self.shut_at, self.charged = 0, None, 0

    def tick(self, now: float) -> None:
        if self.kind == "catalog" and self.shut_at is not None and now >= self.shut_at + self.cool_down:
            self.count, self.shut_at = 0, None

    def strike(self, generation: int, now: float) -> bool:
        if generation <= self.charged:
            return False
        self.charged, self.count = generation, min(2, self.count + 1)
        if self.count == 2 and self.shut_at is None:
            self.shut_at = now
        return True

    def served(self, generation: int) -> None:
        if self.shut_at is None and generation > self.charged:
            self.count = 0

    def clear(self) -> None:
        if self.kind == "catalog" or self.shut_at is None:
            self.count, self.shut_at = 0, None

    def probed(self) -> None:
        self.count, self.shut_at = 0, None

    def remaining(self, now: float) -> float | None:
        if self.shut_at is None:
            return 0.0
        return None if self.kind == "legacy" else self.shut_at + self.cool_down - now


def walk(kind: LaneKind, steps: int, seed: int, row: Row) -> None:
    """Take *steps* random steps with both and compare everything a caller can see after each."""
    rng = random.Random(seed)
    cool_down = 600.0
    real, model = Quarantine(kind, cool_down=cool_down), Model(kind, cool_down)
    now, generation = 0.0, 1
    for step in range(steps):
        name = rng.choice(
            ("strike", "strike", "stale", "served", "served", "stale serve", "clear", "probed", "wait", "edge")
        )
        told: Any = None
        expected: Any = None
        row.injected += 1
        model.tick(now)
        if name in ("strike", "stale"):
            number = generation if name == "strike" else max(1, generation - rng.randrange(1, 3))
            print_ = Fingerprint("EMBED_BATCH", "m", rng.choice("ab"))
            told, expected = real.strike(number, now, print_), model.strike(number, now)
            generation += name == "strike"
        elif name in ("served", "stale serve"):
            number = generation if name == "served" else max(1, generation - 1)
            real.served(number)
            model.served(number)
        elif name == "clear" and rng.random() < 0.2:
            real.clear()
            model.clear()
        elif name == "probed" and rng.random() < 0.2:
            real.probed()
            model.probed()
        elif name == "wait":
            now += rng.choice((0.0, 0.5, 100.0, 599.0, 600.0, 601.0))
        elif name == "edge" and model.shut_at is not None:
            now = max(now, model.shut_at + cool_down - rng.choice((0.0, 0.001)))
        model.tick(now)
        seen = (told, real.admits(now), real.open, real.strikes(now), real.remaining(now))
        wanted = (expected, model.shut_at is None, model.shut_at is None, model.count, model.remaining(now))
        if seen != wanted:
            row.problems.append(f"{kind}, seed {seed}, step {step} ({name}): {seen}, the model says {wanted}")
            return
        row.survived += 1


@campaign_row("R14", "{steps:,} steps of the quarantine against its model")
def r14(row: Row, steps: int) -> None:
    """Random walks, half on a catalog lane, half on a legacy lane."""
    for number in range(max(1, steps // 200)):
        walk("catalog" if number % 2 == 0 else "legacy", min(steps, 200), 14 + number, row)
