"""Recovering fp32 weights from a dynamically quantised ONNX cross-encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.bundle.digest import PREFIX, file_digest
from engines.checkpoint import dequantize
from engines.checkpoint.read import Checkpoint, CheckpointError
from engines.checkpoint.reference import weights_of
from tests.support import toy_models

onnx = pytest.importorskip("onnx")


def quantised_graph(
    folder: Path, *, drop_bias: str = "", per_column: bool = False
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write the int8 graph of a toy cross-encoder as the quantiser names things; return it and the exact weights.

    Only what recovery walks over is there: weights, MatMulInteger and the Adds with their biases.
    """
    from onnx import TensorProto, helper, numpy_helper

    checkpoint = Checkpoint.open(toy_models.write_bert(folder, cross_encoder=True))
    nodes, stored, exact = [], [], {}
    parts = ("_quantized", "_scale", "_zero_point")
    for name in checkpoint.tensors:
        value = checkpoint.f32(name)
        base = name if name.startswith("classifier") else "bert." + name
        if value.ndim == 1:
            if name != drop_bias:
                stored.append(numpy_helper.from_array(value.copy(), base))
            exact[name] = value
            continue
        table = name.startswith("embeddings.")
        matrix, kind, middle = (value, np.uint8, 128) if table else (value.T, np.int8, 0)
        columns = per_column and not table
        scale = np.asarray(np.abs(matrix).max(axis=0 if columns else None) / 127, np.float32)
        quantised = np.clip(np.rint(matrix / scale), -127, 127) + middle
        restored = ((quantised - middle) * scale).astype(np.float32)
        exact[name] = restored if table else restored.T
        label = f"onnx::MatMul_{len(nodes)}" if name.startswith("encoder.") else base
        zero = np.full(scale.shape, middle, kind)
        for suffix, array in zip(parts, (quantised.astype(kind), scale, zero), strict=True):
            stored.append(numpy_helper.from_array(array, label + suffix))
        if table:
            nodes.append(helper.make_node("DequantizeLinear", [label + part for part in parts], [f"{label}_out"]))
            continue
        nodes.append(helper.make_node("MatMulInteger", ["x", f"{label}_quantized"], [f"{label}_int"]))
        nodes.append(helper.make_node("Cast", [f"{label}_int"], [f"{label}_cast"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [f"{label}_cast", f"{label}_scale"], [f"{label}_mul"]))
        bias = base.removesuffix("weight") + "bias"
        nodes.append(helper.make_node("Add", [bias, f"{label}_mul"], [f"{label}_sum"]))
    graph = helper.make_graph(nodes, "toy", [helper.make_tensor_value_info("x", TensorProto.INT8, [1])], [], stored)
    file = folder / "model.onnx"
    onnx.save(helper.make_model(graph), str(file))
    return file, exact


@pytest.mark.parametrize("per_column", [False, True])
def test_every_weight_comes_back_under_its_name(tmp_path: Path, per_column: bool) -> None:
    file, exact = quantised_graph(tmp_path / "m", per_column=per_column)
    seen: list[tuple[int, int]] = []
    out = dequantize.dequantize(file, tmp_path / "out", heads=4, progress=lambda *step: seen.append(step))
    checkpoint = Checkpoint.open(out)
    assert (checkpoint.family, checkpoint.task, checkpoint.config["num_hidden_layers"]) == ("bert", "rerank", 2)
    assert checkpoint.config["num_attention_heads"] == 4
    assert list(checkpoint.tensors) == list(exact)
    for name, value in exact.items():
        np.testing.assert_array_equal(checkpoint.f32(name), value, err_msg=name)
    assert seen[-1][0] == seen[-1][1] == checkpoint.nbytes
    # A reference computed from these weights says that they were rounded, and in which file.
    assert weights_of(checkpoint) == (PREFIX + file_digest(file), "int8")


@pytest.mark.parametrize(
    ("dropped", "words"),
    [
        ("encoder.layer.1.output.dense.bias", "no named bias"),
        ("embeddings.LayerNorm.bias", r"embeddings\.LayerNorm\.bias"),
    ],
)
def test_a_graph_that_lacks_a_part_is_refused(tmp_path: Path, dropped: str, words: str) -> None:
    file, _ = quantised_graph(tmp_path / "m", drop_bias=dropped)
    with pytest.raises(CheckpointError, match=words):
        dequantize.dequantize(file, tmp_path / "out", heads=4)


def test_something_else_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.onnx").write_bytes(b"\xff" * 100)
    assert dequantize.main([str(tmp_path / "x.onnx"), str(tmp_path / "out"), "--heads", "4"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "not a readable ONNX file" in said.err
