"""Which Core ML functions are resident: leases, budgets, queue, eviction order, recovery. Pure; see ane.md 4.

Theory of operation. One :class:`Residency` keeps the books of all Neural Engine workers of a host. A *slot* is a
charged place: one function of one worker, from before its admission is sent until EVICTED or the confirmed exit of its
process, through every state, also the failed one. A *ticket* is one request's claim: it waits, then holds one lease on
one slot until it is released; a leased slot is never evicted.

Events go in (:meth:`Residency.request`, ``admitted``, ``evicted``, ``fault`` ...) with ``now`` as an argument, actions
come out (:meth:`Residency.take`): send an admission or an eviction, answer a ticket, stop a worker, start one. The
shell carries them out in any order and at the same time, and reports back on each once. Slots are numbered and no
number comes twice, so a report about a process that is gone changes nothing; a fault names the generation it is of, for
the same reason. Nothing here waits, reads a clock or knows of a connection.

Tickets are served in arrival order. The first that needs room may evict, the least recently used function first and a
model's smallest rung last; those behind it may join an admission or lease what is resident, but not while it waits for
somebody's lease to end. A worker that is out of resources costs one eviction and one second try.

A worker whose exchange failed drains, is stopped, and is refunded when its exit is confirmed; it starts again once
somebody waits for it, and the rung that its LOAD brings is charged before that. An exit that nobody can confirm keeps
its charges and shuts the lane.
"""

from __future__ import annotations

from itertools import count
from typing import Final

from synapse_host.residency.types import (
    Action,
    Admit,
    Evict,
    Granted,
    Key,
    Limits,
    Model,
    Phase,
    Refusal,
    Refused,
    Restart,
    Revive,
    Slot,
    State,
    Ticket,
    Worker,
)

ADMISSION_WAIT_S: Final = 600.0
"""A request that waits longer for budget is refused, transiently."""
DRAIN_S: Final = 600.0
"""How long a worker's leases may delay its recovery before it is forced."""


