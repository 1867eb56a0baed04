"""One request on its way to a worker and back."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from engines.protocol.messages import AnyRequest


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
    sent: float = 0.0
    """When a PING left, by :func:`time.monotonic`: the loop's own clock may be too coarse for its round trip."""
