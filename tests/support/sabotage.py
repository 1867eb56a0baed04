"""Bundles, references and workers with exactly one thing wrong, made from good ones; and good ones to start from."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from engines.bundle import fixtures, manifest
from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.fixtures import Reference
from engines.bundle.manifest import FileRef
from engines.protocol.errors import ErrorCode
from engines.protocol.messages import Pooling
from synapse_host import Host, HostConfig
from synapse_host.certificates.document import Evidence
from synapse_host.certification.run import Order, certify
from synapse_host.errors import WORKER_ERRORS
from synapse_host.placement.matrix import HardwareMatrix
from tests.support.evidence import REFERENCE, N
from tests.support.scripted import expected_score, expected_sequence_score, expected_text, expected_vector

DIMS = 32
"""Of the vectors of a scripted bundle."""


def rewrite(folder: Path, **changes: Any) -> None:
    """Change manifest fields."""
    described = manifest.read(folder).manifest
    manifest.write(folder, msgspec.structs.replace(described, **changes))


def give_fixtures(
    folder: Path, task: str, texts: list[Any], arrays: dict[str, Any], *, by: Reference = REFERENCE
) -> None:
    """Write fixtures into a bundle and name them in its manifest."""
    path = folder / fixtures.FILE_NAME
    fixtures.write(path, task=task, texts=texts, computed_by=by, arrays=arrays)
    rewrite(folder, fixtures=FileRef(path.name, PREFIX + file_digest(path)))


def embed_arrays(rows: list[list[int]], vectors: Any) -> dict[str, Any]:
    """Fixture arrays of an embedder."""
    ids, cu = fixtures.flatten(rows)
    quantised, scale = fixtures.quantize(np.asarray(vectors, np.float64))
    return {"input_ids": ids, "cu_seqlens": cu, "vectors_q": quantised, "vectors_scale": scale}


def rerank_arrays(queries: list[list[int]], candidates: list[list[int]], of: list[int], logits: Any) -> dict[str, Any]:
    """Fixture arrays of a reranker."""
    query_ids, query_cu = fixtures.flatten(queries)
    candidate_ids, candidate_cu = fixtures.flatten(candidates)
    return {
        "query_ids": query_ids,
        "query_cu": query_cu,
        "candidate_ids": candidate_ids,
        "candidate_cu": candidate_cu,
        "query_of": np.array(of, np.int32),
        "logits": np.asarray(logits, np.float32),
    }


# --- sabotage --------------------------------------------------------------------------------------------------------


def corrupted_layer(folder: Path) -> None:
    """Turn the sign of the largest weight matrix of a middle layer, and give file and manifest fitting digests."""
    bundle = manifest.read(folder)
    (artifact,) = bundle.manifest.artifacts
    path = bundle.path(artifact.path)
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    middle = [entry for name, entry in header.items() if "1" in name.split(".") and entry["dtype"] == "F32"]
    largest = max((entry for entry in middle if len(entry["shape"]) == 2), key=lambda entry: math.prod(entry["shape"]))
    start, end = (8 + size + offset for offset in largest["data_offsets"])
    data[start:end] = (-np.frombuffer(data[start:end], np.float32)).tobytes()
    path.write_bytes(data)
    rewrite(folder, artifacts=[msgspec.structs.replace(artifact, digest=PREFIX + file_digest(path))])


def swapped_pooling(folder: Path) -> None:
    """Say cls where the model was trained with mean, or the other way round."""
    now = manifest.read(folder).manifest.pooling
    rewrite(folder, pooling=Pooling.CLS if now == Pooling.MEAN else Pooling.MEAN)


def wrong_token_types(folder: Path) -> None:
    """Say that a cross-encoder knows no token types: the document is then read as part of the query."""
    rewrite(folder, token_types=False)


def stale_reference(folder: Path) -> None:
    """Say that the fixtures of the folder are of another making."""
    named = manifest.read(folder).manifest.fixtures
    assert isinstance(named, FileRef)
    rewrite(folder, fixtures=msgspec.structs.replace(named, digest=PREFIX + "0" * 64))


BUNDLES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "corrupted layer": ("embed", corrupted_layer, "agreement"),
    "swapped pooling": ("embed", swapped_pooling, "agreement"),
    "wrong token types": ("rerank", wrong_token_types, "agreement"),
    "stale reference": ("embed", stale_reference, "reference"),
}
"""Of a real model: name -> task, what is done to the bundle, the one group of gates that must fail."""


# --- a scripted model behind a worker or a reference with one fault --------------------------------------------------


def reference(folder: Path, task: str, kind: str) -> None:
    """Give a scripted bundle the reference that its worker answers by, or one of that *kind*."""
    rows = id_rows(5)
    count = {"few": 200, "repeated": 130}.get(kind, N)
    rows = (rows[:count] * 2)[:N] if kind == "repeated" else rows[:count]
    by = msgspec.structs.replace(REFERENCE, program="llama.cpp") if kind == "ours" else REFERENCE
    arrays: dict[str, Any]
    if task == "embed":
        vectors = [expected_vector(row, DIMS) for row in rows]
        arrays = embed_arrays(rows, np.full((len(rows), DIMS), 0.5) if kind == "constant" else vectors)
    elif task == "rerank":
        queries = [row[:3] for row in id_rows(6, count=N if kind == "lonely" else 20)]
        of = [n % len(queries) for n in range(len(rows))]
        score = _framed_score if kind == "framed" else expected_score
        logits = [score(queries[q], row) for q, row in zip(of, rows, strict=True)]
        arrays = rerank_arrays(queries, rows, of, np.full(len(rows), 0.5) if kind == "constant" else logits)
    else:
        ids, cu = fixtures.flatten(rows)
        first = np.array([[7] if kind == "constant" else expected_text(row, 1)[1] for row in rows], np.int32)
        first[: {"wrong": 20}.get(kind, 0)] += 300
        arrays = {"input_ids": ids, "cu_seqlens": cu, "greedy": first, "clear": np.ones_like(first, np.uint8)}
    give_fixtures(folder, task, [None] * len(rows), arrays, by=by)


def _framed_score(query: list[int], row: list[int]) -> float:
    """What a worker answers that is sent whole sequences; its bundle has cls 2 and sep 3."""
    return expected_sequence_score([2, *query, 3, *row, 3])


def id_rows(seed: int, *, low: int = 5, high: int = 120, longest: int = 14, count: int = N) -> list[list[int]]:
    """Return different rows of ids."""
    random = np.random.default_rng(seed)
    return [random.integers(low, high, int(random.integers(3, longest))).tolist() for _ in range(count)]


def _shuffled(out: Any) -> Any:
    return np.roll(out, 1, axis=0)


def _poisoned(out: Any) -> Any:
    return np.concatenate([out[:1] * np.nan, out[1:]])


UNLUCKY = 13
BENDS: dict[str, Callable[[int, Any, Any, list[list[int]]], Any]] = {
    "shuffle": lambda n, out, before, rows: _shuffled(out),
    "shuffle in bulk": lambda n, out, before, rows: _shuffled(out) if len(rows) > 32 else out,
    # A NaN in rows that begin with UNLUCKY; in company only; in bulk only; once, in the sixth request.
    "nan": lambda n, out, before, rows: np.where(np.array([row[0] for row in rows]) == UNLUCKY, np.nan, out.T).T,
    "nan in company": lambda n, out, before, rows: _poisoned(out) if len(rows) > 2 else out,
    "nan in bulk": lambda n, out, before, rows: _poisoned(out) if len(rows) > 32 else out,
    "nan once": lambda n, out, before, rows: _poisoned(out) if n == 6 else out,
    "neighbours": lambda n, out, before, rows: out + 0.2 * _shuffled(out) if len(rows) > 1 else out,
    "restless": lambda n, out, before, rows: out * np.float32(1 + n * 1e-6),
    # What the same place of the request before was answered.
    "late": lambda n, out, before, rows: out if before is None or before.shape != out.shape else before,
    "zeros": lambda n, out, before, rows: out * 0,
    "double batches": lambda n, out, before, rows: out * 2 if len(rows) > 1 else out,
    "same answer": lambda n, out, before, rows: np.full_like(out, 0.5),
    "doubled": lambda n, out, before, rows: out * 2,
}
"""What becomes of a right answer: ``(number of the request, answers, those before, ids of the rows)``."""
SAID: dict[str, tuple[int, ...]] = {"mute": (), "same token": (7,)}
"""What is generated instead."""
SCRIPTS: dict[str, dict[str, Any]] = {
    "device": {"device": "cuda"},
    "crash": {"rules": [{"on": "EMBED_BATCH", "nth": 100, "do": [{"abort": True}]}]},
}
"""What only the worker itself can do."""


@contextlib.contextmanager
def bent(mode: str) -> Iterator[None]:
    """Let every host's answers in ids be those of a worker with that fault; ``short``: rows of 24 tokens fail."""
    count, before = 0, None
    asked = Host.embed_ids, Host.rerank_ids, Host.generate_ids

    def bend(out: Any, rows: Any) -> Any:
        nonlocal count, before
        count += 1
        if mode == "short" and max(map(len, rows)) >= 24:
            raise WORKER_ERRORS[ErrorCode.INFERENCE_FAILED]("no kernel for 24 tokens and more")
        made = np.ascontiguousarray(BENDS[mode](count, out, before, rows) if mode in BENDS else out, np.float32)
        before = out
        if not np.isfinite(made).all():
            raise WORKER_ERRORS[ErrorCode.NONFINITE_OUTPUT]("bent")
        return made

    async def embed_ids(host: Host, model: str, rows: Any, **more: Any) -> Any:
        return bend(await asked[0](host, model, rows, **more), rows)

    async def rerank_ids(host: Host, model: str, query: Any, rows: Any, **more: Any) -> Any:
        return bend(await asked[1](host, model, query, rows, **more), rows)

    async def generate_ids(host: Host, model: str, ids: Any, count: int, **more: Any) -> Any:
        made = await asked[2](host, model, ids, count, **more)
        return dataclasses.replace(made, generated_token_ids=SAID[mode]) if mode in SAID else made

    with pytest.MonkeyPatch.context() as patch:
        for call in (embed_ids, rerank_ids, generate_ids):
            patch.setattr(Host, call.__name__, call)
        yield


