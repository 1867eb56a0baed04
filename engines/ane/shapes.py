"""Which functions of a model are resident, the worker's hard cap, and which rung each row runs on (ane.md 2.3, 4, 7).

A shape is one loaded function of one bucket, a packed width one loaded packed function; both count against the same
cap. The host decides what to admit and evict; here is only what no host may exceed. A worker holds one model, so the
cap of a model keeps the worker's own (8 functions), too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engines.ane.compute_plan import worst
from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from engines.ane.backend import Program
    from engines.ane.signature import Key, Kind
    from engines.protocol.messages import Inventory

PER_MODEL: Final = 4


def group(lengths: Sequence[int], rungs: Sequence[int]) -> dict[int, list[int]]:
    """Return rung -> indices of the rows that run on it, both ascending; nothing is truncated.

    Each row gets the smallest of *rungs* (ascending) that fits: a function has one fixed length, so a row pays for its
    bucket, and one bucket for all would make every short row as dear as the longest. EngineError invalid_request for a
    row of 0 tokens or above the last rung.
    """
    rows: dict[int, list[int]] = {}
    for index, tokens in enumerate(lengths):
        if tokens < 1:
            raise EngineError(ErrorCode.INVALID_REQUEST, "a row has no tokens")
        if tokens > rungs[-1]:
            why = f"a row has {tokens} tokens, the largest bucket takes {rungs[-1]} (buckets: {list(rungs)})"
            raise EngineError(ErrorCode.INVALID_REQUEST, why)
        rows.setdefault(rungs[bisect_left(rungs, tokens)], []).append(index)
    return dict(sorted(rows.items()))


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded function, what it was admitted with, and its placement share (None where the plan gives none)."""

    program: Program
    inventory: Inventory
    share: float | None


class Shapes:
    """The functions of one model. *opener* loads one of them, all or nothing."""

    def __init__(self, available: Iterable[Key], opener: Callable[[Key], Resident]) -> None:
        self._available = frozenset(available)
        self._opener = opener
        self._resident: dict[Key, Resident] = {}

    def admit(self, key: Key) -> Inventory:
        """Load *key* unless it is resident; the same inventory then.

        EngineError: invalid_shape, unsupported_packed_width, ane_residency_limit, and what the opener raises.
        """
        found = self._resident.get(key)
        if found is not None:
            return found.inventory
        self._check_known(key)
        if len(self._resident) >= PER_MODEL:
            why = f"{PER_MODEL} functions of this model are resident; evict one first"
            raise EngineError(ErrorCode.ANE_RESIDENCY_LIMIT, why)
        resident = self._resident[key] = self._opener(key)
        return resident.inventory

    def evict(self, key: Key) -> None:
        """Release *key*; one that isn't resident is fine, one the model doesn't have is refused."""
        self._check_known(key)
        resident = self._resident.pop(key, None)
        if resident is not None:
            resident.program.close()

    def program(self, key: Key) -> Program:
        """Return the loaded function, or refuse with ``shape_not_admitted``: nothing loads implicitly."""
        self._check_known(key)
        resident = self._resident.get(key)
        if resident is None:
            have = ", ".join(str(one) for one in sorted(self._resident)) or "nothing"
            raise EngineError(ErrorCode.SHAPE_NOT_ADMITTED, f"{key} is not resident (resident: {have})")
        return resident.program

    def resident(self, kind: Kind) -> tuple[int, ...]:
        """Return the resident buckets or packed widths, ascending."""
        return tuple(sorted(key.tokens for key in self._resident if key.kind == kind))

    @property
    def share(self) -> float | None:
        """The wire's placement share: the minimum over the resident functions, absent when any has none."""
        return worst(resident.share for resident in self._resident.values())

    def close(self) -> None:
        """Release everything; idempotent."""
        while self._resident:
            _, resident = self._resident.popitem()
            resident.program.close()

    def _check_known(self, key: Key) -> None:
        if key not in self._available:
            sizes = [str(one.tokens) for one in sorted(self._available) if one.kind == key.kind]
            code = ErrorCode.INVALID_SHAPE if key.kind == "shape" else ErrorCode.UNSUPPORTED_PACKED_WIDTH
            raise EngineError(code, f"the model has no {key} (it has: {', '.join(sizes) or 'none'})")
