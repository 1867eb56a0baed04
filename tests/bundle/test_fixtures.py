"""Reference fixtures: the format, what it loses, and that the shipped ones belong to the default models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engines.bundle import fixtures
from engines.bundle.digest import PREFIX
from engines.bundle.fixtures import Reference
from engines.bundle.manifest import BundleError
from engines.checkpoint import probes
from synapse_host.models.recipes import DEFAULTS

BY = Reference("a test", "1", "float64", "sha256:" + "a" * 64, "f32")
SHIPPED = Path(__file__).parents[2] / "synapse_host" / "fixtures"


def sample(**changes: Any) -> dict[str, Any]:
    ids, cu = fixtures.flatten([[1, 2], [3]])
    quantised, scale = fixtures.quantize(np.eye(2, 4))
    return {"input_ids": ids, "cu_seqlens": cu, "vectors_q": quantised, "vectors_scale": scale, **changes}


def put(path: Path, found: dict[str, Any], texts: list[str] | None = None) -> Path:
    fixtures.write(path, task="embed", texts=texts or ["a", "b"], computed_by=BY, arrays=found)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = fixtures.read(put(tmp_path / "f.npz", sample()))
    assert (found.task, found.computed_by, found.texts, len(found)) == ("embed", BY, ["a", "b"], 2)
    assert [row.tolist() for row in found.rows()] == [[1, 2], [3]]
    np.testing.assert_allclose(found.vectors, np.eye(2, 4), atol=1e-7)
    assert put(tmp_path / "2.npz", sample()).read_bytes() == (tmp_path / "f.npz").read_bytes()


@given(arrays(np.float64, (3, 24), elements=st.floats(-1, 1)))
def test_quantising_moves_a_cosine_by_less_than_a_tenth_of_a_millionth(vectors: np.ndarray) -> None:
    norms = np.linalg.norm(vectors, axis=1)
    vectors = np.vstack([np.zeros(24), vectors[norms > 1e-3] / norms[norms > 1e-3, None]])
    quantised, scale = fixtures.quantize(vectors)
    back = quantised.astype(np.float64) * scale[:, None]
    assert not back[0].any(), "a vector of zeros stays one"
    cosine = (back[1:] * vectors[1:]).sum(axis=1) / np.linalg.norm(back[1:], axis=1)
    assert (1 - cosine < 1e-7).all()


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"cu_seqlens": np.array([0, 2], np.int32)}, None),
        ({"cu_seqlens": np.array([0, 2, 2], np.int32)}, None),
        ({"cu_seqlens": np.array([1, 2, 3], np.int32)}, None),
        ({"cu_seqlens": np.array([0, 2, 9], np.int32)}, None),
        ({"input_ids": np.array([1, 2, 3], np.int64)}, None),
        ({"vectors_q": np.zeros((3, 4), np.int16)}, None),
        ({"vectors_scale": np.array([1, np.nan], np.float32)}, None),
        ({}, ["a", "b", "c"]),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], texts: list[str] | None) -> None:
    with pytest.raises(BundleError, match="don't fit"):
        fixtures.read(put(tmp_path / "f.npz", sample(**changes), texts))


@pytest.mark.parametrize(
    "change", [{"weights": "sha256:0"}, {"weights": None}, {"program": ""}, {"version": ""}, {"place": "here"}, None]
)
def test_a_reference_without_programme_version_or_weights_is_refused(
    change: dict[str, Any] | None, tmp_path: Path
) -> None:
    described = {**msgspec.to_builtins(BY), **change} if change else "transformers 5.24.0, float64"
    with np.load(put(tmp_path / "f.npz", sample())) as stored:
        kept = dict(stored)
    meta = {"format": fixtures.FORMAT, "task": "embed", "computed_by": described}
    np.savez(tmp_path / "g.npz", **{**kept, "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8)})
    with pytest.raises(BundleError, match="not readable"):
        fixtures.read(tmp_path / "g.npz")
    older = {**meta, "format": "synapse-fixtures-v1"}
    np.savez(tmp_path / "g.npz", **{**kept, "meta": np.frombuffer(json.dumps(older).encode(), np.uint8)})
    with pytest.raises(BundleError, match="build the bundle again"):
        fixtures.read(tmp_path / "g.npz")


def test_the_shipped_references_say_from_which_weights_they_come() -> None:
    """Where the published file is quantised, its rounding is part of the reference, and that is said."""
    found = {name: fixtures.read(SHIPPED / f"{name}.npz").computed_by for name in ("minilm", "ms-marco", "smollm2")}
    assert {name: by.stored for name, by in found.items()} == {"minilm": "f32", "ms-marco": "int8", "smollm2": "q4_1"}
    files = {"minilm": "model.safetensors", "ms-marco": "model.onnx", "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    for name, by in found.items():
        assert by.weights == PREFIX + DEFAULTS[name].package.files[files[name]]
        assert ("rounding" in str(by)) == (by.stored != "f32")


def test_a_reference_by_an_engine_of_ours_is_not_independent() -> None:
    for program in ("llama.cpp", "llama-cpp-python", "onnxruntime", "owned-cuda", "ane-reference", "Synapse"):
        assert not fixtures.independent(fixtures.Reference(program, "1", "float64", "sha256:" + "0" * 64, "f32"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no zip")
    np.savez(tmp_path / "y.npz", a=np.zeros(2))
    np.savez(tmp_path / "z.npz", meta=np.array([{"a": 1}], dtype=object), texts=np.zeros(1, np.uint8))
    for name in ("x", "y.npz", "z.npz", "nowhere"):
        with pytest.raises(BundleError, match="not readable"):
            fixtures.read(tmp_path / name)


@pytest.mark.parametrize(("name", "task"), [("minilm", "embed"), ("ms-marco", "rerank"), ("smollm2", "generate")])
def test_the_shipped_fixtures_hold_256_probes_within_the_vocabulary(name: str, task: str) -> None:
    found = fixtures.read(SHIPPED / f"{name}.npz")
    assert found.task == task and len(found) >= 256 and fixtures.independent(found.computed_by)
    if task == "embed":
        assert found.vectors.shape == (len(found), 384)
        np.testing.assert_allclose(np.linalg.norm(found.vectors, axis=1), 1, atol=1e-4)
        rows = list(zip(found.texts, found.rows(), strict=True))
        assert all(row[0] == 101 and row[-1] == 102 for text, row in rows if text is not None)
        edges = [row for text, row in rows if text is None]
        assert [len(row) for row in edges] == [1, 2, 255, 256, 64] and len(set(edges[-1].tolist())) == 1
    elif task == "rerank":
        logits, query = found.arrays["logits"], found.rows("query")[-1]
        assert logits.min() < -10 and logits.max() > 8
        pairs = zip(found.texts, found.rows("candidate"), found.arrays["query_of"], strict=True)
        edges = [len(row) + len(found.rows("query")[of]) + 3 for text, row, of in pairs if text is None]
        assert (len(query), edges) == (1, [5, 6, 511, 512, 68])
    else:
        assert found.arrays["greedy"].shape == (len(found), 8) and found.arrays["greedy"].max() < 49152
        assert found.arrays["clear"][:, 0].all() and 0.5 < found.arrays["clear"].mean() < 1


def test_edges_of_what_a_model_takes() -> None:
    rows = probes.edges([7, 8, 9], 20)
    assert [len(row) for row in rows] == [1, 2, 19, 20, 20]
    assert rows[3] == ([7, 8, 9] * 7)[:20]
    assert set(rows[4]) == {8}
    assert [len(row) for row in probes.edges([7, 8], 512)][4] == 64
