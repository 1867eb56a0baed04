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
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from synapse_host.errors import InvalidRequest, QueueFull
from synapse_host.text.background import start_thread

if TYPE_CHECKING:
    from synapse_host.arrays import FloatArray
    from synapse_host.config import HostConfig
    from synapse_host.host import Host
    from synapse_host.placement.assignment import Assignment
    from synapse_host.placement.matrix import HardwareMatrix
    from synapse_host.results import EmbedResult, Generation, Piece, RerankResult


T = TypeVar("T")

LEAVE_S: Final = 5.0
"""Seconds that calls of other threads get to end by themselves once their host is closed."""


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
        from synapse_host.host import Host

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

        return self._run(body())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.call(coroutine)

    def embed(
        self,
        model: str,
        texts: Sequence[str],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        dimensions: int | None = None,
    ) -> FloatArray:
        """As :meth:`Host.embed`."""
        return self._run(
            self._host.embed(
                model, texts, lane=lane, deadline=deadline, truncate=truncate, prompt=prompt, dimensions=dimensions
            )
        )

    def embed_result(
        self,
        model: str,
        texts: Sequence[str],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        dimensions: int | None = None,
    ) -> EmbedResult:
        """As :meth:`Host.embed_result`."""
        return self._run(
            self._host.embed_result(
                model, texts, lane=lane, deadline=deadline, truncate=truncate, prompt=prompt, dimensions=dimensions
            )
        )

    def embed_ids(
        self,
        model: str,
        rows: Sequence[Any],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        dimensions: int | None = None,
    ) -> FloatArray:
        """As :meth:`Host.embed_ids`."""
        return self._run(self._host.embed_ids(model, rows, lane=lane, deadline=deadline, dimensions=dimensions))

    def embed_stream(
        self,
        model: str,
        texts: Iterable[str],
        *,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        dimensions: int | None = None,
        offset: int = 0,
    ) -> Iterator[EmbedResult]:
        """As :meth:`Host.embed_stream`; close the iterator when leaving it early."""
        stream = self._host.embed_stream(
            model,
            texts,
            lane=lane,
            deadline=deadline,
            truncate=truncate,
            prompt=prompt,
            dimensions=dimensions,
            offset=offset,
        )
        return self._each(stream)

    def _each(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        async def following() -> T | None:
            return await anext(stream, None)

        while (result := self._run(following())) is not None:
            try:
                yield result
            except BaseException:
                # Left between two results; a call that fails or is interrupted ends the stream by itself. A host that
                # was closed has ended it already; on its own thread, where a collector may run, the loop ends it.
                with suppress(InvalidRequest):
                    self._run(stream.aclose())
                raise

    def embed_packed(
        self, model: str, rows: Sequence[Any], width: int, *, lane: str | None = None, deadline: float | None = None
    ) -> FloatArray:
        """As :meth:`Host.embed_packed`."""
        return self._run(self._host.embed_packed(model, rows, width, lane=lane, deadline=deadline))

    def rerank(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        raw: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
    ) -> FloatArray:
        """As :meth:`Host.rerank`."""
        return self._run(
            self._host.rerank(model, query, documents, raw=raw, lane=lane, deadline=deadline, truncate=truncate)
        )

    def rerank_result(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        raw: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
        truncate: bool = False,
    ) -> RerankResult:
        """As :meth:`Host.rerank_result`."""
        return self._run(
            self._host.rerank_result(model, query, documents, raw=raw, lane=lane, deadline=deadline, truncate=truncate)
        )

    def rerank_ids(
        self,
        model: str,
        query_ids: Sequence[int],
        candidates: Sequence[Any],
        *,
        raw: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
    ) -> FloatArray:
        """As :meth:`Host.rerank_ids`."""
        return self._run(self._host.rerank_ids(model, query_ids, candidates, raw=raw, lane=lane, deadline=deadline))

    def generate(
        self,
        model: str,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = 128,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        lane: str | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """As :meth:`Host.generate`."""
        return self._run(
            self._host.generate(
                model, prompt, max_tokens=max_tokens, stop=stop, chat=chat, lane=lane, deadline=deadline
            )
        )

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
        return self._each(stream)

    def generate_ids(
        self,
        model: str,
        ids: Sequence[int],
        max_tokens: int | None,
        *,
        stop: str | Sequence[str] = (),
        lane: str | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """As :meth:`Host.generate_ids`."""
        return self._run(self._host.generate_ids(model, ids, max_tokens, stop=stop, lane=lane, deadline=deadline))

    def load(self, model: str, *, lane: str | None = None, deadline: float | None = None) -> None:
        """As :meth:`Host.load`."""
        self._run(self._host.load(model, lane=lane, deadline=deadline))

    def unload(self, model: str, *, lane: str | None = None) -> None:
        """As :meth:`Host.unload`."""
        self._run(self._host.unload(model, lane=lane))

    def ping(self, model: str, *, lane: str | None = None, deadline: float | None = None) -> dict[str, Any]:
        """As :meth:`Host.ping`."""
        return self._run(self._host.ping(model, lane=lane, deadline=deadline))

    def probe(self, lane_id: str, *, deadline: float | None = None) -> None:
        """As :meth:`Host.probe`."""
        self._run(self._host.probe(lane_id, deadline=deadline))

    def lane_of(self, model: str, lane: str | None = None) -> Assignment:
        """As :meth:`Host.lane_of`."""
        return self._host.lane_of(model, lane)

    def health(self) -> dict[str, Any]:
        """As :meth:`Host.health`, read on the loop's thread."""

        async def read() -> dict[str, Any]:
            return self._host.health()

        return self._run(read())

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
