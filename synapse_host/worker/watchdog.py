"""How long an exchange may show no completed work: the silence windows of protocol-v3 section 4. Pure: no clock."""

from __future__ import annotations

from typing import Final

from engines.protocol.messages import Phase, Ping, Request, phases
from synapse_host.config import Windows

JUMP: Final = 1.0
"""Seconds by which a check may come late before the lateness counts as a stopped host, not as a silent worker."""


class Watchdog:
    """Watches one exchange at a time; ``deadline`` is None while idle, because idle is not silence.

    The caller has validated every progress frame; bytes alone never come here.

    Attributes:
        deadline: when the exchange has been silent for its whole window, in the caller's clock.
        window: the window in force, in seconds.
        gaps: the longest silence seen, in seconds, by the window it was measured against.
    """

    def __init__(self, windows: Windows, gaps: dict[str, float] | None = None) -> None:
        self.deadline: float | None = None
        self.window = 0.0
        self.gaps: dict[str, float] = {} if gaps is None else gaps
        self._windows = windows
        self._request: type[Request]
        self._name: str
        self._since: float
        self._header: bool

    def start(self, request: type[Request], engine: str, now: float) -> None:
        """Start watching: the stream is owned, the permit is held and the request is about to be written."""
        self._request = request
        self._header = False
        self._renew(phases(request, engine)[0], now)

    def progress(self, phase: Phase, now: float) -> None:
        """Renew with the window of *phase*."""
        self._heard(now)
        self._renew(phase, now)

    def header(self, now: float) -> None:
        """Renew, once: the terminal header came and its raw frame must follow within this window."""
        if not self._header:
            self._header = True
            self._heard(now)
            self._since = now
            self.deadline = now + self.window

    def stop(self, now: float | None = None) -> None:
        """Nothing to watch any more; *now* when the reply is drained, None when the exchange was given up."""
        self.deadline = None
        if now is not None:
            self._heard(now)

    def expired(self, now: float, *, late: float = 0.0) -> bool:
        """Return whether the exchange has been silent for its whole window.

        *late*: by how many seconds this check came later than planned. Beyond :data:`JUMP` the host itself stood still
        (a suspended machine, a blocked loop) and can't have read anything meanwhile, so the window starts anew.
        """
        if self.deadline is None or now < self.deadline:
            return False
        if late > JUMP:
            self._since = now
            self.deadline = now + self.window
            return False
        self._heard(now)
        return True

    def _renew(self, phase: Phase, now: float) -> None:
        # PING and UNLOAD share the control phase, but not the window: 120 s against 600 s.
        self._name = "ping" if self._request is Ping else phase.value
        self.window = getattr(self._windows, self._name)
        self._since = now
        self.deadline = now + self.window

    def _heard(self, now: float) -> None:
        """Keep the silence that ends now, if it is the longest of its window."""
        self.gaps[self._name] = max(now - self._since, self.gaps.get(self._name, 0.0))
