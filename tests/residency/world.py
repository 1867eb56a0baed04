"""A simulated fleet around the residency core: it answers the actions in any order and checks every invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synapse_host.residency.core import Residency
from synapse_host.residency.types import (
    Admit,
    Evict,
    Granted,
    Key,
    Limits,
    Model,
    Phase,
    Refused,
    Restart,
    Revive,
    Slot,
    State,
)

FLEET = {
    "gte": Model(layers=22, nbytes=300, smallest=128),
    "qwen": Model(layers=28, nbytes=1200, smallest=128),
    "mini": Model(layers=6, nbytes=45, smallest=128),
    "minirank": Model(layers=12, nbytes=66, smallest=128),
}
RUNGS = (128, 256, 512, 1024, 2048)
WIDTHS = (128, 256)


def charged(core: Residency) -> tuple[int, int, int]:
    """Return (slots, executables, bytes) charged now."""
    slots = core.slots.values()
    return len(slots), sum(slot.model.layers for slot in slots), sum(slot.model.nbytes for slot in slots)


def resident(core: Residency, worker: str) -> set[Key]:
    """Return what is resident in *worker*."""
    return {slot.key for slot in core.slots.values() if slot.key.worker == worker and slot.state is State.RESIDENT}


class World:
    """Runs one random history; ``step`` does one event chosen by *pick*, an index into what is possible."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.core = Residency(limits or Limits(nbytes=6000))
        self.now = 0.0
        self.wire: list[Admit | Evict] = []
        """Exchanges without an answer yet."""
        self.gone: list[Admit | Evict] = []
        """Those whose process ended before they were answered."""
        self.dying: list[Restart] = []
        self.starting: list[Revive] = []
        self.held: set[int] = set()
        self.waiting: set[int] = set()
        self.answered = 0
        self.processes: dict[str, set[Key]] = {}
        """What each live process really holds."""
        for name, model in FLEET.items():
            self.core.open_worker(name, model)
            self.collect()

    # --- events ------------------------------------------------------------------------------------------------------

    def events(self) -> list[Callable[[Callable[[int], int]], None]]:
        found: list[Callable[[Callable[[int], int]], None]] = [self._request, self._request, self._time, self._guess]
        if self.held:
            found += [self._release] * 3
        if self.waiting:
            found.append(self._cancel)
        if self.wire:
            found += [self._answer] * 4
        if self.dying:
            found += [self._exit] * 2
        if self.starting:
            found += [self._start] * 2
        found += [self._fault, self._late]
        return found

    def step(self, pick: Callable[[int], int]) -> None:
        events = self.events()
        events[pick(len(events))](pick)
        self.collect()
        self.check()

    def _request(self, pick: Callable[[int], int]) -> None:
        if len(self.waiting) > 24:
            return
        ticket = self.core.request(self._key(pick), self.now)
        self.waiting.add(ticket)

    def _key(self, pick: Callable[[int], int]) -> Key:
        workers = list(self.core.workers)
        worker, place = workers[pick(len(workers))], pick(len(RUNGS) + len(WIDTHS))
        packed = place - len(RUNGS)
        return Key(worker, "shape", RUNGS[place]) if packed < 0 else Key(worker, "packed", WIDTHS[packed])

    def _guess(self, pick: Callable[[int], int]) -> None:
        key = self._key(pick)
        before = {slot.id for slot in self.core.slots.values()}
        self.core.prefetch(key)
        for action in self.core.take():
            assert isinstance(action, Admit) and action.key == key and before <= set(self.core.slots)
            self.wire.append(action)

    def _release(self, pick: Callable[[int], int]) -> None:
        ticket = sorted(self.held)[pick(len(self.held))]
        self.held.discard(ticket)
        self.core.release(ticket)

    def _cancel(self, pick: Callable[[int], int]) -> None:
        ticket = sorted(self.waiting)[pick(len(self.waiting))]
        self.waiting.discard(ticket)
        self.core.release(ticket)

    def _answer(self, pick: Callable[[int], int]) -> None:
        """Answer an exchange: of sixteen, one fails and two are out of resources."""
        one = self.wire.pop(pick(len(self.wire)))
        verdict = pick(16)
        held = self.processes[one.key.worker]
        if isinstance(one, Admit):
            if not self.core.wanted(one.slot):
                self.core.withdrawn(one.slot)
            elif verdict < 3:
                self.core.admit_failed(one.slot, self.now, exhausted=verdict > 0)
            else:
                held.add(one.key)
                self.core.admitted(one.slot)
        elif verdict == 0:
            self.core.evict_failed(one.slot, self.now)
        else:
            held.discard(one.key)
            self.core.evicted(one.slot)

    def _fault(self, pick: Callable[[int], int]) -> None:
        if pick(4):
            return
        names = sorted(self.core.workers)
        name = names[pick(len(names))]
        self.core.fault(name, self.core.workers[name].generation, self.now)

    def _late(self, pick: Callable[[int], int]) -> None:
        """A report about a process that is gone, and a fault of another generation: nothing may happen."""
        names = sorted(self.core.workers)
        before = charged(self.core), len(self.core.tickets)
        if self.gone:
            one = self.gone.pop()
            if isinstance(one, Evict):
                self.core.evict_failed(one.slot, self.now)
            elif not self.core.wanted(one.slot):
                self.core.withdrawn(one.slot)
            self.core.admit_failed(one.slot, self.now, exhausted=bool(pick(2)))
        self.core.fault(names[pick(len(names))], -1, self.now)
        assert (charged(self.core), len(self.core.tickets)) == before and not self.core.take()

    def _exit(self, pick: Callable[[int], int]) -> None:
        one = self.dying.pop(pick(len(self.dying)))
        self.processes.pop(one.worker, None)
        self.gone += [w for w in self.wire if w.key.worker == one.worker]
        self.wire = [w for w in self.wire if w.key.worker != one.worker]
        self.core.exited(one.worker)

    def _start(self, pick: Callable[[int], int]) -> None:
        one = self.starting.pop(pick(len(self.starting)))
        if pick(12) == 0:
            self.core.revive_failed(one.worker)
            return
        self.processes[one.worker] = {Key(one.worker, "shape", self.core.workers[one.worker].model.smallest)}
        self.core.restored(one.worker)

    def _time(self, pick: Callable[[int], int]) -> None:
        self.now += (0.1, 1.0, 30.0, 601.0)[pick(4)]
        self.core.expire(self.now)

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        for action in self.core.take():
            match action:
                case Admit(_, key):
                    self._one_exchange(action)
                    assert key.worker in self.processes
                case Evict():
                    self._one_exchange(action)
                    self._least_recently_used(self.core.slots[action.slot])
                case Granted(ticket):
                    assert ticket not in self.held, "a ticket holds at most one lease"
                    key = self.core.tickets[ticket].key
                    assert key in self.processes[key.worker], "leased, and its process doesn't hold it"
                    older = [t for t in self.waiting if t < ticket and self.core.tickets[t].key == key]
                    assert not older, "served before somebody who came first"
                    self.waiting.discard(ticket)
                    self.held.add(ticket)
                    self.answered += 1
                case Refused(ticket):
                    assert ticket not in self.held
                    self.waiting.discard(ticket)
                    self.answered += 1
                case Restart(name):
                    assert name in self.processes
                    assert name not in [one.worker for one in self.dying], "one fault restarts once"
                    forced = self.now >= self.core.workers[name].drain_until
                    assert forced or not any(
                        slot.leases for slot in self.core.slots.values() if slot.key.worker == name
                    )
                    self.dying.append(action)
                case Revive(name):
                    assert name not in self.processes, "beside a process that may live"
                    assert any(t.key.worker == name for t in self.core.tickets.values()), "started for nobody"
                    self.starting.append(action)

    def _one_exchange(self, action: Admit | Evict) -> None:
        assert action.slot not in [one.slot for one in self.wire], "two exchanges about one slot"
        self.wire.append(action)

    def _least_recently_used(self, victim: Slot) -> None:
        """Of the functions of its worker that nobody leases; the smallest rung only where nothing else is left."""

        def order(slot: Slot) -> tuple[bool, int]:
            return slot.key == Key(slot.key.worker, "shape", 128), slot.last_used

        assert not victim.leases
        same = [slot for slot in self.core.slots.values() if slot.key.worker == victim.key.worker and not slot.leases]
        assert all(order(victim) < order(slot) for slot in same if slot.state is State.RESIDENT), victim

    def check(self) -> None:
        core, limits = self.core, self.core.limits
        slots, executables, nbytes = charged(core)
        assert slots <= limits.total
        assert executables <= limits.executables
        assert limits.nbytes is None or nbytes <= limits.nbytes
        per_model: dict[Any, int] = {}
        for slot in core.slots.values():
            per_model[slot.key.worker] = per_model.get(slot.key.worker, 0) + 1
            assert slot.leases >= 0
            assert not slot.leases or slot.state in (State.RESIDENT, State.FAILED), slot
        assert max(per_model.values(), default=0) <= limits.per_model
        leases = [t.slot for t in core.tickets.values() if t.slot is not None and t.slot in core.slots]
        assert len(leases) == sum(slot.leases for slot in core.slots.values())
        for name, worker in core.workers.items():
            # A worker without a process holds nothing before somebody waits for it.
            assert worker.phase is not Phase.DOWN or not any(s.key.worker == name for s in core.slots.values())
        # Every process holds no more than is charged for it: a refund came too early otherwise.
        for name, process in self.processes.items():
            books = {slot.key for slot in core.slots.values() if slot.key.worker == name}
            assert process <= books, (name, process - books)
        assert len({slot.key for slot in core.slots.values()}) == len(core.slots), "a function is charged once"

    def settle(self) -> None:
        """Answer everything well, release everything: then nobody may wait any longer."""
        for _ in range(20_000):
            if self.wire:
                self._answer(lambda n: n - 1)
            elif self.dying:
                self._exit(lambda n: 0)
            elif self.starting:
                self._start(lambda n: n - 1)
            elif self.held:
                self._release(lambda n: 0)
            else:
                break
            self.collect()
            self.check()
        else:
            raise AssertionError("the fleet never settles")
        assert not self.waiting, {t: self.core.tickets[t] for t in self.waiting}
