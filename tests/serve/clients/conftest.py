"""A served host on a thread of its own, so that programs of other people can block while they wait for it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from synapse_host.config import HostConfig
from synapse_host.host import Host
from synapse_host.models import catalogue
from synapse_host.sync import LoopThread
from tests.serve.conftest import MODELS, serving
from tests.support.small_bundle import write_bundle, write_matrix

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass
class Server:
    """Where clients find the server, the models for each task, and the host behind it."""

    url: str
    models: dict[str, str]
    host: Host
    thread: LoopThread

    def of_host(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return what the host itself answers."""
        return self.thread.call(call)


def serve_in_thread(
    stack: AsyncExitStack, thread: LoopThread, bundles: dict[str, Path], matrix: Path | None, config: HostConfig
) -> Server:
    async def enter() -> Server:
        host = await stack.enter_async_context(Host.open(matrix, bundles, config))
        up = await stack.enter_async_context(serving(host))
        for name in bundles:
            await host.load(name)
        models = {bundle.manifest.task: name for name, bundle in host.bundles.items()}
        # The process of the chat templates starts with the first chat, and is no leak of the test that is first.
        await host.generate(models["generate"], "a", chat=True, max_tokens=1)
        return Server(up.url, models, host, thread)

    return thread.call(enter())


@pytest.fixture(scope="module", params=["toy", "default"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of scripted models, and one of the default models where they are installed."""
    root = tmp_path_factory.mktemp("served")
    matrix = None
    if request.param == "toy":
        bundles = {}
        for name, task in MODELS.items():
            chat = {"chat_template": TEMPLATE, "frame": False} if task == "generate" else {}
            bundles[name] = write_bundle(root / name, model_id=name, task=task, max_tokens=64, **chat)
        matrix = write_matrix(root)
    else:
        installed = {name: catalogue.locate(name) for name in ("minilm", "ms-marco", "smollm2")}
        bundles = {name: path for name, path in installed.items() if path is not None}
        if len(bundles) < len(installed):
            pytest.skip("needs the default models: synapse models install minilm ms-marco smollm2")
    runtime = Path(tempfile.mkdtemp(prefix="syn-"))
    thread, stack = LoopThread(), AsyncExitStack()
    try:
        yield serve_in_thread(stack, thread, bundles, matrix, HostConfig(runtime_dir=runtime))
    finally:
        thread.close(stack.aclose)
        shutil.rmtree(runtime, ignore_errors=True)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client may look for anything but the server that it is given, or leave an event loop of its own open."""
    asyncio.set_event_loop(None)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
