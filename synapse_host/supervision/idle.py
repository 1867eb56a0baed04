"""What happens on a lane that nobody uses: its worker is asked how it is, and ends where it rests too long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from engines.protocol.errors import LocalProtocolError
from engines.protocol.messages import Ping
from synapse_host.supervision.health import LaneHealth, Refresher
from synapse_host.supervision.lifecycle import Generations
from synapse_host.supervision.queueing import Turns
from synapse_host.worker.exchange import Exchange
from synapse_host.worker.session import Session
from synapse_host.worker.startup import LaneContext

LEAST_S: Final = 0.05
"""Seconds between two looks for a worker that rests, at least."""

_log = logging.getLogger(__name__)


class Idle:
    """One lane's timers. Its supervisor starts them with the first worker and stops them when it closes."""

    def __init__(self, context: LaneContext, turns: Turns, workers: Generations, health: LaneHealth) -> None:
        self.rest: Callable[[], None] = workers.rest
        """Ends a worker that has had nothing to do for ``HostConfig.idle_unload`` seconds; the Neural Engine's lanes
        put their own here."""
        self._spec = context.spec
        self._turns = turns
        self._workers = workers
        self._health = health
        self._loop = asyncio.get_running_loop()
        self._timers = [Refresher(context.config.ping_interval, self._ping)]
        if (after := context.config.idle_unload) is not None:
            self._timers.append(Refresher(max(after / 4, LEAST_S), partial(self._end, after)))

    def start(self) -> None:
        """Begin; does nothing when running."""
        for timer in self._timers:
            timer.start()

    def stop(self) -> None:
        """End; idempotent."""
        for timer in self._timers:
            timer.stop()

    def _session(self) -> Session | None:
        """Return the living worker's session while nobody uses or wants the lane."""
        session = self._workers.session
        if self._turns.held or self._workers.starting is not None or session is None or session.dead or session.open:
            return None
        return session

    def _ping(self) -> None:
        """PING an idle worker. A busy one is alive as its exchange proves, and PING never starts a missing one."""
        session = self._session()
        if session is None:
            return
        self._turns.held = True
        waiter: asyncio.Future[Any] = self._loop.create_future()
        # Nobody awaits it: the supervisor's `replied` stamps what the reply says.
        waiter.cancel()
        try:
            session.begin(Exchange(Ping(req_id=session.next_req_id()), None, waiter, "ping"))
        except LocalProtocolError:
            self._turns.pass_on()

    def _end(self, after: float) -> None:
        """End a worker that has had nothing to do for *after* seconds; the next request starts another one."""
        if self._session() is not None and self._health.rests(self._loop.time(), after):
            _log.info("idle worker ends: lane=%s model=%s", self._spec.lane_id, self._spec.model)
            self.rest()
