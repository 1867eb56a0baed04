"""A served host in the test's own loop, over real sockets, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from synapse_host.config import HostConfig
from synapse_host.host import Host
from synapse_host.serve.application import application
from synapse_host.serve.listening import bind, listening, url_of
from synapse_host.serve.security import guarded
from synapse_host.serve.service import Service
from tests.support.small_bundle import write_bundle, write_matrix

MODELS = {"toy": "embed", "judge": "rerank", "writer": "generate"}


@dataclass
class Served:
    """A host that is served: its service, a client over the Unix socket and one over TCP."""

    service: Service
    operator: httpx.AsyncClient
    web: httpx.AsyncClient
    url: str

    @property
    def host(self) -> Host:
        return self.service.host

    @property
    def control(self) -> Path:
        return self.host.runtime.control_path

    async def get(self, route: str) -> Any:
        return (await self.operator.get(route)).json()

    async def post(self, route: str, **fields: Any) -> Any:
        return (await self.operator.post(route, json=fields)).json()

    async def call(self, route: str, **fields: Any) -> httpx.Response:
        """Ask over TCP, as programs do."""
        return await self.web.post(route, json=fields)


@asynccontextmanager
async def serving(host: Host, *, key: bytes | None = None, origins: Sequence[str] = ()) -> AsyncIterator[Served]:
    """Serve *host* on both sockets."""
    with bind("127.0.0.1", 0) as bound:
        service = Service(host, about={"version": "1", "runtime_dir": "here", "url": url_of(bound)})
        app = guarded(application(service), key=key, address="127.0.0.1", origins=origins)
        transport = httpx.AsyncHTTPTransport(uds=str(host.runtime.control_path))
        options: dict[str, Any] = {"timeout": 60, "trust_env": False}
        async with (
            listening(app, bound, host.runtime),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", **options) as operator,
            httpx.AsyncClient(base_url=url_of(bound), **options) as web,
        ):
            service.ready = True
            yield Served(service, operator, web, url_of(bound))
            service.close()


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(tmp_path: Path, runtime_dir: Path) -> Serve:
    """Serve a host of scripted models: `toy` embeds, `judge` reranks, `writer` generates."""

    @asynccontextmanager
    async def served_host(
        script: dict[str, Any] | None = None,
        *,
        models: Sequence[str] = ("toy",),
        served: dict[str, Any] | None = None,
        **config: Any,
    ) -> AsyncIterator[Served]:
        bundles = {
            name: write_bundle(tmp_path / name, model_id=name, task=MODELS[name], max_tokens=64) for name in models
        }
        settings = HostConfig(shutdown_grace=5, runtime_dir=runtime_dir, data_dir=tmp_path / "data", **config)
        matrix = write_matrix(tmp_path, script)
        async with Host.open(matrix, bundles, settings) as host, serving(host, **(served or {})) as up:
            yield up
        assert not runtime_dir.joinpath("synapse", "control.sock").exists()

    return served_host