class Sabotage(NamedTuple):
    """One fault and the gates that must fail, no other. ``kind``: of the reference, see :func:`reference`."""

    task: str
    gates: set[str]
    worker: str = "honest"
    dtype: str = "f16"
    kind: str = "good"


FINITE = {"non_finite", "unmeasured"}
BATCH = {"batch_single", "batch_norm"}
ROUGH = {"pearson", "top1"}
COSINES = {"min_cosine", "mean_cosine", "worst_decile"}
SABOTAGES: dict[str, Sabotage] = {
    "rows that overflow": Sabotage("embed", FINITE, "nan"),
    "pairs that overflow": Sabotage("rerank", FINITE, "nan"),
    "rows that overflow in company": Sabotage("embed", FINITE | BATCH | {"repeat"}, "nan in company"),
    "pairs that overflow in company": Sabotage("rerank", FINITE | {"batch_single", "repeat"}, "nan in company"),
    "rows that overflow in bulk": Sabotage("embed", FINITE, "nan in bulk"),
    "a first answer that overflows": Sabotage("embed", {"non_finite"}, "nan once"),
    "rows in each other's place": Sabotage("embed", {"order"}, "shuffle"),
    "pairs in each other's place": Sabotage("rerank", {"order"}, "shuffle"),
    "rows in each other's place in bulk": Sabotage("embed", {"order"}, "shuffle in bulk"),
    "rows that depend on their neighbours": Sabotage("embed", BATCH, "neighbours"),
    # Logits that lie close together look like each other's once they are wrong.
    "int8 pairs that depend on their neighbours": Sabotage("rerank", {"batch_single", "order"}, "neighbours", "int8"),
    "int8 zero vectors": Sabotage("embed", BATCH | ROUGH | {"mean_cosine", "length_error"}, "zeros", "int8"),
    "batches twice as long": Sabotage("embed", {"batch_norm"}, "double batches"),
    "int8 logits doubled": Sabotage("rerank", {"scale_error"}, "doubled", "int8"),
    "other bits each time": Sabotage("embed", {"repeat"}, "restless"),
    "other bits each time, of pairs": Sabotage("rerank", {"repeat"}, "restless"),
    "the answer to the request before": Sabotage("embed", COSINES | BATCH | {"length_error", "order"}, "late"),
    "long rows refused": Sabotage("embed", {"limits"}, "short"),
    "another device": Sabotage("embed", {"identity"}, "device"),
    "a worker that dies": Sabotage("embed", {"fault"}, "crash"),
    "a generator that says nothing": Sabotage("generate", {"top1", "first_token"}, "mute"),
    "a reference with other tokens": Sabotage("generate", {"top1", "first_token"}, kind="wrong"),
    "a reference of 200 probes": Sabotage("embed", {"reference_fixture"}, kind="few"),
    "half the probes asked twice": Sabotage("embed", {"reference_distinct"}, kind="repeated"),
    "a reference of an engine of ours": Sabotage("embed", {"reference_independent"}, kind="ours"),
    "a reference that is a constant": Sabotage("embed", {"reference_varied"}, "same answer", kind="constant"),
    "a reference that is one token": Sabotage("generate", {"reference_varied"}, "same token", kind="constant"),
    "a query for each document": Sabotage("rerank", {"reference_company"}, kind="lonely"),
}
"""Of a scripted model, over a real worker process."""


def sabotaged(good: Path, out: Path, kind: str) -> Path:
    """Copy a bundle and do one thing to it."""
    shutil.copytree(good, out)
    BUNDLES[kind][1](out)
    return out


def run(bundle: Path, task: str, matrix: HardwareMatrix, *, engine: str | None = None, **more: Any) -> Evidence:
    """Certify a bundle; nothing is written."""
    return asyncio.run(certify(Order(task, bundle.name, bundle, engine), matrix, HostConfig(), **more))
