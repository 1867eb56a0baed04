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
    """

    def __init__(self, windows: Windows, gaps: dict[str, float] | None = None) -> None:
        self.gaps: dict[str, float] = {} if gaps is None else gaps
        """The longest silence seen, in seconds, by the window it was measured against."""
        self._name = "control"
        self._since = 0.0
        self._windows = windows
        self._window = 0.0
        self._header = False
        self._request: type[Request] = Request
        self.deadline: float | None = None

    @property
    def window(self) -> float:
        """The window in force, in seconds."""
        return self._window

    def start(self, request: type[Request], engine: str, now: float) -> None:
        """Start watching: the stream is owned, the permit is held and the request is about to be written."""
        self._request = request
        self._header = False
        self._enter(phases(request, engine)[0])
        self._since = now
        self.deadline = now + self._window

    def progress(self, phase: Phase, now: float) -> None:
        """Renew with the window of *phase*."""
        self._heard(now)
        self._enter(phase)
        self.deadline = now + self._window

    def _enter(self, phase: Phase) -> None:
        # PING and UNLOAD share the control phase, but not the window: 120 s against 600 s.
        self._name = "ping" if self._request is Ping else phase.value
        self._window = getattr(self._windows, self._name)

    def header(self, now: float) -> None:
        """Renew, once: the terminal header came and its raw frame must follow within this window."""
        if not self._header:
            self._header = True
            self._heard(now)
            self.deadline = now + self._window

    def stop(self, now: float | None = None) -> None:
        """Nothing to watch any more; *now* when the reply is drained, None when the exchange was given up."""
        self.deadline = None
        if now is not None and now - self._since > self.gaps.get(self._name, 0.0):
            self._heard(now)

    def _heard(self, now: float) -> None:
        gap = now - self._since
        self._since = now
        if gap > self.gaps.get(self._name, 0.0):
            self.gaps[self._name] = gap

    def expired(self, now: float, *, late: float = 0.0) -> bool:
        """Return whether the exchange has been silent for its whole window.

        *late*: by how many seconds this check came later than planned. Beyond :data:`JUMP` the host itself stood still
        (a suspended machine, a blocked loop) and can't have read anything meanwhile, so the window starts anew.
        """
        if self.deadline is None or now < self.deadline:
            return False
        if late > JUMP:
            self._since = now
            self.deadline = now + self._window
            return False
        self._heard(now)
        return True
