"""int8 packages: what is stored, how close it is, and what of a damaged one is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.bundle.manifest import BundleError
from engines.checkpoint import layout, safetensors
from engines.checkpoint.package import write_package
from engines.checkpoint.quantize import Quantised, outstanding, quantise_rows
from engines.checkpoint.read import Checkpoint, CheckpointError
from tests.support import toy_models


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(toy_models.write_bert(tmp_path_factory.mktemp("toy") / "m", seed=3, cross_encoder=True))


@pytest.fixture(scope="module")
def package(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("package") / "model.safetensors"
    write_package(checkpoint, file, profile="toy.owned-cuda", dtype="int8")
    return file


def test_rows_example() -> None:
    values, scale = quantise_rows(np.array([[1.27, -0.64, 0.0], [0.0, 0.0, 0.0], [-254.0, 3.0, 1.0]], np.float32))
    assert values.dtype == np.int8 and scale.dtype == np.float32
    assert values.tolist() == [[127, -64, 0], [0, 0, 0], [-127, 2, 0]]
    np.testing.assert_allclose(scale, [0.01, 1.0, 2.0], rtol=1e-6)


def test_a_row_on_a_grid_keeps_its_values() -> None:
    random = np.random.default_rng(1)
    values = random.integers(-90, 91, (5, 40)).astype(np.int8)
    values[0, 3], values[1, 0], values[2, 17] = 127, -90, 63
    steps = np.array([0.01, 0.003, 1.5, 0.01, 2e-5], np.float32)
    weight = values * steps[:, None]
    weight[3] = random.standard_normal(40)  # on no grid
    found, scale = quantise_rows(weight)
    on_grid = [0, 1, 2, 4]
    np.testing.assert_allclose((found * scale[:, None])[on_grid], weight[on_grid], rtol=1e-6)
    assert np.abs(found[3]).max() == 127


def test_a_matrix_comes_back_within_half_a_step(checkpoint: Checkpoint) -> None:
    tensors = Quantised(checkpoint)
    channels = tensors[layout.CHANNELS]
    for name, shape in layout.required(checkpoint.family, checkpoint.task, checkpoint.config).items():
        exact = checkpoint.f32(name)
        if not layout.is_dense(name, shape):
            np.testing.assert_array_equal(tensors[name], exact, err_msg=name)
            continue
        scale = tensors[name + layout.SCALE]
        restored = tensors[name] * scale[:, None]
        if layout.is_after_norm(name):
            assert not restored[:, channels].any()
            restored[:, channels] = tensors[name + layout.APART]
        assert (np.abs(restored - exact).max(axis=1) <= 0.501 * scale).all(), name


def test_the_channels_apart_are_those_whose_norm_stands_out(checkpoint: Checkpoint) -> None:
    class Loud(Checkpoint):
        def f32(self, name: str) -> np.ndarray:
            found = np.array(super().f32(name))
            if name == "encoder.layer.1.attention.output.LayerNorm.weight":
                found[[5, 40]] = [-9.0, 7.0]
            return found

    loud = Loud(checkpoint.folder, checkpoint.config, checkpoint.family, checkpoint.task, checkpoint.tensors)
    assert outstanding(loud, 2).tolist() == [5, 40]
    assert outstanding(loud, 1).tolist() == [5]
    channels = outstanding(loud, 8)
    assert channels.dtype == np.int32 and channels.tolist() == sorted(set(channels.tolist()))


def test_a_package_holds_int8_matrices_with_scales_and_floats(
    checkpoint: Checkpoint, package: Path, tmp_path: Path
) -> None:
    header = safetensors.SafetensorsFile.open(package).header
    assert header.metadata["dtype"] == "int8"
    kinds = {name: info.dtype for name, info in header.tensors.items()}
    assert set(kinds.values()) == {"I8", "I32", "F32"}
    dense = {name for name, kind in kinds.items() if kind == "I8"}
    layers = checkpoint.config["num_hidden_layers"]
    assert len(dense) == 6 * layers and all(name + ".scale" in kinds for name in dense)
    assert sum(name.endswith(".apart") for name in kinds) == 4 * layers
    assert kinds["embeddings.word_embeddings.weight"] == kinds["pooler.dense.weight"] == "F32"
    plain = sum(np.prod(shape) * 4 for shape in layout.required("bert", "rerank", checkpoint.config).values())
    assert package.stat().st_size < 0.75 * plain
    write_package(checkpoint, tmp_path / "again", profile="toy.owned-cuda", dtype="int8")
    assert (tmp_path / "again").read_bytes() == package.read_bytes()


def damaged(package: Path, out: Path, drop: str = "", **replace: np.ndarray) -> Path:
    opened = safetensors.SafetensorsFile.open(package)
    tensors = {name: np.array(opened.array(name)) for name in opened.header.tensors}
    tensors.pop(drop, None)
    tensors |= replace
    safetensors.write(out, tensors)
    return out


MATRIX = "encoder.layer.1.output.dense.weight"


@pytest.mark.parametrize(
    ("drop", "replace", "words"),
    [
        (MATRIX + ".scale", {}, r"output.dense.weight.scale' is missing"),
        ("encoder.layer.0.intermediate.dense.weight.apart", {}, r"weight.apart' is missing"),
        ("apart", {}, "'apart' is missing"),
        ("", {MATRIX + ".scale": np.ones(3, np.float32)}, r"weight.scale' has shape \[3\]"),
        ("", {MATRIX: np.zeros((64, 128), np.float32)}, "dtype F32, an int8 package has I8"),
        ("", {"pooler.dense.bias": np.zeros(64, np.float16)}, "dtype F16, an int8 package has F32"),
    ],
)
def test_a_damaged_package_is_refused(
    drop: str, replace: dict[str, np.ndarray], words: str, checkpoint: Checkpoint, package: Path, tmp_path: Path
) -> None:
    file = damaged(package, tmp_path / "m.safetensors", drop, **replace)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.from_package(file, config=checkpoint.config, family="bert", task="rerank", int8=True)


def test_other_families_and_other_uses_are_refused(checkpoint: Checkpoint, package: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype I8"):
        Checkpoint.from_package(package, config=checkpoint.config, family="bert", task="rerank")
    qwen = Checkpoint.open(toy_models.write_qwen3(tmp_path / "m", seed=1))
    with pytest.raises(BundleError, match="bert models only"):
        write_package(qwen, tmp_path / "out", profile="toy.owned-cuda", dtype="int8")
    assert not list(tmp_path.glob("out*"))
