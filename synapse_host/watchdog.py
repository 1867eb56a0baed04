"""How long an exchange may show no completed work: the silence windows of protocol-v3 section 4. Pure: no clock."""

from __future__ import annotations

from typing import Final

from engines.protocol.messages import Phase, Ping, Request, phases
from synapse_host.config import Windows

JUMP: Final = 1.0
"""Seconds by which a check may come late before the lateness counts as a stopped host, not as a silent worker."""


def window(request: type[Request], phase: Phase, windows: Windows) -> float:
    """Return the silence window in seconds of an exchange in *phase*."""
    # PING and UNLOAD share the control phase, but not the window: 120 s against 600 s.
    if request is Ping:
        return windows.ping
    if phase is Phase.SETUP:
        return windows.setup
    return windows.inference if phase is Phase.INFERENCE else windows.control


class Watchdog:
    """Watches one exchange at a time; ``deadline`` is None while idle, because idle is not silence.

    The caller has validated every progress frame; bytes alone never come here.
    """

    __slots__ = ("_first", "_header", "_request", "_window", "_windows", "deadline")

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._window = 0.0
        self._header = False
        self._request: type[Request] = Request
        self.deadline: float | None = None
        self._first: dict[tuple[type[Request], str], float] = {}

    @property
    def window(self) -> float:
        """The window in force, in seconds."""
        return self._window

    def start(self, request: type[Request], engine: str, now: float) -> None:
        """Start watching: the stream is owned, the permit is held and the request is about to be written."""
        self._request = request
        self._header = False
        first = self._first.get((request, engine))
        if first is None:
            first = self._first[request, engine] = window(request, phases(request, engine)[0], self._windows)
        self._window = first
        self.deadline = now + self._window

    def progress(self, phase: Phase, now: float) -> None:
        """Renew with the window of *phase*."""
        self._window = window(self._request, phase, self._windows)
        self.deadline = now + self._window

    def header(self, now: float) -> None:
        """Renew, once: the terminal header came and its raw frame must follow within this window."""
        if not self._header:
            self._header = True
            self.deadline = now + self._window

    def stop(self) -> None:
        """The reply is drained: nothing to watch."""
        self.deadline = None

    def expired(self, now: float, *, late: float = 0.0) -> bool:
        """Return whether the exchange has been silent for its whole window.

        *late*: by how many seconds this check came later than planned. Beyond :data:`JUMP` the host itself stood still
        (a suspended machine, a blocked loop) and can't have read anything meanwhile, so the window starts anew.
        """
        if self.deadline is None or now < self.deadline:
            return False
        if late > JUMP:
            self.deadline = now + self._window
            return False
        return True
