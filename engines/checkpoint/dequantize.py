"""An int8 ONNX BERT cross-encoder -> a plain fp32 checkpoint, once, so that every engine shares one set of weights.

``python -m engines.checkpoint.dequantize MODEL.onnx OUT --heads 12`` writes OUT/config.json and OUT/model.safetensors.

For dynamic quantisation, weight = (quantised - zero point) * scale in float32. Embeddings, pooler and classifier keep
their names; a layer's matrices are anonymous, so each MatMulInteger is followed to the first Add with a named bias,
whose name it takes (models.md 2). ONNX holds matrices as (in, out), checkpoints as (out, in).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.bundle import digest
from engines.checkpoint import layout, program, safetensors
from engines.checkpoint.read import Checkpoint, CheckpointError

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import Array, FloatArray

QUANTIZED_DTYPE: Final = "quantized_dtype"
QUANTIZED_DIGEST: Final = "quantized_digest"
"""Metadata of the written file: how the source held its weights, and the source's SHA-256."""
_SUFFIX: Final = "_quantized"
_HOPS: Final = 6
_MAX_BYTES: Final = 2 * 1024**3


def read_weights(model_file: Path) -> dict[str, FloatArray]:
    """Return every weight of a dynamically quantised BERT graph under its stored name, float32, matrices as (out, in).

    Raises CheckpointError where a matrix can't be named or two get one name.
    """
    import onnx
    from onnx import numpy_helper

    if model_file.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{model_file} is larger than {_MAX_BYTES} bytes")
    try:
        graph = onnx.load(str(model_file), load_external_data=False).graph
    except Exception as exc:  # protobuf's own DecodeError has no importable home that is stable
        raise CheckpointError(f"{model_file}: not a readable ONNX file ({exc})") from exc
    stored = {tensor.name: tensor for tensor in graph.initializer}
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)

    def array(name: str) -> Array:
        if name not in stored:
            raise CheckpointError(f"{model_file}: constant {name!r} is missing")
        value: Array = numpy_helper.to_array(stored[name])
        return value

    weights: dict[str, FloatArray] = {}

    def keep(name: str, value: FloatArray) -> None:
        if name in weights:
            raise CheckpointError(f"{model_file}: two matrices want the name {name!r}")
        weights[name] = value

    for name in stored:
        if name.endswith(_SUFFIX):
            base = name.removesuffix(_SUFFIX)
            # A vector of scales counts output columns, the last axis of (in, out).
            quantised, zero = array(name).astype(np.float32), array(base + "_zero_point").astype(np.float32)
            value: FloatArray = (quantised - zero) * array(base + "_scale").astype(np.float32)
            consumers = users.get(name, [])
            if any(node.op_type == "MatMulInteger" for node in consumers):
                value = value.T
            keep(base if base.endswith(".weight") else _name_by_bias(model_file, consumers, users, stored), value)
        elif name.endswith((".bias", ".weight")) and stored[name].data_type == onnx.TensorProto.FLOAT:
            keep(name, array(name))
    return weights


def _name_by_bias(model_file: Path, consumers: list[Any], users: dict[str, list[Any]], stored: dict[str, Any]) -> str:
    """Walk forward from a MatMulInteger to the first Add with a named bias, at most six nodes on."""
    frontier = [node for node in consumers if node.op_type == "MatMulInteger"]
    for _ in range(_HOPS):
        following = [node for done in frontier for out in done.output for node in users.get(out, [])]
        for node in following:
            if node.op_type == "Add":
                named = [name for name in node.input if name in stored and name.endswith(".bias")]
                if named:
                    return str(named[0]).removesuffix("bias") + "weight"
        frontier = following
    raise CheckpointError(f"{model_file}: a matrix has no named bias within {_HOPS} nodes; this graph isn't understood")


def config_of(weights: dict[str, FloatArray], *, heads: int) -> dict[str, Any]:
    """Return the config.json of the recovered cross-encoder; only the number of heads isn't in the shapes."""
    shapes = {layout.canonical(name): value.shape for name, value in weights.items()}
    try:
        vocab, hidden = shapes["embeddings.word_embeddings.weight"]
        config = {
            "architectures": ["BertForSequenceClassification"],
            "model_type": "bert",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": 1 + max(n for n in map(layout.layer_of, shapes) if n is not None),
            "num_attention_heads": heads,
            "intermediate_size": shapes["encoder.layer.0.intermediate.dense.weight"][0],
            "max_position_embeddings": shapes["embeddings.position_embeddings.weight"][0],
            "type_vocab_size": shapes["embeddings.token_type_embeddings.weight"][0],
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
            "position_embedding_type": "absolute",
            "pad_token_id": 0,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "dtype": "float32",
        }
    except (KeyError, ValueError) as exc:
        raise CheckpointError(f"the graph holds no whole BERT: {exc}") from exc
    return config


def dequantize(model_file: Path, out: Path, *, heads: int, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the fp32 checkpoint folder *out* and return it, if it is one that can be opened. Raises CheckpointError."""
    weights = read_weights(model_file)
    config = config_of(weights, heads=heads)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    # What is computed from these weights later says from which rounded ones they come.
    metadata = {"format": "pt", QUANTIZED_DTYPE: "int8"}
    metadata[QUANTIZED_DIGEST] = digest.PREFIX + digest.file_digest(model_file)
    safetensors.write(out / "model.safetensors", weights, metadata=metadata, dtype="F32", progress=progress)
    Checkpoint.open(out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program; progress as JSON lines on stdout, a failure as one line on stderr."""
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m engines.checkpoint.dequantize", description=about)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--heads", type=int, required=True)
    args = parser.parse_args(argv)

    def make() -> dict[str, Any]:
        dequantize(args.model, args.out, heads=args.heads, progress=program.report("dequantize"))
        return {"path": str(args.out)}

    return program.run("dequantize", make, missing="install it, or the extra 'cuda'")


if __name__ == "__main__":
    raise SystemExit(main())
