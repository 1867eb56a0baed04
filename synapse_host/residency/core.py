"""Which Core ML functions are resident: leases, budgets, queue, eviction order, recovery. Pure; see ane.md 4.

Events go in (:meth:`Residency.request`, ``admitted``, ``evicted``, ``fault`` …), actions come out
(:meth:`Residency.take`). The shell (``synapse_host.residency.shell``) does the exchanges; nothing here waits or reads a
clock. A slot is charged from before its admission is sent until EVICTED or the confirmed exit of its process, through
every state, also the failed one.
"""

from __future__ import annotations

from typing import Final

from synapse_host.residency.types import (
    Action,
    Admit,
    Evict,
    Granted,
    Key,
    Limits,
    Model,
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
        self._ids = 0
        self._tick = 0
        self._actions: list[Action] = []

    def open_worker(self, worker: str, model: Model) -> None:
        """Announce a worker that is down and stays so until somebody waits for it, as after every exit.

        LOAD loads the model's smallest rung, so that is charged before the process starts (Revive), every time.
        """
        self.workers[worker] = Worker(model)

    def park(self, worker: str, now: float) -> None:
        """Take a worker down and leave it down until the next request for it (its model was unloaded)."""
        self._declined = {key for key in self._declined if key.worker != worker}
        if not self.workers[worker].down:
            self._recover(worker, now)
        self._pump()

    # --- requests ----------------------------------------------------------------------------------------------------

    def request(self, key: Key, now: float) -> int:
        """Ask for a lease on *key*; the answer comes as Granted or Refused. KeyError for an unknown worker."""
        model = self.workers[key.worker].model
        self._ids += 1
        ticket = Ticket(self._ids, key, now + ADMISSION_WAIT_S)
        self.tickets[ticket.id] = ticket
        if self.limits.ever(model):
            self._pump()
        else:
            self._refuse(ticket, Refusal.NEVER_FITS)
        return ticket.id

    def guessable(self, key: Key) -> bool:
        """Whether *key* may be admitted for nobody: its worker has room that nobody waits for; a failure is final."""
        closed = self.workers[key.worker].recovering or key in self._declined or self._slot(key) is not None
        return not closed and all(t.slot is not None for t in self.tickets.values()) and self._fits(key)

    def prefetch(self, key: Key) -> None:
        """Admit a ``guessable`` function for nobody."""
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
            self._touch(slot)
        self._drained(found.key.worker)
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

    def admitted(self, slot: int, generation: int) -> None:
        """ADMITTED came."""
        found = self._current(slot, generation, State.ADMITTING)
        if found is not None:
            found.state, found.in_flight = State.RESIDENT, False
            self._touch(found)
            self._drained(found.key.worker)
            self._pump()

    def withdrawn(self, slot: int, generation: int) -> None:
        """Nothing was sent, since it isn't ``wanted`` any more."""
        found = self._current(slot, generation, State.ADMITTING)
        if found is not None:
            del self.slots[found.id]
            self._drained(found.key.worker)
            self._pump()

    def admit_failed(self, slot: int, generation: int, now: float, *, exhausted: bool) -> None:
        """ERR came instead of ADMITTED, or the exchange broke (*exhausted* False).

        ``ane_resources_exhausted``: evict one unleased function of any worker and retry once; without a victim, or
        where nobody waits, drop the reservation; a second time, or any other failure, recovers the worker.
        """
        found = self._current(slot, generation, State.ADMITTING)
        if found is None:
            return
        found.in_flight = False
        if found.background:
            self._declined.add(found.key)
        if exhausted and (self.workers[found.key.worker].recovering or not self._waited_for(found.key)):
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
        self._drained(found.key.worker)
        self._pump()

    def evicted(self, slot: int, generation: int) -> None:
        """EVICTED came: the charge is refunded."""
        found = self._current(slot, generation, State.EVICTING)
        if found is not None:
            self._refund(found)
            self._drained(found.key.worker)
            self._pump()

    def evict_failed(self, slot: int, generation: int, now: float) -> None:
        """The eviction was refused or broke: nothing is refunded, the worker is recovered."""
        found = self._current(slot, generation, State.EVICTING)
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

    def exited(self, worker: str, generation: int) -> None:
        """The process is confirmed gone: its functions are refunded. A Revive follows once somebody waits."""
        found = self.workers[worker]
        if found.generation != generation:
            return
        found.recovering = found.restarting = found.down = True
        for slot in self._of(worker):
            if slot.id in self.slots:
                self._refund(slot)
        for ticket in self.tickets.values():
            if ticket.key.worker == worker:
                ticket.lose()
        self._pump()

    def restored(self, worker: str, generation: int) -> None:
        """The replacement is up and its model is loaded: *generation* is the new one."""
        found = self.workers[worker]
        assert found.reviving and generation > found.generation, "restored without a Revive"
        found.generation = generation
        found.recovering = found.restarting = found.down = found.reviving = False
        for slot in self._of(worker):
            slot.generation, slot.state = generation, State.RESIDENT
            self._touch(slot)
        self._pump()

    def revive_failed(self, worker: str, generation: int) -> None:
        """The worker didn't come up and no process is left: its reservations go, its waiters are refused.

        The next :meth:`request` on it tries again.
        """
        found = self.workers[worker]
        if found.generation != generation or not found.reviving:
            return
        found.reviving = False
        for slot in self._of(worker):
            del self.slots[slot.id]
        for ticket in [t for t in self.tickets.values() if t.key.worker == worker and t.slot is None]:
            self._refuse(ticket, Refusal.FAILED)
        self._pump()

    def unconfirmed(self, worker: str, generation: int) -> None:
        """The exit could not be confirmed in time: everything stays charged, the lane stays shut."""
        found = self.workers[worker]
        if found.generation == generation:
            found.recovering = found.closed = True
            self._pump()

    def expire(self, now: float) -> None:
        """Refuse what waited too long, and force recoveries that leases delay too long."""
        for ticket in [t for t in self.tickets.values() if t.slot is None and now >= t.expires]:
            self._refuse(ticket, Refusal.EXHAUSTED)
        for name, worker in self.workers.items():
            if worker.recovering and not worker.restarting and now >= worker.drain_until:
                self._restart(name)
        self._pump()

    def next_expiry(self) -> float | None:
        """Return when :meth:`expire` has something to do, None for never."""
        times = [ticket.expires for ticket in self.tickets.values() if ticket.slot is None]
        times += [w.drain_until for w in self.workers.values() if w.recovering and not w.restarting]
        return min(times, default=None)

    # --- views -------------------------------------------------------------------------------------------------------

    def take(self) -> list[Action]:
        """Return and forget the actions that became due, in order."""
        actions, self._actions = self._actions, []
        return actions

    def busy(self, worker: str) -> bool:
        """True while a lease, a request that waits, an exchange for one or a start of *worker* is under way."""
        return (
            self.workers[worker].reviving
            or any(ticket.key.worker == worker for ticket in self.tickets.values())
            or self._exchanging(worker)
        )

    def resident(self, worker: str) -> set[Key]:
        """Return the functions of *worker* that may be leased at once."""
        if self.workers[worker].recovering:
            return set()
        return {slot.key for slot in self._of(worker) if slot.state is State.RESIDENT}

    # --- inside ------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Serve tickets in arrival order, as far as budget and leases allow.

        Only the first ticket that needs budget may reserve or evict (strict FIFO). A ticket whose function is resident
        leases at once, one whose function is being admitted joins; but while that first ticket waits for somebody's
        lease to end, those behind it wait too: short leases that follow each other could starve it for ever.
        """
        blocked, starved = self._revive()
        for ticket in [t for t in self.tickets.values() if t.slot is None]:
            worker = self.workers[ticket.key.worker]
            if worker.closed:
                self._refuse(ticket, Refusal.CLOSED)
                continue
            if worker.recovering:
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
        waited_for = {ticket.key.worker for ticket in self.tickets.values() if ticket.slot is None}
        for name, worker in self.workers.items():
            if not worker.down or worker.reviving or worker.closed or name not in waited_for:
                continue
            key = Key(name, "shape", worker.model.smallest)
            if not self._fits(key):
                return True, not self._make_room(key)
            self._reserve(key).in_flight = False
            worker.reviving = True
            self._actions.append(Revive(name, worker.generation))
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
        if slot.state is not State.RESIDENT or self.workers[slot.key.worker].recovering:
            return False
        if key is None:
            return True
        # At its own cap a model makes room itself.
        own = sum(one.state is not State.EVICTING for one in self._of(key.worker))
        return own < self.limits.per_model or slot.key.worker == key.worker

    def _victim(self, key: Key | None) -> Slot | None:
        """The least recently used unleased function; a model's smallest rung only when nothing else will do."""

        def order(slot: Slot) -> tuple[bool, int]:
            model = self.workers[slot.key.worker].model
            return slot.key.kind == "shape" and slot.key.tokens == model.smallest, slot.last_used

        free = [slot for slot in self.slots.values() if not slot.leases and self._eligible(slot, key)]
        return min(free, key=order, default=None)

    def _reserve(self, key: Key) -> Slot:
        worker = self.workers[key.worker]
        self._ids += 1
        slot = Slot(self._ids, key, worker.generation, worker.model.layers, worker.model.nbytes)
        self.slots[slot.id] = slot
        return slot

    def _admit(self, key: Key) -> Slot:
        made = self._reserve(key)
        self._actions.append(Admit(made.id, key, made.generation))
        return made

    def _refund(self, slot: Slot) -> None:
        """Drop what is gone for certain; an admission that waited for it is sent again, if somebody still waits."""
        del self.slots[slot.id]
        for waiting in self._waiting_for(slot):
            waiting.waits_for = None
            if self.workers[waiting.key.worker].recovering or not self._waited_for(waiting.key):
                del self.slots[waiting.id]
            else:
                waiting.in_flight = True
                self._actions.append(Admit(waiting.id, waiting.key, waiting.generation))

    def _fail(self, slot: Slot) -> None:
        """Nothing is known of a slot any more; it stays charged."""
        slot.state, slot.in_flight = State.FAILED, False
        for waiting in self._waiting_for(slot):
            # Nothing of it is on the wire; waiting for a recovery that waits for it would never end.
            self._refuse_waiters(waiting, Refusal.EXHAUSTED)
            del self.slots[waiting.id]

    def _evict(self, slot: Slot) -> None:
        slot.state, slot.in_flight = State.EVICTING, True
        self._actions.append(Evict(slot.id, slot.key, slot.generation))

    def _grant(self, ticket: Ticket, slot: Slot) -> None:
        ticket.slot = slot.id
        slot.leases += 1
        self._touch(slot)
        self._actions.append(Granted(ticket.id))

    def _refuse(self, ticket: Ticket, why: Refusal, slot: int | None = None) -> None:
        del self.tickets[ticket.id]
        self._actions.append(Refused(ticket.id, why, slot, ticket.key))

    def _refuse_waiters(self, slot: Slot, why: Refusal) -> None:
        for ticket in [t for t in self.tickets.values() if t.slot is None and t.key == slot.key]:
            self._refuse(ticket, why, slot.id)

    def _recover(self, worker: str, now: float) -> None:
        found = self.workers[worker]
        if not found.recovering:
            found.recovering = True
            found.drain_until = now + DRAIN_S
        self._drained(worker)

    def _drained(self, worker: str) -> None:
        """Restart a recovering worker once nothing of it is leased or on the wire."""
        found = self.workers[worker]
        busy = self._exchanging(worker) or any(slot.leases for slot in self._of(worker))
        if found.recovering and not found.restarting and not busy:
            self._restart(worker)

    def _exchanging(self, worker: str) -> bool:
        """True while an exchange about a function is on the wire, other than the admission of a mere guess."""
        return any(
            slot.in_flight and (slot.state is not State.ADMITTING or not slot.background or self._waited_for(slot.key))
            for slot in self._of(worker)
        )

    def _waited_for(self, key: Key) -> bool:
        return any(ticket.slot is None and ticket.key == key for ticket in self.tickets.values())

    def _restart(self, worker: str) -> None:
        found = self.workers[worker]
        found.restarting = True
        self._actions.append(Restart(worker, found.generation))

    def _current(self, slot: int, generation: int, state: State) -> Slot | None:
        """The slot a reply is about; None for a reply of another generation, or one that comes too late."""
        found = self.slots.get(slot)
        current = found is not None and found.generation == generation and found.state is state and found.in_flight
        return found if current else None

    def _touch(self, slot: Slot) -> None:
        self._tick += 1
        slot.last_used = self._tick

    def _slot(self, key: Key) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.key == key), None)

    def _of(self, worker: str) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.key.worker == worker]

    def _waiting_for(self, victim: Slot) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.waits_for == victim.id]
