"""Lanes over scripted workers: a factory that builds supervisors and closes whatever a test leaves open."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engines.protocol.messages import EmbedBatch, Item, Pooling
from synapse_host.config import HostConfig, Windows
from synapse_host.errors import EngineCrashed
from synapse_host.placement.spec import LaneSpec, LoadSpec
from synapse_host.supervision.queueing import Permits
from synapse_host.supervision.supervisor import Supervisor
from synapse_host.worker.exchange import Build
from synapse_host.worker.listener import RuntimeDirectory
from synapse_host.worker.startup import LaneContext
from tests.support import scripted

FAST = HostConfig(
    windows=Windows(setup=20.0, control=20.0, ping=20.0, inference=20.0),
    handshake=20.0,
    cool_down=60.0,
    shutdown_grace=5.0,
    ping_interval=3600.0,
)
SHORT = dataclasses.replace(FAST, windows=Windows(setup=20.0, control=20.0, ping=20.0, inference=0.4))
"""For requests that hang: no healthy request may depend on this window."""
EMBED = "embed_batch"
CUDA = {"expected_engine": "owned-cuda", "owned": True}
POISON, FINE = 13, 7
"""First ids: rules of a script kill on the one and never touch the other."""


def on(request: str | list[str], *actions: Any, **more: Any) -> dict[str, Any]:
    """A rule of a script."""
    return {"on": request, "do": list(actions), **more}


def poison(*actions: Any, **script: Any) -> dict[str, Any]:
    """A script that does *actions* on requests that start with POISON and serves all others."""
    return {"rules": [on("serving", *actions, first_id=POISON)], **script}


KILLS = poison({"signal": "SIGKILL"})


def embed(*rows: list[int], normalize: bool = False) -> Build:
    """A build that embeds *rows* of ids."""
    ids = [i for row in rows for i in row]

    def build(req_id: str, ref: str) -> tuple[EmbedBatch, bytes]:
        items = [Item(str(n), len(row)) for n, row in enumerate(rows)]
        request = EmbedBatch(req_id=req_id, model_ref=ref, pooling=Pooling.MEAN, normalize=normalize, items=items)
        return request, struct.pack(f"<{len(ids)}i", *ids)

    return build


async def serve(lane: Supervisor, first: int = FINE, **options: Any) -> None:
    """Embed one row and check that the answer is its own."""
    _, payload = await lane.submit(embed([first, 1]), stage=EMBED, **options)
    assert payload.tolist() == scripted.expected_vector([first, 1]), "another request's answer"


async def crash(lane: Supervisor, first: int = POISON) -> EngineCrashed:
    """Send a request that must end in engine_crashed; return the error."""
    with pytest.raises(EngineCrashed) as caught:
        await lane.submit(embed([first, 1]), stage=EMBED)
    return caught.value


async def until(condition: Callable[[], Any]) -> None:
    """Wait for *condition*."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def soon(seconds: float) -> float:
    """Return an absolute deadline of the running loop."""
    return asyncio.get_running_loop().time() + seconds


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie whose parent hasn't looked yet doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def spawns(state: Path) -> int:
    """How many workers a script with ``state`` has started."""
    return state.stat().st_size if state.exists() else 0


def lane(script: Any = None, **changes: Any) -> LaneSpec:
    """A catalog lane `toy` over a scripted llama worker."""
    spec = LaneSpec(
        lane_id="toy",
        model="m",
        kind="catalog",
        engine_id="scripted",
        expected_engine="llama.cpp-worker",
        owned=False,
        device="cpu",
        command=tuple(scripted.command(script)),
        load=LoadSpec("none", "sha256:" + "0" * 64, "gguf"),
    )
    return dataclasses.replace(spec, **changes)


class Lanes:
    """Makes supervisors in one runtime directory; `close` ends them all, and *others* before them."""

    def __init__(self, root: Path) -> None:
        self.others: list[Any] = []
        self.runtime = RuntimeDirectory.open(root)
        self.permits = Permits()
        self.made: list[Supervisor] = []

    def __call__(self, script: Any = None, *, config: HostConfig = FAST, **changes: Any) -> Supervisor:
        spec = lane(script, **changes)
        if "lane_id" not in changes and self.made:
            spec = dataclasses.replace(spec, lane_id=f"toy{len(self.made)}")
        supervisor = Supervisor(LaneContext(spec, config, self.runtime), permits=self.permits)
        self.made.append(supervisor)
        return supervisor

    async def close(self) -> None:
        for one in (*self.others, *self.made):
            await one.aclose()
        left = list(self.runtime.workers.iterdir())
        self.runtime.close()
        assert left == [], f"socket files left behind: {left}"


@contextlib.asynccontextmanager
async def lanes_in(root: Path) -> AsyncIterator[Lanes]:
    made = Lanes(root)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def make(tmp_path: Path) -> Lanes:
    """Return a lane factory for an async test; it is closed where the test's loop ends."""
    return Lanes(tmp_path / "rt")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in a loop of its own, then close its lanes; no task may stay behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    lanes: Lanes | None = pyfuncitem.funcargs.get("make")

    async def main() -> None:
        try:
            await pyfuncitem.obj(**arguments)
        finally:
            if lanes is not None:
                await lanes.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks left behind: {others}"

    asyncio.run(main())
    return True
