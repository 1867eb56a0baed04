"""Dense layers: a module's folder, the bundle's file, and what they make of a vector."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import BundleError
from engines.checkpoint import dense
from engines.checkpoint.read import CheckpointError
from engines.checkpoint.safetensors import narrow_bf16
from tests.support.small_bundle import write_bundle
from tests.support.toy_models import write_dense


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def elu(x: float) -> float:
    return x if x > 0 else math.exp(x) - 1


# The formulas of torch.nn's documentation, in float64.
FORMULAS: dict[str, Callable[[float], float]] = {
    "Identity": lambda x: x,
    "Tanh": math.tanh,
    "Sigmoid": sigmoid,
    "LogSigmoid": lambda x: math.log(sigmoid(x)),
    "ReLU": lambda x: max(x, 0),
    "ReLU6": lambda x: min(max(x, 0), 6),
    "LeakyReLU": lambda x: x if x > 0 else 0.01 * x,
    "ELU": elu,
    "CELU": elu,
    "SELU": lambda x: (
        1.0507009873554804934193349852946 * (x if x > 0 else 1.6732632423543772848170429916717 * (math.exp(x) - 1))
    ),
    "GELU": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "SiLU": lambda x: x * sigmoid(x),
    "Mish": lambda x: x * math.tanh(math.log(1 + math.exp(x))),
    "Softplus": lambda x: math.log(1 + math.exp(x)),
    "Softsign": lambda x: x / (1 + abs(x)),
    "Tanhshrink": lambda x: x - math.tanh(x),
    "Hardtanh": lambda x: min(max(x, -1), 1),
    "Hardsigmoid": lambda x: min(max(x / 6 + 0.5, 0), 1),
    "Hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
}
POINTS = [-30.0, -7.0, -3.5, -1.25, -0.5, -0.01, 0.0, 0.01, 0.75, 1.5, 3.25, 6.5, 30.0]


def test_every_activation_that_is_served_has_a_formula() -> None:
    assert dense.ACTIVATIONS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_an_activation_is_that_of_torch(name: str) -> None:
    # A large number below zero or above must not become NaN.
    found = dense.ACTIVATIONS[name](np.array([*POINTS, -1e4, 1e4], np.float32))
    assert found.dtype == np.float32 and np.isfinite(found).all()
    assert found[:-2] == pytest.approx([FORMULAS[name](point) for point in POINTS], rel=3e-7, abs=3e-7)


def bundle_of(folder: Path, *modules: Path, **more: Any) -> manifest.Bundle:
    folder.mkdir()
    entry = dense.write([dense.read_module(module) for module in modules], folder)
    assert entry is not None
    fields: dict[str, Any] = {"dense": entry, "dims": entry.layers[-1].out_features, **more}
    return manifest.read(write_bundle(folder, **fields))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("normalize", [True, False])
def test_layers_are_stored_and_applied_in_their_order(tmp_path: Path, stored: str, normalize: bool) -> None:
    first, w1, b1 = write_dense(tmp_path / "2_Dense", 8, 5, "Tanh", seed=1, dtype=stored)
    second, w2, _ = write_dense(tmp_path / "3_Dense", 5, 3, "Identity", seed=2, bias=False)
    bundle = bundle_of(tmp_path / "b", first, second)
    assert (bundle.manifest.worker_dims, bundle.manifest.dims, bundle.manifest.worker_normalizes) == (8, 3, False)
    x = np.random.default_rng(0).standard_normal((7, 8)).astype(np.float32)
    found = dense.apply(dense.read(bundle), x, normalize=normalize)
    if stored == "float16":
        w1, b1 = w1.astype(np.float16), b1.astype(np.float16)
    elif stored == "bfloat16":
        w1, b1 = ((narrow_bf16(a).astype(np.uint32) << 16).view(np.float32) for a in (w1, b1))
    expected = np.tanh(x.astype(float) @ w1.T.astype(float) + b1) @ w2.T.astype(float)
    if normalize:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert found.dtype == np.float32 and np.abs(found - expected).max() < 1e-5


def test_a_vector_of_zeros_stays_one(tmp_path: Path) -> None:
    module, *_ = write_dense(tmp_path / "2_Dense", 4, 2, "ReLU", bias=False)
    layers = dense.read(bundle_of(tmp_path / "b", module))
    assert dense.apply(layers, np.zeros((1, 4), np.float32), normalize=True).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_function": "torch.nn.modules.activation.PReLU"}, "PReLU.*served: Identity, Tanh"),
        ({"activation_function": "mine.Tanh"}, "mine.Tanh"),
        ({"activation_function": None}, "activation_function is None"),
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
        ({"module_output_name": "other"}, "module_output_name"),
        ({"out_features": 3}, "linear.weight"),
        ({"in_features": "8"}, "linear.weight"),
        ({"bias": False}, "linear.bias"),
    ],
)
def test_a_module_that_can_t_be_followed_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder, *_ = write_dense(tmp_path / "2_Dense", 8, 5, "Tanh")
    dense.read_module(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=words):
        dense.read_module(folder)


def test_weights_in_a_pickle_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder, *_ = write_dense(tmp_path / "2_Dense", 8, 5, "Tanh")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing.*save"):
        dense.read_module(folder)


@pytest.mark.parametrize("damage", ["changed", "missing", "short", "shape", "activation", "nan"])
def test_a_file_that_isn_t_the_manifests_is_refused(tmp_path: Path, damage: str) -> None:
    folder, weight, _ = write_dense(tmp_path / "2_Dense", 8, 8, "Tanh")
    if damage == "nan":
        weight[0, 0] = np.nan
        write_dense(folder, 8, 8, "Tanh", weight=weight)
    bundle = bundle_of(tmp_path / "b", folder)
    file = bundle.path(dense.FILE)
    if damage in ("changed", "short"):
        file.write_bytes(file.read_bytes()[:-1] + b"x" if damage == "changed" else b"x")
    elif damage == "missing":
        file.unlink()
    elif damage in ("shape", "activation"):
        layer = {"in_features": 4 if damage == "shape" else 8, "out_features": 8}
        document = json.loads((bundle.root / "manifest.json").read_text())
        document["dense"]["layers"] = [{**layer, "activation": "Tanh" if damage == "shape" else "PReLU"}]
        (bundle.root / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(BundleError, match=r"dense\.safetensors"):
        dense.read(manifest.read(bundle.root))
