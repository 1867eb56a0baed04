"""The clients of a small server beside the host: each is a task that ends with its connection or with the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

FLUSH_S: Final = 10.0
"""How long a client may take to read the last answer once its connection ends."""


class Clients:
    """Who is connected now."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    @asynccontextmanager
    async def connected(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Count the running task while the block serves it, and close its connection in every case.

        After a block that ended well the client has FLUSH_S to read what was written. After one that failed or was
        cancelled what it hasn't read is dropped: `close` would wait for the client to read it, which may be never.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
            writer.close()
            async with asyncio.timeout(FLUSH_S):
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The client went away, fell silent, doesn't read or talks nonsense: its own business.
            pass
        except asyncio.CancelledError:
            # Ours to end here: only `end` cancels, and the streams' own callback would report it as an error.
            pass
        finally:
            writer.transport.abort()
            with suppress(OSError, asyncio.CancelledError):
                # An aborted transport closes in the next turn of the loop, whatever the client does.
                await writer.wait_closed()
            # Counted until here: `end` and the limit of clients see a connection as long as it is open.
            self._tasks.discard(task)

    async def end(self) -> None:
        """Cut every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
