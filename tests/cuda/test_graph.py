"""Graphs that only a GPU runs, computed by onnx's evaluator against transformers in fp32; every graph's structure.

The graphs of the CPU are held to transformers through a loaded model, in test_model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from engines.cuda import binding, staging
from engines.cuda.graphs.builder import Graph, GraphBuilder, ModelSpec, Variant, WeightStore
from engines.cuda.graphs.families import block, build, cpu_variants, cuda_variants, recorded_variants
from engines.protocol.errors import EngineError, ErrorCode
from tests.cuda.cases import CASES, Case, case
from tests.cuda.conftest import Bundles, spec_of
from tests.cuda.contrib_operators import evaluate
from tests.support.rows import batch_of, cosines

NAMES = [c.name for c in CASES]


def graph_of(bundles: Bundles, name: str, variant: Variant) -> Graph:
    spec, tensors = spec_of(bundles(name))
    return build(spec, WeightStore(tensors, variant.precision), variant)


def padded_feed(rows: Sequence[Sequence[int]], width: int, pad: int = 0) -> dict[str, np.ndarray]:
    """What a padded graph reads of *rows*."""
    ids = np.full((len(rows), width), pad, np.int32)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return {
        "input_ids": ids,
        "lens": np.array([len(row) for row in rows], np.int32),
        "positions": np.arange(width, dtype=np.int32),
        "max_len": np.array([width], np.int32),
        "type_starts": np.array([row.index(3) + 1 if 3 in row else len(row) for row in rows], np.int32),
    }


def packed_feed(rows: Sequence[Sequence[int]], spare: int = 0) -> dict[str, np.ndarray]:
    """What the packed graph reads of *rows*, with *spare* columns beyond the longest."""
    batch, lens = batch_of(rows), np.array([len(row) for row in rows], np.int32)
    width = int(lens.max()) + spare
    return staging.packed_offsets(lens, width) | {
        "input_ids": batch.input_ids,
        "columns": np.arange(width, dtype=np.int32),
        "type_starts": np.repeat(staging.type_starts(batch, 3), lens),
    }


def run(graph: Graph, rows: Sequence[Sequence[int]], width: int, *, pad: int = 0) -> np.ndarray:
    """Run padded rows of one width on the CPU provider."""
    feed = padded_feed(rows, width, pad)
    output: np.ndarray = binding.session(graph, threads=1).run(None, {name: feed[name] for name in graph.inputs})[0]
    return output


def judge(c: Case, output: np.ndarray, golden: np.ndarray, *, logit: float = 1e-4, cosine: float = 0.99999) -> None:
    if c.task == "rerank":
        assert np.abs(output[:, 0] - golden).max() <= logit
    else:
        assert cosines(output, golden).min() >= cosine


# Each family, task and way to pool once: what is behind the layers is the same as on the CPU (test_model.py).
@pytest.mark.parametrize(
    "name", ["bert-mean", "bert-rerank", "modernbert-cls", "modernbert-rerank", "qwen3-last", "qwen3-rerank"]
)
def test_the_gpus_graphs_equal_transformers(name: str, bundles: Bundles, goldens: dict[str, np.ndarray]) -> None:
    """No provider but CUDA has these operators; what they leave open is never read.

    In float32, so that the bound is tight: the operators are the same. Rows end to end also with spare columns.
    """
    c, (spec, _) = case(name), spec_of(bundles(name))
    for half, limit in dict([*cuda_variants(spec, "f16"), *recorded_variants(spec, "f16")]).items():
        variant = Variant("f32", half.attention, half.window)
        chosen = [i for i, row in enumerate(c.rows()) if len(row) <= limit]
        rows = [c.rows()[i] for i in chosen]
        graph, width, unit = graph_of(bundles, name, variant), max(map(len, rows)), block(spec)
        packed = variant.attention == "packed"
        feeds = [packed_feed(rows), packed_feed(rows, 5)] if packed else [padded_feed(rows, -(-width // unit) * unit)]
        for feed in feeds:
            judge(c, evaluate(graph, feed), goldens[name][chosen])


@pytest.mark.parametrize(
    "name", ["bert-mean", "modernbert-rerank", "qwen3-last", "qwen3-rerank", "mpnet-mean", "gemma-mean"]
)
def test_half_precision_storage_stays_within_the_gate(
    name: str, bundles: Bundles, goldens: dict[str, np.ndarray]
) -> None:
    """The GPU's precision, where the CPU provider has the kernels: the plain graph in float16."""
    rows = case(name).rows()
    graph = graph_of(bundles, name, Variant("f16", "plain", window=name.startswith("modernbert")))
    judge(case(name), run(graph, rows, max(map(len, rows))), goldens[name], logit=0.02, cosine=0.999)


