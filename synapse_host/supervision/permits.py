"""Execution permits: how many inference exchanges may run at once on one device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from engines.machine import usable_cores
from synapse_host.supervision.line import Line
from synapse_host.worker import refusals


class _Pool:
    __slots__ = ("free", "size", "waiters")

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self.waiters = Line()


class Permits:
    """First come, first served, per device. Compilation, LOAD and eviction take none.

    *limits* names permits by device (``cuda:1``) or device kind (``cuda``); the default is the usable cores for
    ``cpu`` and 1 for each accelerator.
    """

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        for name, limit in self._limits.items():
            if limit < 1:
                raise ValueError(f"permits for {name} must be at least 1, not {limit}")
        self._pools: dict[str, _Pool] = {}

    def limit(self, device: str) -> int:
        """Return how many permits *device* has."""
        kind = device.partition(":")[0]
        default = usable_cores() if kind == "cpu" else 1
        return self._limits.get(device, self._limits.get(kind, default))

    def in_use(self, device: str) -> int:
        """Return how many permits are held now."""
        pool = self._pool(device)
        return pool.size - pool.free

    def try_acquire(self, device: str) -> bool:
        """Take a permit if one is free and nobody waits."""
        pool = self._pools.get(device) or self._pool(device)
        if pool.free > 0:
            pool.free -= 1
            return True
        return False

    async def acquire(self, device: str, *, lane_id: str, stage: str, deadline: float | None = None) -> None:
        """Wait for a permit until *deadline* (loop time); DeadlineExceeded names lane and stage then."""
        if not self.try_acquire(device):
            late = partial(refusals.late, lane_id, stage, f", while it waited for {device}")
            await self._pool(device).waiters.wait(deadline, late, partial(self.release, device))

    def release(self, device: str) -> None:
        """Give a permit back; the longest waiter gets it."""
        pool = self._pools.get(device) or self._pool(device)
        if not pool.waiters.serve():
            pool.free += 1

    def _pool(self, device: str) -> _Pool:
        pool = self._pools.get(device)
        if pool is None:
            # `cuda` and `cuda:0` are the same accelerator.
            name = device.removesuffix(":0")
            pool = self._pools.get(name) or _Pool(self.limit(device))
            self._pools[device] = self._pools[name] = pool
        return pool
