"""The clients of a small server beside the host: each is a task that ends with its connection or with the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Clients:
    """Who is connected now."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    @asynccontextmanager
    async def connected(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Count the running task while the block serves it, and close its connection in every case."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The client went away, fell silent, doesn't read or talks nonsense: its own business.
            pass
        except asyncio.CancelledError:
            # Ours to end here: only `end` cancels, and the streams' own callback would report it as an error.
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def end(self) -> None:
        """Cut every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