class Residency:
    """The state of all Neural Engine workers of this host."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.workers: dict[str, Worker] = {}
        self.slots: dict[int, Slot] = {}
        self.tickets: dict[int, Ticket] = {}
        # Background admissions that failed: not tried again before their worker was parked.
        self._declined: set[Key] = set()
        self._ids, self._ticks = count(1), count(1)
        self._actions: list[Action] = []

    def open_worker(self, worker: str, model: Model) -> None:
        """Announce a worker that is down and stays so until somebody waits for it, as after every exit.

        LOAD loads the model's smallest rung, so that is charged before the process starts (Revive), every time.
        """
        self.workers[worker] = Worker(model)

    def park(self, worker: str, now: float) -> None:
        """Take a worker down and leave it down until the next request for it (its model was unloaded)."""
        self._declined = {key for key in self._declined if key.worker != worker}
        self._recover(worker, now)
        self._pump()

    # --- requests ----------------------------------------------------------------------------------------------------

    def request(self, key: Key, now: float) -> int:
        """Ask for a lease on *key*; the answer comes as Granted or Refused. KeyError for an unknown worker."""
        model = self.workers[key.worker].model
        ticket = Ticket(next(self._ids), key, now + ADMISSION_WAIT_S)
        self.tickets[ticket.id] = ticket
        if self.limits.fits(key.worker, model, ()):
            self._pump()
        else:
            self._refuse(ticket, Refusal.NEVER_FITS)
        return ticket.id

    def guessable(self, key: Key) -> bool:
        """Whether *key* may be admitted unasked: there is room that nobody waits for, and it didn't fail before."""
        closed = self.workers[key.worker].phase is not Phase.UP or key in self._declined or self._slot(key) is not None
        return not closed and not self.waiting() and self._fits(key)

    def prefetch(self, key: Key) -> None:
        """Admit a ``guessable`` function before anybody asks for it."""
        if self.guessable(key):
            self._admit(key).background = True

    def release(self, ticket: int) -> None:
        """End a lease, or withdraw a request that still waits. An admission that runs goes on. Idempotent."""
        found = self.tickets.pop(ticket, None)
        if found is None:
            return
        if found.slot is not None and found.slot in self.slots:
            slot = self.slots[found.slot]
            slot.leases -= 1
            slot.last_used = next(self._ticks)
        self._pump()

    def compiling(self, ticket: int) -> bool:
        """True while the ticket waits for an admission of its own function (``shape_compiling``)."""
        found = self.tickets.get(ticket)
        slot = self._slot(found.key) if found is not None else None
        # A spawn, a LOAD or a wait for the stream is no compilation (protocol-v3, 5: deadline_exceeded).
        return slot is not None and slot.state is State.ADMITTING and slot.sent

    def wanted(self, slot: int) -> bool:
        """Whether an admission that is to be sent now still is for somebody; then it counts as sent."""
        found = self.slots.get(slot)
        if found is not None and (found.background or self._waited_for(found.key)):
            found.sent = True
            return True
        return False

    # --- replies -----------------------------------------------------------------------------------------------------

    def admitted(self, slot: int) -> None:
        """ADMITTED came."""
        found = self._in_flight(slot)
        if found is not None:
            found.state, found.in_flight = State.RESIDENT, False
            found.last_used = next(self._ticks)
            self._pump()

    def withdrawn(self, slot: int) -> None:
        """Nothing was sent, since it isn't ``wanted`` any more."""
        if self._in_flight(slot) is not None:
            del self.slots[slot]
            self._pump()

    def admit_failed(self, slot: int, now: float, *, exhausted: bool) -> None:
        """ERR came instead of ADMITTED, or the exchange broke (*exhausted* False).

        ``ane_resources_exhausted``: evict one unleased function of any worker and retry once; without a victim, or
        where nobody waits, drop the reservation; a second time, or any other failure, recovers the worker.
        """
        found = self._in_flight(slot)
        if found is None:
            return
        found.in_flight = False
        if found.background:
            self._declined.add(found.key)
        if exhausted and not (self._up(found) and self._waited_for(found.key)):
            del self.slots[found.id]  # refused by a worker that is about to restart: those who wait go on waiting
        elif exhausted and not found.retried:
            victim = self._victim(None)
            if victim is not None:
                found.retried, found.waits_for = True, victim.id
                self._evict(victim)
            else:
                self._refuse_waiters(found, Refusal.EXHAUSTED)
                del self.slots[found.id]
        else:
            found.state = State.FAILED
            self._refuse_waiters(found, Refusal.EXHAUSTED if exhausted else Refusal.FAILED)
            self._recover(found.key.worker, now)
        self._pump()

    def evicted(self, slot: int) -> None:
        """EVICTED came: the charge is refunded."""
        found = self._in_flight(slot)
        if found is not None:
            self._refund(found)
            self._pump()

    def evict_failed(self, slot: int, now: float) -> None:
        """The eviction was refused or broke: nothing is refunded, the worker is recovered."""
        found = self._in_flight(slot)
        if found is not None:
            self._fail(found)
            self._recover(found.key.worker, now)
            self._pump()

    def fault(self, worker: str, generation: int, now: float) -> None:
        """A channel broke. One fault restarts once: stale generations and faults during recovery do nothing."""
        if self.workers[worker].generation != generation:
            return
        for slot in self._of(worker):
            if slot.in_flight:
                self._fail(slot)
        self._recover(worker, now)
        self._pump()

    def exited(self, worker: str) -> None:
        """The process is confirmed gone: its functions are refunded. A Revive follows once somebody waits."""
        self.workers[worker].phase = Phase.DOWN
        for slot in self._of(worker):
            if slot.id in self.slots:
                self._refund(slot)
        self._pump()

    def restored(self, worker: str) -> None:
        """The replacement is up and its model is loaded: the next generation."""
        found = self.workers[worker]
        found.generation, found.phase = found.generation + 1, Phase.UP
        for slot in self._of(worker):
            slot.state, slot.last_used = State.RESIDENT, next(self._ticks)
        self._pump()

    def revive_failed(self, worker: str) -> None:
        """The worker didn't come up and no process is left: its reservations go, its waiters are refused.

        The next :meth:`request` on it tries again.
        """
        self.workers[worker].phase = Phase.DOWN
        for slot in self._of(worker):
            del self.slots[slot.id]
        for ticket in self.waiting():
            if ticket.key.worker == worker:
                self._refuse(ticket, Refusal.FAILED)
        self._pump()

    def unconfirmed(self, worker: str) -> None:
        """The exit could not be confirmed in time: everything stays charged, the lane stays shut."""
        self.workers[worker].phase = Phase.CLOSED
        self._pump()

    def expire(self, now: float) -> None:
        """Refuse what waited too long, and force recoveries that leases delay too long."""
        for ticket in self.waiting():
            if now >= ticket.expires:
                self._refuse(ticket, Refusal.EXHAUSTED)
        for name, worker in self.workers.items():
            if worker.phase is Phase.DRAINING and now >= worker.drain_until:
                self._restart(name)
        self._pump()

    def next_expiry(self) -> float | None:
        """Return when :meth:`expire` has something to do, None for never."""
        times = [ticket.expires for ticket in self.waiting()]
        times += [worker.drain_until for worker in self.workers.values() if worker.phase is Phase.DRAINING]
        return min(times, default=None)

    # --- views -------------------------------------------------------------------------------------------------------

    def take(self) -> list[Action]:
        """Return and forget the actions that became due, in order."""
        actions, self._actions = self._actions, []
        return actions

    def waiting(self) -> list[Ticket]:
        """Return the tickets that wait, in order of arrival."""
        return [ticket for ticket in self.tickets.values() if ticket.slot is None]

    def busy(self, worker: str) -> bool:
        """True while a lease, a request that waits, an exchange for one or a start of *worker* is under way."""
        return (
            self.workers[worker].phase is Phase.STARTING
            or any(ticket.key.worker == worker for ticket in self.tickets.values())
            or self._exchanging(worker)
        )

    def resident(self, worker: str) -> set[Key]:
        """Return the functions of *worker* that may be leased at once."""
        return {slot.key for slot in self._of(worker) if slot.state is State.RESIDENT and self._up(slot)}

    # --- inside ------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """End workers that have drained, then serve tickets in arrival order, as far as budget and leases allow.

        Only the first ticket that needs budget may reserve or evict (strict FIFO). A ticket whose function is resident
        leases at once, one whose function is being admitted joins; but while that first ticket waits for somebody's
        lease to end, those behind it wait too: short leases that follow each other could starve it for ever.
        """
        for name, worker in self.workers.items():
            leased = any(slot.leases for slot in self._of(name))
            if worker.phase is Phase.DRAINING and not leased and not self._exchanging(name):
                self._restart(name)
        blocked, starved = self._revive()
        for ticket in self.waiting():
            phase = self.workers[ticket.key.worker].phase
            if phase is Phase.CLOSED:
                self._refuse(ticket, Refusal.CLOSED)
            if phase is not Phase.UP:
                continue
            slot = self._slot(ticket.key)
            if slot is not None and slot.state is State.RESIDENT:
                if not starved:
                    self._grant(ticket, slot)
            elif blocked or (slot is not None and slot.state is State.ADMITTING):
                continue
            elif slot is not None:
                blocked = True  # leaving: its place comes back with EVICTED
            elif self._fits(ticket.key):
                self._admit(ticket.key)
            else:
                blocked = True
                starved = not self._make_room(ticket.key)

    def _revive(self) -> tuple[bool, bool]:
        """Charge the smallest rungs of workers that are down and waited for, and start them: before every ticket.

        Return (one waits for room, and it waits for somebody's lease).
        """
        waited_for = {ticket.key.worker for ticket in self.waiting()}
        for name, worker in self.workers.items():
            if worker.phase is not Phase.DOWN or name not in waited_for:
                continue
            key = Key(name, "shape", worker.model.smallest)
            if not self._fits(key):
                return True, not self._make_room(key)
            self._reserve(key).in_flight = False
            worker.phase = Phase.STARTING
            self._actions.append(Revive(name))
        return False, False

    def _make_room(self, key: Key) -> bool:
        """Evict until what leaves suffices for *key*; False when only somebody's lease stands in the way."""
        while not self._fits(key, leaving=True):
            victim = self._victim(key)
            if victim is None:
                return not any(self._eligible(slot, key) for slot in self.slots.values() if slot.leases)
            self._evict(victim)
        return True

    def _fits(self, key: Key, *, leaving: bool = False) -> bool:
        """Whether *key* fits the budget; *leaving*: as if everything on its way out were gone."""
        kept = [slot for slot in self.slots.values() if not (leaving and slot.state is State.EVICTING)]
        return self.limits.fits(key.worker, self.workers[key.worker].model, kept)

    def _eligible(self, slot: Slot, key: Key | None) -> bool:
        if slot.state is not State.RESIDENT or not self._up(slot):
            return False
        if key is None:
            return True
        # At its own cap a model makes room itself.
        own = sum(one.state is not State.EVICTING for one in self._of(key.worker))
        return own < self.limits.per_model or slot.key.worker == key.worker

    def _victim(self, key: Key | None) -> Slot | None:
        """The least recently used unleased function; a model's smallest rung only when nothing else will do."""

        def order(slot: Slot) -> tuple[bool, int]:
            return slot.key == Key(slot.key.worker, "shape", slot.model.smallest), slot.last_used

        free = [slot for slot in self.slots.values() if not slot.leases and self._eligible(slot, key)]
        return min(free, key=order, default=None)

    def _reserve(self, key: Key) -> Slot:
        slot = Slot(next(self._ids), key, self.workers[key.worker].model)
        self.slots[slot.id] = slot
        return slot

    def _admit(self, key: Key) -> Slot:
        made = self._reserve(key)
        self._actions.append(Admit(made.id, key))
        return made

    def _refund(self, slot: Slot) -> None:
        """Drop what is gone for certain; an admission that waited for it is sent again, if somebody still waits."""
        del self.slots[slot.id]
        for waiting in self._admissions_behind(slot):
            waiting.waits_for = None
            if self._up(waiting) and self._waited_for(waiting.key):
                waiting.in_flight = True
                self._actions.append(Admit(waiting.id, waiting.key))
            else:
                del self.slots[waiting.id]

    def _fail(self, slot: Slot) -> None:
        """Nothing is known of a slot any more; it stays charged."""
        slot.state, slot.in_flight = State.FAILED, False
        for waiting in self._admissions_behind(slot):
            # Nothing of it is on the wire; waiting for a recovery that waits for it would never end.
            self._refuse_waiters(waiting, Refusal.EXHAUSTED)
            del self.slots[waiting.id]

    def _evict(self, slot: Slot) -> None:
        slot.state, slot.in_flight = State.EVICTING, True
        self._actions.append(Evict(slot.id, slot.key))

    def _grant(self, ticket: Ticket, slot: Slot) -> None:
        ticket.slot = slot.id
        slot.leases += 1
        slot.last_used = next(self._ticks)
        self._actions.append(Granted(ticket.id))

    def _refuse(self, ticket: Ticket, why: Refusal) -> None:
        del self.tickets[ticket.id]
        self._actions.append(Refused(ticket.id, why, ticket.key))

    def _refuse_waiters(self, slot: Slot, why: Refusal) -> None:
        for ticket in self.waiting():
            if ticket.key == slot.key:
                self._refuse(ticket, why)

    def _recover(self, worker: str, now: float) -> None:
        """Let a worker that is up drain; it is restarted by the next :meth:`_pump` that finds it idle."""
        found = self.workers[worker]
        if found.phase is Phase.UP:
            found.phase, found.drain_until = Phase.DRAINING, now + DRAIN_S

    def _exchanging(self, worker: str) -> bool:
        """True while an exchange about a function is on the wire, other than the admission of a mere guess."""
        return any(
            slot.in_flight and (slot.state is not State.ADMITTING or not slot.background or self._waited_for(slot.key))
            for slot in self._of(worker)
        )

    def _waited_for(self, key: Key) -> bool:
        return any(ticket.key == key for ticket in self.waiting())

    def _restart(self, worker: str) -> None:
        self.workers[worker].phase = Phase.STOPPING
        self._actions.append(Restart(worker))

    def _in_flight(self, slot: int) -> Slot | None:
        """The slot a report is about; None for one that comes too late: its process is gone, or known to be broken."""
        found = self.slots.get(slot)
        return found if found is not None and found.in_flight else None

    def _up(self, slot: Slot) -> bool:
        return self.workers[slot.key.worker].phase is Phase.UP

    def _slot(self, key: Key) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.key == key), None)

    def _of(self, worker: str) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.key.worker == worker]

    def _admissions_behind(self, victim: Slot) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.waits_for == victim.id]
