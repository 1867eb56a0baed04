"""Work in threads whose end nobody waits for: neither a caller past its deadline, nor the interpreter at its exit.

asyncio's own pool is joined by both, and a text of 16 MiB, or a bundle's template, may take a while.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from synapse_host.errors import QueueFull

LIMIT: Final = min(32, (os.cpu_count() or 1) + 4)
"""Threads at once, as many as asyncio's pool has; further work waits."""

T = TypeVar("T")


class _Threads:
    """Daemon threads that are started for work and end when there is no more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = 0

    def start(self, job: Callable[[], None]) -> None:
        """Run *job* in a thread; QueueFull where the machine starts none and no other will come to it."""
        # A thread counts once it runs: the system may refuse to start it (a limit of processes).
        with self._lock:
            if self._running < LIMIT:
                try:
                    start_thread(self._run, name="synapse-background")
                except QueueFull:
                    if not self._running:
                        raise
                else:
                    self._running += 1
            # Whoever runs takes it: a thread ends only under the lock, and where nothing is left to do.
            self._jobs.append(job)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running -= 1
                    return
                job = self._jobs.popleft()
            job()


_threads = _Threads()


def _forget() -> None:
    # A forked child has none of its parent's threads.
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def start_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Start a daemon thread and return it. QueueFull (``reason: threads``) where the system gives this process none."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        raise QueueFull(
            "the system starts no further thread for this process; see ulimit -u and the limits of its container",
            details={"reason": "threads"},
        ) from exc
    return thread


def beside(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run *work* in a thread; the future of its result belongs to the running loop. Nobody has to wait for it.

    Raises QueueFull where the machine has no thread for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    # Where nobody waits any more, a failure is no news.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def job() -> None:
        value, error = None, None
        try:
            value = context.run(work)
        except BaseException as exc:  # it belongs to who waits
            error = exc
        # The loop may be closed by now.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value, error)

    _threads.start(job)
    return future