@pytest.mark.parametrize("name", NAMES)
def test_padding_never_reaches_a_row(name: str, bundles: Bundles) -> None:
    """Whatever fills the padding, and however much of it there is."""
    c = case(name)
    graph = graph_of(bundles, name, Variant(window=name.startswith("modernbert")))
    rows = [row for row in c.rows() if len(row) <= 18]
    base = run(graph, rows, 24, pad=0)
    assert np.abs(run(graph, rows, 24, pad=c.vocab - 1) - base).max() == 0.0
    assert np.abs(run(graph, rows, 64, pad=1) - base).max() <= 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_structure_of_every_variant(name: str, bundles: Bundles) -> None:
    """int32 in, float32 out, nothing about shapes, no sigmoid in a head, every operator as the runtime declares it."""
    schemas = {(s.domain, s.name): s for s in ort.capi.onnxruntime_pybind11_state.get_all_operator_schema()}
    spec, _ = spec_of(bundles(name))
    made = [*cpu_variants(spec), *cuda_variants(spec, "f16"), *recorded_variants(spec, "f16")]
    for variant in {variant: None for variant, _ in made}:
        graph = graph_of(bundles, name, variant)
        model = onnx.load_model_from_string(graph.model)
        assert len(graph.model) < 1 << 20, "weights belong outside"
        kinds = {node.op_type for node in model.graph.node}
        assert not kinds & {"Shape", "Size", "Range", "Expand", "ConstantOfShape", "If", "Loop"}
        if variant.attention != "plain" or not name.startswith(("qwen", "nomic")):
            assert "Sigmoid" not in kinds  # a plain SwiGLU is x * sigmoid(x)
        assert [i.type.tensor_type.elem_type for i in model.graph.input] == [onnx.TensorProto.INT32] * len(graph.inputs)
        output = model.graph.output[0]
        assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        big = {key: array for key, array in graph.weights.items() if array.ndim == 2 and not key.endswith(":f32")}
        if variant.precision == "f16":
            assert all(array.dtype == np.float16 for array in big.values())
        for node in model.graph.node:
            schema, given = schemas[node.domain, node.op_type], {a.name for a in node.attribute}
            assert given <= set(schema.attributes), node
            assert {key for key, a in schema.attributes.items() if a.required} <= given, node
        # An input that no node reads costs a copy to the host in every run on the GPU.
        read = {value for node in model.graph.node for value in node.input}
        assert {i.name for i in model.graph.input} == set(graph.inputs) <= read
        assert {i.name for i in model.graph.initializer} <= read and set(graph.weights) <= read
        assert all((read | {output.name}).intersection(node.output) for node in model.graph.node)


def test_a_table_is_not_copied(bundles: Bundles) -> None:
    """Mapped tensors that need no change stay mapped."""
    table = graph_of(bundles, "qwen3-last", Variant()).weights["embed_tokens.weight"]
    assert not table.flags.owndata and not table.flags.writeable


def test_a_weight_beyond_float16_is_refused_by_name(bundles: Bundles) -> None:
    spec, tensors = spec_of(bundles("bert-mean"))
    key = "encoder.layer.1.output.dense.weight"
    huge = {**tensors, key: np.full_like(tensors[key], 70000.0)}
    with pytest.raises(EngineError, match=f"{key}.* holds 70000, beyond float16") as caught:
        build(spec, WeightStore(huge, "f16"), Variant("f16"))
    assert caught.value.code is ErrorCode.ARTIFACT_INVALID
    assert build(spec, WeightStore(huge, "f32"), Variant())


@pytest.mark.parametrize("head", [{}, {"yes": 320, "no": 1}, {"yes": 1, "no": -1}, {"yes": "9", "no": 1}])
def test_a_readout_outside_the_vocabulary_is_refused(head: dict[str, Any], bundles: Bundles) -> None:
    spec, tensors = spec_of(bundles("qwen3-rerank"))
    with pytest.raises(EngineError, match=r"head\.yes and head\.no") as caught:
        build(ModelSpec("qwen3", "rerank", 1, spec.config, 64, head=head), WeightStore(tensors, "f32"), Variant())
    assert caught.value.code is ErrorCode.ARTIFACT_INVALID


@pytest.mark.parametrize(("vector", "expected"), [([3.0, 4.0], [0.6, 0.8]), ([0.0, 0.0], [0.0, 0.0])])
def test_l2_examples(vector: list[float], expected: list[float]) -> None:
    """6.6: a zero vector stays zero."""
    spec = ModelSpec("bert", "embed", 2, {}, 64, normalize=True)
    b = GraphBuilder(spec, WeightStore({}, "f32"), Variant())
    zero = b.op("Unsqueeze", b.op("Mul", b.cast(b.input("lens", ["B"]), "f32"), b.scalar(0.0)), b.ints(1))
    graph = b.embedding(b.add(b.constant("v", np.array([vector], np.float32)), zero))
    output = binding.session(graph, threads=1).run(None, {"lens": np.array([1], np.int32)})[0]
    assert output[0] == pytest.approx(expected, abs=1e-7)
