"""Bundles and workers with exactly one thing wrong, made from good ones; and good ones to start from.

    python -m tests.support.sabotage [--embed BUNDLE] [--rerank BUNDLE]

certifies every sabotage of the two bundles (default: the installed minilm and ms-marco) on onnx-cpu, then the good
embedder behind workers that are wrong, and prints which gates failed. Exit 0 when each failed its own gates and no
other. Takes four minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engines.bundle import fixtures, manifest
from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.fixtures import Reference
from engines.bundle.manifest import FileRef, Manifest
from engines.protocol.messages import Pooling
from synapse_host import HostConfig
from synapse_host.certification import Order, certify
from synapse_host.evidence import Evidence
from synapse_host.matrix import HardwareMatrix, load
from tests.support import bent_worker
from tests.support.evidence import REFERENCE, failed_groups

PACKAGE = "safetensors-package"


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
    """Turn the sign of one weight matrix of a middle layer, in place, and give file and manifest fitting digests."""
    bundle = manifest.read(folder)
    artifact = bundle.artifacts(PACKAGE)[0]
    path = bundle.path(artifact.path)
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    layers = sorted({int(part) for name in tensors for part in name.split(".") if part.isdigit()})
    middle = str(layers[len(layers) // 2])
    name = max(
        (name for name, entry in tensors.items() if middle in name.split(".") and len(entry["shape"]) == 2),
        key=lambda name: (int(np.prod(tensors[name]["shape"])), name),
    )
    start, end = (8 + size + offset for offset in tensors[name]["data_offsets"])
    dtype = {"F32": np.float32, "F16": np.float16}[tensors[name]["dtype"]]
    weights = np.frombuffer(data, dtype, (end - start) // np.dtype(dtype).itemsize, start)
    data[start:end] = (-weights).tobytes()
    path.write_bytes(data)
    others = [item for item in bundle.manifest.artifacts if item.format != PACKAGE]
    rewrite(folder, artifacts=[*others, msgspec.structs.replace(artifact, digest=PREFIX + file_digest(path))])


def swapped_pooling(folder: Path) -> None:
    """Say cls where the model was trained with mean, or the other way round."""
    now = manifest.read(folder).manifest.pooling
    rewrite(folder, pooling=Pooling.CLS if now == Pooling.MEAN else Pooling.MEAN)


def wrong_token_types(folder: Path) -> None:
    """Say that a cross-encoder knows no token types: the document is then read as part of the query."""
    rewrite(folder, token_types=False)


def stale_reference(folder: Path) -> None:
    """Leave fixtures of an older making in the folder: a few probes fewer, so another digest than the manifest's."""
    bundle = manifest.read(folder)
    assert isinstance(bundle.manifest.fixtures, FileRef)
    path = bundle.path(bundle.manifest.fixtures.path)
    found = fixtures.read(path)
    keep = len(found) - 1
    arrays = dict(found.arrays)
    for name, offsets in (("input_ids", "cu_seqlens"), ("candidate_ids", "candidate_cu")):
        if offsets in arrays:
            arrays[offsets] = arrays[offsets][: keep + 1]
            arrays[name] = arrays[name][: arrays[offsets][-1]]
    for name in ("vectors_q", "vectors_scale", "query_of", "logits", "greedy", "clear"):
        if name in arrays:
            arrays[name] = arrays[name][:keep]
    fixtures.write(path, task=found.task, texts=found.texts[:keep], computed_by=found.computed_by, arrays=arrays)


SABOTAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "corrupted layer": ("embed", corrupted_layer, "agreement"),
    "corrupted layer of a reranker": ("rerank", corrupted_layer, "agreement"),
    "swapped pooling": ("embed", swapped_pooling, "agreement"),
    "wrong token types": ("rerank", wrong_token_types, "agreement"),
    "stale reference": ("embed", stale_reference, "reference"),
    "stale reference of a reranker": ("rerank", stale_reference, "reference"),
}
"""Name -> task, what is done to the bundle, the one group of gates that must fail."""


WORKERS: dict[str, str] = {"shuffle": "order", "nan": "finite", "device": "device"}
"""What a worker does wrong -> the one group of gates that must fail."""


def with_worker(matrix: HardwareMatrix, mode: str, bundle: Path) -> HardwareMatrix:
    """Return the matrix with the bent worker behind onnx-cpu; its NaN falls on one probe in the middle."""
    if mode == "nan":
        file = manifest.read(bundle).manifest.fixtures
        assert isinstance(file, FileRef)
        rows = fixtures.read(bundle / file.path).rows()
        mode = "nan:" + ",".join(map(str, rows[len(rows) // 2].tolist()))
    bent = msgspec.structs.replace(matrix.engines["onnx-cpu"], command=bent_worker.command(mode))
    return msgspec.structs.replace(matrix, engines={**matrix.engines, "onnx-cpu": bent})


def sabotaged(good: Path, out: Path, kind: str) -> Path:
    """Copy a bundle and do one thing to it; only the artifact that onnx-cpu loads comes along."""
    out.mkdir(parents=True)
    described: Manifest = manifest.read(good).manifest
    kept = [artifact for artifact in described.artifacts if artifact.format == PACKAGE][:1]
    for file in (good / kept[0].path, *(good / ref.path for ref in (described.tokenizer, described.fixtures) if ref)):
        shutil.copyfile(file, out / file.name)
    manifest.write(out, msgspec.structs.replace(described, artifacts=kept))
    SABOTAGES[kind][1](out)
    return out


def run(bundle: Path, task: str, matrix: HardwareMatrix, *, engine: str | None = None, **more: Any) -> Evidence:
    """Certify a bundle; nothing is written."""
    return asyncio.run(certify(Order(task, bundle.name, bundle, engine), matrix, HostConfig(), **more))


def main() -> int:
    """Run as a program."""
    from synapse_host import catalogue

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embed", type=Path, default=catalogue.locate("minilm"))
    parser.add_argument("--rerank", type=Path, default=catalogue.locate("ms-marco"))
    args = parser.parse_args()
    if args.embed is None or args.rerank is None:
        parser.error("name the bundles, or: synapse models install minilm ms-marco")
    matrix, wrong = load(), 0

    def judge(kind: str, document: Evidence, group: str) -> None:
        nonlocal wrong
        groups = failed_groups(document)
        wrong += groups != {group}
        failed = ", ".join(f"{gate.name} {gate.value}" for gate in document.gates if not gate.passed)
        print(f"{'ok ' if groups == {group} else 'BAD'} {kind}: {document.verdict}; failed: {failed}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for number, (kind, (task, _, group)) in enumerate(SABOTAGES.items()):
            bundle = sabotaged(args.embed if task == "embed" else args.rerank, Path(scratch) / f"b{number}", kind)
            judge(kind, run(bundle, task, matrix, engine="onnx-cpu"), group)
            shutil.rmtree(bundle)
    for mode, group in WORKERS.items():
        bent = with_worker(matrix, mode, args.embed)
        judge(f"worker: {mode}", run(args.embed, "embed", bent, engine="onnx-cpu"), group)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
