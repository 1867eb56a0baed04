"""The end of the host's own memory is a typed error, whatever was being made."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from engines.protocol.errors import ErrorCode
from synapse_host.config import HostConfig
from synapse_host.errors import WORKER_ERRORS
from synapse_host.host import Host
from synapse_host.requests import batching
from synapse_host.requests.memory import typed_stream
from tests.support.small_bundle import write_bundle, write_matrix

OOM = WORKER_ERRORS[ErrorCode.OOM]


def full(*_: object) -> None:
    raise MemoryError


@pytest.mark.process
async def test_a_request_without_room_is_told_and_the_next_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"toy": write_bundle(tmp_path / "toy", model_id="toy")}
    async with Host.open(write_matrix(tmp_path), models, HostConfig(shutdown_grace=5)) as host:
        with monkeypatch.context() as patch:
            patch.setattr(batching, "buffer", full)
            with pytest.raises(OOM, match="the host has no memory") as caught:
                await host.embed("toy", ["a"])
        assert caught.value.transient and caught.value.retry_after_ms == 250 and caught.value.exit_code == 1
        assert (await host.embed("toy", ["a"])).shape == (1, 8)


async def test_a_stream_tells_it_behind_what_it_gave() -> None:
    @typed_stream
    async def stream() -> AsyncGenerator[int, None]:
        yield 1
        full()

    numbers = stream()
    assert await anext(numbers) == 1
    with pytest.raises(OOM):
        await anext(numbers)
