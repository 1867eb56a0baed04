"""Dense layers behind a model's pooling, as sentence-transformers' Dense module computes them.

A module is ``activation(x @ weight.T + bias)``. A build reads each one's folder (:func:`read_module`) and writes all of
them into one file of the bundle (:func:`write`), which the manifest names with their widths and activations. Workers
know nothing of them: they return the pooled vector as it is, and the host applies the layers in float32 and normalises
at the end (:func:`apply`), so one implementation serves every engine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from msgspec import UNSET

from engines.bundle import digest, manifest
from engines.bundle.manifest import BundleError, DenseLayer, DenseLayers
from engines.checkpoint.read import FLOAT_DTYPES, SINGLE, CheckpointError, held, only, read_json
from engines.checkpoint.safetensors import SafetensorsFile, parse_header
from engines.checkpoint.safetensors import write as write_tensors

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from engines.checkpoint.safetensors import FloatArray

    Weights: TypeAlias = tuple[FloatArray, FloatArray, Callable[[FloatArray], FloatArray]]

FILE: Final = "dense.safetensors"
MAX_BYTES: Final = 1024 * 1024 * 1024
_KEYS: Final = {
    *("in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name"),
}
_erf: Final = np.vectorize(math.erf, otypes=[np.float32])


def _softplus(x: FloatArray) -> FloatArray:
    return np.logaddexp(np.float32(0), x)


def _elu(x: FloatArray) -> FloatArray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


ACTIVATIONS: Final[dict[str, Callable[[FloatArray], FloatArray]]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: np.exp(-_softplus(-x)),
    "LogSigmoid": lambda x: -_softplus(-x),
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "LeakyReLU": lambda x: np.where(x > 0, x, np.float32(0.01) * x),
    "ELU": _elu,
    "CELU": _elu,
    "SELU": lambda x: np.float32(1.0507009873554805) * np.where(x > 0, x, np.float32(1.6732632423543772) * _elu(x)),
    "GELU": lambda x: x * (np.float32(0.5) + np.float32(0.5) * _erf(x * np.float32(math.sqrt(0.5)))),
    "SiLU": lambda x: x * np.exp(-_softplus(-x)),
    "Mish": lambda x: x * np.tanh(_softplus(x)),
    "Softplus": _softplus,
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Tanhshrink": lambda x: x - np.tanh(x),
    "Hardtanh": lambda x: np.clip(x, -1, 1),
    "Hardsigmoid": lambda x: np.clip(x / 6 + np.float32(0.5), 0, 1),
    "Hardswish": lambda x: x * (np.clip(x + 3, 0, 6) / np.float32(6)),
}
"""Classes of torch.nn, made without arguments as sentence-transformers makes them."""


@dataclass(frozen=True, slots=True)
class Module:
    """A Dense module of a checkpoint: what it is, and the folder of its files."""

    layer: DenseLayer
    folder: Path

    def arrays(self) -> tuple[FloatArray, FloatArray]:
        """Return weight (out, in) and bias (out,) as float32; zeros where the module has no bias."""
        file = SafetensorsFile.open(self.folder / SINGLE)
        weight = np.asarray(file.array("linear.weight"), np.float32)
        if "linear.bias" not in file.header.tensors:
            return weight, np.zeros(self.layer.out_features, np.float32)
        return weight, np.asarray(file.array("linear.bias"), np.float32)


def read_module(folder: Path) -> Module:
    """Read a Dense module's config.json and the header of its weights. CheckpointError for what isn't followed here."""
    file = folder / "config.json"
    conf = read_json(file)
    only(file, set(conf) - _KEYS, "a vector")
    held(file, conf, dict.fromkeys(("module_input_name", "module_output_name"), (None, "sentence_embedding")))
    package, _, name = str(conf.get("activation_function")).rpartition(".")
    if name not in ACTIVATIONS or not package.startswith("torch.nn"):
        raise CheckpointError(
            f"{file}: activation_function is {conf.get('activation_function')!r}; served: {', '.join(ACTIVATIONS)}"
        )
    layer = DenseLayer(conf.get("in_features", 0), conf.get("out_features", 0), name)
    wanted: dict[str, tuple[int, ...]] = {"linear.weight": (layer.out_features, layer.in_features)}
    if conf.get("bias", True):
        wanted["linear.bias"] = (layer.out_features,)
    weights = folder / SINGLE
    if not weights.exists():
        raise CheckpointError(
            f"{weights} is missing: the weights of this Dense module are read from safetensors only, never from a "
            "pickle. Save the model once with sentence-transformers: SentenceTransformer(FOLDER).save(FOLDER)"
        )
    found = SafetensorsFile.open(weights).header.tensors
    shapes = {key: info.shape for key, info in found.items() if info.dtype in FLOAT_DTYPES}
    if shapes != wanted:
        raise CheckpointError(f"{weights}: holds {shapes}, config.json says {wanted}")
    return Module(layer, folder)


def write(modules: Sequence[Module], folder: Path) -> DenseLayers | None:
    """Write the modules' weights into a bundle's folder, float32, and return the manifest's entry; None for none."""
    if not modules:
        return None
    tensors = {}
    for number, module in enumerate(modules):
        tensors[f"{number}.weight"], tensors[f"{number}.bias"] = module.arrays()
    write_tensors(folder / FILE, tensors, dtype="F32")
    return DenseLayers(FILE, digest.PREFIX + digest.file_digest(folder / FILE), [module.layer for module in modules])


def read(bundle: Bundle) -> list[Weights]:
    """Return the layers of a bundle, none where it has none. BundleError where the file isn't the manifest's.

    The digest is taken of the bytes that are used, whatever becomes of the file.
    """
    spec = bundle.manifest.dense
    if spec is UNSET:
        return []
    path = bundle.path(spec.path)
    try:
        data = manifest.read_plain(path, MAX_BYTES)
    except (OSError, ValueError) as exc:
        raise BundleError(f"{path}: {exc}") from exc
    actual = hashlib.sha256(data).hexdigest()
    if not digest.same(spec.digest, actual):
        raise BundleError(f"{path}: digest is sha256:{actual}, expected {spec.digest}; build or install it again")
    file = SafetensorsFile(parse_header(data, where=str(path)), data, path)
    wanted: dict[str, tuple[int, ...]] = {}
    for number, layer in enumerate(spec.layers):
        wanted |= {f"{number}.weight": (layer.out_features, layer.in_features), f"{number}.bias": (layer.out_features,)}
    found = {name: info.shape for name, info in file.header.tensors.items() if info.dtype == "F32"}
    if found != wanted:
        raise BundleError(f"{path}: holds {found}, the manifest says {wanted}")
    layers: list[Weights] = []
    for number, layer in enumerate(spec.layers):
        weight, bias = file.array(f"{number}.weight"), file.array(f"{number}.bias")
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise BundleError(f"{path}: layer {number} holds a weight that is no finite number")
        if layer.activation not in ACTIVATIONS:
            raise BundleError(f"{path}: activation {layer.activation!r}; served: {', '.join(ACTIVATIONS)}")
        layers.append((weight, bias, ACTIVATIONS[layer.activation]))
    return layers


def apply(layers: Sequence[Weights], vectors: FloatArray, *, normalize: bool) -> FloatArray:
    """Return what the layers make of pooled vectors, float32 (n, in) to (n, out), of length 1 with *normalize*."""
    with np.errstate(all="ignore"):  # the caller looks for what isn't finite
        for weight, bias, activation in layers:
            vectors = activation(vectors @ weight.T + bias)
        if normalize:
            lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
            vectors = np.divide(vectors, lengths, dtype=np.float32)
    return vectors
