"""The running server of this user in place of a host of the command's own: the same calls, results and errors."""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from engines.bundle import manifest
from synapse_host.cli.console import Console
from synapse_host.cli.remote import ANSWER_S, BASE, checked, connect, gone, late, packed, runtime_dir
from synapse_host.errors import InvalidRequest, SynapseError, UnknownModel
from synapse_host.models import catalogue
from synapse_host.placement.interpreter import VERSION
from synapse_host.results import EmbedResult, Generation, RerankResult
from synapse_host.text.encoders import CHUNK
from synapse_host.text.validate import absolute

if TYPE_CHECKING:
    import httpx

    from synapse_host.arrays import FloatArray

CHARACTERS: Final = 1024 * 1024
"""Characters of texts in one request, unless a single text has more."""


def find(args: argparse.Namespace, models: Mapping[str, str], console: Console) -> RunningHost | None:
    """Return the running server where it serves just what the command would: these models, by the same bundles.

    None for --local and --engine; where none runs, or it ends or is of another version; and where the command names
    another matrix, or another bundle of that name.
    """
    if args.local or args.engine or find_spec("httpx") is None:
        return None
    try:
        with connect(runtime_dir(args), args.deadline) as remote:
            told = remote.get("/synapse/models")
    except SynapseError:
        return None
    host = told["host"]
    other_matrix = args.matrix is not None and os.path.realpath(args.matrix) != os.path.realpath(host["matrix"])
    if host["stopping"] or host["version"] != VERSION or other_matrix:
        return None
    try:
        for name, source in models.items():
            served, bundle = told["models"].get(name), catalogue.locate(source, args.models_dir)
            if served is None or (bundle is not None and manifest.read(bundle).digest != served["manifest_digest"]):
                return None
    except manifest.BundleError:
        return None  # what is wrong with it is said where it is opened
    console.note(f"using the running server (pid {host['pid']}); --local keeps to this command")
    return RunningHost(Path(host["control"]), told["models"])


class RunningHost:
    """What the one-shot verbs call of a :class:`~synapse_host.host.Host`, asked of the running server."""

    def __init__(self, path: Path, models: dict[str, Any]) -> None:
        self._path = path
        self._models = models
        self._client: httpx.AsyncClient

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunningHost]:
        """Connect for the block."""
        import httpx

        transport = httpx.AsyncHTTPTransport(uds=os.fspath(self._path))
        async with httpx.AsyncClient(transport=transport, base_url=BASE, trust_env=False) as self._client:
            yield self

    async def _ask(self, verb: str, model: str, options: dict[str, Any], **fields: Any) -> dict[str, Any]:
        import httpx

        deadline = options.pop("deadline", None)
        body = {"model": model, "timeout": deadline, **options, **fields}
        patience = None if deadline is None else deadline + ANSWER_S
        try:
            answer = await self._client.post(f"/synapse/{verb}", content=packed(body), timeout=patience)
        except httpx.TimeoutException as exc:
            raise late(self._path, passed=False) from exc
        except httpx.HTTPError as exc:
            raise gone(self._path) from exc
        document: dict[str, Any] = checked(answer, self._path).json()
        return document

    def health(self) -> dict[str, Any]:
        """Return no lanes: what they do is the server's to show."""
        return {"lanes": {}}

    def lane_of(self, model: str, lane: str | None = None) -> Any:
        """Return what a file of vectors notes of the lane that embeds: bundle, engine, device and artifact."""
        served = self._models.get(model)
        if served is None:
            raise UnknownModel(f"no model {model!r}", details={"known": sorted(self._models)})
        wanted = lane or served["task"]
        found = [one for one in served["lanes"] if wanted in (one["matrix_lane"], one["lane"])]
        if not found:
            raise InvalidRequest(f"the running server has no lane {wanted!r} for {model}")
        one, bundle = found[0], manifest.read(served["path"])
        load = SimpleNamespace(artifact_digest=one["artifact_digest"])
        spec = SimpleNamespace(engine_id=one["engine"], device=one["device"], load=load)
        maker = (model, one["lane"], spec.engine_id, spec.device)
        return SimpleNamespace(lane_id=one["lane"], bundle=bundle, require=lambda: spec, served_by=lambda: maker)

    async def embed_result(
        self, model: str, texts: Sequence[str], *, deadline: float | None = None, **options: Any
    ) -> EmbedResult:
        """As :meth:`Host.embed_result`; in requests of at most 1,024 texts, one after another."""
        import numpy as np

        end = absolute(deadline)
        answers: list[dict[str, Any]] = []
        offset = 0
        for chunk in _chunks(texts):
            left = None if end is None else max(0.001, end - asyncio.get_running_loop().time())
            told = await self._ask("embed", model, {**options, "deadline": left}, texts=chunk, offset=offset)
            answers.append({**told, "vectors": _floats(told["vectors"]).reshape(len(chunk), -1)})
            offset += len(chunk)
        return EmbedResult(
            **{
                **answers[0],
                "vectors": np.concatenate([one["vectors"] for one in answers]),
                "truncated": [index for one in answers for index in one["truncated"]],
                "tokens": sum(one["tokens"] for one in answers),
            }
        )

    async def rerank_result(self, model: str, query: str, documents: Sequence[str], **options: Any) -> RerankResult:
        """As :meth:`Host.rerank_result`."""
        told = await self._ask("rerank", model, options, query=query, documents=documents)
        return RerankResult(**{**told, "scores": _floats(told["scores"])})

    async def generate(self, model: str, prompt: str, **options: Any) -> Generation:
        """As :meth:`Host.generate`."""
        return Generation(**await self._ask("generate", model, options, prompt=prompt))


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        if chunk and (len(chunk) == CHUNK or size + len(text) > CHARACTERS):
            yield chunk
            chunk, size = [], 0
        chunk.append(text)
        size += len(text)
    if chunk:
        yield chunk


def _floats(data: str) -> FloatArray:
    import numpy as np

    return np.frombuffer(base64.b64decode(data), np.float32)
