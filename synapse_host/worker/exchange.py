"""One request on its way to a worker and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from engines.protocol.messages import AnyReply, AnyRequest

Build: TypeAlias = Callable[[str, str], tuple[AnyRequest, Any]]
"""``build(req_id, model_ref)`` returns the request and its raw buffer or None. It may be called again when the worker
was replaced while the request waited, so it must not have side effects."""

Outcome: TypeAlias = tuple[AnyReply, Any]
"""The reply and its payload: float32 (n * dims,) or (candidates,), writable and owned by the caller; or None."""


class Lease:
    """What one request holds beside turn and permit. Whoever got it gives it back, unless an exchange took it over."""

    __slots__ = ("_give_back", "taken")

    def __init__(self, give_back: Callable[[], object]) -> None:
        self._give_back: Callable[[], object] | None = give_back
        self.taken = False
        """True once an exchange owns it, which releases it when the reply is drained."""

    def release(self) -> None:
        """Give it back; idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Rider(Protocol):
    """A caller that shares another's exchange."""

    build: Any
    future: asyncio.Future[Any]


class Exchange(Struct, eq=False):
    """Who waits for a request, and what it holds until the reply is drained."""

    request: AnyRequest
    payload: Any
    waiter: asyncio.Future[Any]
    stage: str
    deadline: float | None = None
    """When the caller stops waiting, in loop time; the exchange goes on."""
    permit: bool = False
    """It holds an execution permit."""
    turn: bool = True
    """It holds the stream's turn; the LOAD of a start doesn't, whoever waits for the start does."""
    lease: Lease | None = None
    """What it holds besides: on the Neural Engine the function that it runs on."""
    build: Any = None
    """What made the request, where *riders* share it."""
    riders: Sequence[Rider] = ()
    """Other callers whose rows follow those of *build*."""
    sent: float = 0.0
    """When a PING left, by :func:`time.monotonic`: the loop's own clock may be too coarse for its round trip."""
