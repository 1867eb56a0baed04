"""Which event loop our own programs run a host on."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop: uvloop's where it is installed (extra ``fast``), asyncio's elsewhere.

    A program of yours that opens a :class:`Host` chooses its loop itself, for example by ``uvloop.run(main())``.
    """
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
