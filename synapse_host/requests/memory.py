"""The end of the host's own memory, told to callers as ``oom``, whatever was being made when it came."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from engines.protocol.errors import ErrorCode
from synapse_host.errors import WORKER_ERRORS, SynapseError

P = ParamSpec("P")
T = TypeVar("T")


def typed(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make the MemoryError of a coroutine function ``oom``."""

    @wraps(call)
    async def inner(*args: P.args, **options: P.kwargs) -> T:
        try:
            return await call(*args, **options)
        except MemoryError:
            pass
        # Behind the block: within it the traceback would keep alive what filled the memory.
        raise _oom()

    return inner


def typed_stream(call: Callable[P, AsyncGenerator[T, None]]) -> Callable[P, AsyncGenerator[T, None]]:
    """Make the MemoryError of an asynchronous generator function ``oom``."""

    @wraps(call)
    async def inner(*args: P.args, **options: P.kwargs) -> AsyncGenerator[T, None]:
        try:
            async with aclosing(call(*args, **options)) as stream:
                async for item in stream:
                    yield item
            return
        except MemoryError:
            pass
        raise _oom()

    return inner


def _oom() -> SynapseError:
    return WORKER_ERRORS[ErrorCode.OOM]("the host has no memory for this request; send less at once or free some")
