"""The host for callers without an event loop: the same calls on a loop thread of its own.

Every call is the asynchronous one, run on that thread; no policy is repeated here. The thread lives as long as the
host, since a worker's parent-death signal is tied to the thread that spawned it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from synapse_host.config import HostConfig
    from synapse_host.host import Host
    from synapse_host.results import EmbedResult, Generation, RerankResult

    FloatArray = npt.NDArray[np.float32]

T = TypeVar("T")


class SyncHost:
    """A :class:`~synapse_host.host.Host` behind blocking calls; usable from several threads at once."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._loop = loop

    @classmethod
    @contextmanager
    def open(
        cls,
        matrix: Path | str | None = None,
        models: Mapping[str, Path | str] | None = None,
        config: HostConfig | None = None,
    ) -> Iterator[SyncHost]:
        """Open a host and its loop thread; both end with the block. Arguments as :meth:`Host.open`."""
        from synapse_host.host import Host

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="synapse-host", daemon=True)
        thread.start()
        try:
            opened: AbstractAsyncContextManager[Host] = Host.open(matrix, models, config)
            host = _call(loop, opened.__aenter__())
            try:
                yield cls(host, loop)
            finally:
                _call(loop, opened.__aexit__(None, None, None))
        finally:
            _call(loop, loop.shutdown_default_executor())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return _call(self._loop, coroutine)

    def embed(self, model: str, texts: Sequence[str], **options: Any) -> FloatArray:
        """As :meth:`Host.embed`."""
        return self._run(self._host.embed(model, texts, **options))

    def embed_result(self, model: str, texts: Sequence[str], **options: Any) -> EmbedResult:
        """As :meth:`Host.embed_result`."""
        return self._run(self._host.embed_result(model, texts, **options))

    def embed_ids(self, model: str, rows: Sequence[Any], **options: Any) -> FloatArray:
        """As :meth:`Host.embed_ids`."""
        return self._run(self._host.embed_ids(model, rows, **options))

    def rerank(self, model: str, query: str, documents: Sequence[str], **options: Any) -> FloatArray:
        """As :meth:`Host.rerank`."""
        return self._run(self._host.rerank(model, query, documents, **options))

    def rerank_result(self, model: str, query: str, documents: Sequence[str], **options: Any) -> RerankResult:
        """As :meth:`Host.rerank_result`."""
        return self._run(self._host.rerank_result(model, query, documents, **options))

    def rerank_ids(self, model: str, query_ids: Sequence[int], candidates: Sequence[Any], **options: Any) -> FloatArray:
        """As :meth:`Host.rerank_ids`."""
        return self._run(self._host.rerank_ids(model, query_ids, candidates, **options))

    def generate(self, model: str, prompt: str | Sequence[Mapping[str, str]], **options: Any) -> Generation:
        """As :meth:`Host.generate`."""
        return self._run(self._host.generate(model, prompt, **options))

    def generate_ids(self, model: str, ids: Sequence[int], max_tokens: int, **options: Any) -> Generation:
        """As :meth:`Host.generate_ids`."""
        return self._run(self._host.generate_ids(model, ids, max_tokens, **options))

    def load(self, model: str, **options: Any) -> None:
        """As :meth:`Host.load`."""
        self._run(self._host.load(model, **options))

    def unload(self, model: str, **options: Any) -> None:
        """As :meth:`Host.unload`."""
        self._run(self._host.unload(model, **options))

    def probe(self, lane_id: str) -> None:
        """As :meth:`Host.probe`."""
        self._run(self._host.probe(lane_id))

    def health(self) -> dict[str, Any]:
        """As :meth:`Host.health`, read on the loop's thread."""

        async def read() -> dict[str, Any]:
            return self._host.health()

        return self._run(read())

    def explain(self, lane: str | None = None) -> list[dict[str, Any]]:
        """As :meth:`Host.explain`."""
        return self._host.explain(lane)


def _call(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop's thread; an interrupt here cancels it there."""
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
