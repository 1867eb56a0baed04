"""The host for callers without an event loop: the same calls on a loop thread of its own.

Every call is the asynchronous one, run on that thread; no policy is repeated here. The thread lives as long as the
host, since a worker's parent-death signal is tied to the thread that spawned it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from synapse_host.errors import InvalidRequest, QueueFull
from synapse_host.host import Host
from synapse_host.text.background import start_thread

if TYPE_CHECKING:
    from synapse_host.config import HostConfig
    from synapse_host.placement.assignment import Assignment
    from synapse_host.placement.matrix import HardwareMatrix
    from synapse_host.results import Piece

P = ParamSpec("P")
T = TypeVar("T")

LEAVE_S: Final = 5.0
"""Seconds that calls of other threads get to end by themselves once their host is closed."""


def _blocking(call: Callable[Concatenate[Host, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[SyncHost, P], T]:
    """Return a method of :class:`SyncHost` that runs *call* on the loop's thread; signature and help are the call's."""

    @wraps(call)
    def method(self: SyncHost, /, *args: P.args, **options: P.kwargs) -> T:
        return self._thread.call(call(self._host, *args, **options))

    return method


class SyncHost:
    """A :class:`~synapse_host.host.Host` behind blocking calls; usable from several threads at once."""

    def __init__(self, host: Host, thread: LoopThread) -> None:
        self._host = host
        self._thread = thread

    @classmethod
    @contextmanager
    def open(
        cls,
        matrix: HardwareMatrix | Path | str | None = None,
        models: Mapping[str, Path | str] | None = None,
        config: HostConfig | None = None,
    ) -> Iterator[SyncHost]:
        """Open a host and its loop thread; both end with the block. Arguments as :meth:`Host.open`.

        QueueFull where the system starts no thread for this process.
        """
        thread = LoopThread()
        opened: AbstractAsyncContextManager[Host] = Host.open(matrix, models, config)

        def close() -> None:
            thread.close(lambda: opened.__aexit__(None, None, None))

        try:
            host = thread.call(opened.__aenter__())
        except BaseException:
            thread.close(None)
            raise
        # A block that is never left ends with the interpreter: later its thread would be frozen, and we with it.
        atexit.register(close)
        try:
            yield cls(host, thread)
        finally:
            atexit.unregister(close)
            close()

    def call(self, work: Callable[[Host], Awaitable[T]]) -> T:
        """Run *work* with the host on its loop and wait for what it returns."""

        async def body() -> T:
            return await work(self._host)

        return self._thread.call(body())

    embed = _blocking(Host.embed)
    embed_result = _blocking(Host.embed_result)
    embed_ids = _blocking(Host.embed_ids)
    embed_packed = _blocking(Host.embed_packed)
    rerank = _blocking(Host.rerank)
    rerank_result = _blocking(Host.rerank_result)
    rerank_ids = _blocking(Host.rerank_ids)
    generate = _blocking(Host.generate)
    generate_ids = _blocking(Host.generate_ids)
    load = _blocking(Host.load)
    unload = _blocking(Host.unload)
    ping = _blocking(Host.ping)
    probe = _blocking(Host.probe)

    def generate_stream(
        self,
        model: str,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
    ) -> Iterator[Piece]:
        """As :meth:`Host.generate_stream`; close the iterator when leaving it early."""
        stream = self._host.generate_stream(
            model, prompt, max_tokens=max_tokens, stop=stop, chat=chat, lane=lane, deadline=deadline
        )

        async def following() -> Piece | None:
            return await anext(stream, None)

        while (piece := self._thread.call(following())) is not None:
            try:
                yield piece
            except BaseException:
                # Left between two pieces; a call that fails or is interrupted ends the stream by itself. A host that
                # was closed has ended it already; on its own thread, where a collector may run, the loop ends it.
                with suppress(InvalidRequest):
                    self._thread.call(stream.aclose())
                raise

    def lane_of(self, model: str, lane: str | None = None) -> Assignment:
        """As :meth:`Host.lane_of`."""
        return self._host.lane_of(model, lane)

    def health(self) -> dict[str, Any]:
        """As :meth:`Host.health`, read on the loop's thread."""

        async def read() -> dict[str, Any]:
            return self._host.health()

        return self._thread.call(read())

    def explain(self, lane: str | None = None) -> list[dict[str, Any]]:
        """As :meth:`Host.explain`."""
        return self._host.explain(lane)


class LoopThread:
    """An event loop on a thread of its own, for callers on other threads."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._pid = os.getpid()
        # A collector may run inside it and close an iterator there, which is a call.
        self._lock = threading.RLock()
        self._closed = False
        try:
            self._thread = start_thread(self._loop.run_forever, name="synapse-host")
        except QueueFull:
            self._loop.close()
            raise

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread; an interrupt here cancels it there.

        InvalidRequest once it is closed, and on the thread itself.
        """
        try:
            with self._lock:
                # Nothing is handed over once closing began: nobody would run it.
                self._check_open()
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except InvalidRequest:
            coroutine.close()
            raise
        return self._result(future)

    def close(self, leave: Callable[[], Coroutine[Any, Any, Any]] | None) -> None:
        """Run *leave*, let the calls of other threads end, stop the thread; idempotent. Nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:
            # The collector ran here: this thread can't wait for its own end.
            threading.Thread(target=self.close, args=(leave,), name="synapse-host-close").start()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if leave is not None:
                self._result(asyncio.run_coroutine_threadsafe(leave(), self._loop))
        finally:
            self._result(asyncio.run_coroutine_threadsafe(_end_calls(), self._loop))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidRequest(f"this host belongs to process {self._pid}; open one after the fork")
        if self._closed:
            raise InvalidRequest("this host is closed")
        if threading.current_thread() is self._thread:
            raise InvalidRequest("this is the host's own thread: it would wait for itself; call from another one")

    def _result(self, future: concurrent.futures.Future[T]) -> T:
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise InvalidRequest("this host is closed") from None
        except BaseException:
            future.cancel()
            raise


async def _end_calls() -> None:
    """Wait for what still runs on this loop, then cancel it: a thread that waits for an answer must get one."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=LEAVE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    with suppress(RuntimeError):
        # At the interpreter's end no thread can be started any more, and none of the executor's is left.
        await asyncio.get_running_loop().shutdown_default_executor()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop: uvloop's where it is installed (extra ``fast``), asyncio's elsewhere.

    A program of yours that opens a :class:`Host` chooses its loop itself, for example by ``uvloop.run(main())``.
    """
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
