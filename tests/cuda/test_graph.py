"""Graphs of every family against transformers in fp32, their structure, and the worked examples of 6.6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from engines.checkpoint import facts
from engines.checkpoint.read import Checkpoint
from engines.cuda import binding, staging
from engines.cuda.graphs.builder import Graph, GraphBuilder, ModelSpec, Variant, WeightStore, rope_tables
from engines.cuda.graphs.families import build, cpu_variants, cuda_variants, recorded_variants
from engines.protocol.errors import EngineError, ErrorCode
from tests.cuda.cases import CASES, Case
from tests.cuda.conftest import batch_of, case, cosines
from tests.cuda.contrib_operators import evaluate

Checkpoints = Callable[[str], Checkpoint]
WINDOW = 8
"""The toys' half window."""
NAMES = [c.name for c in CASES]


def spec_of(checkpoint: Checkpoint) -> ModelSpec:
    known = facts.of_checkpoint(checkpoint)
    return ModelSpec(
        checkpoint.family,
        checkpoint.task,
        known.dims,
        checkpoint.config,
        known.pooling.value if known.pooling else "cls",
        known.normalize is True,
        known.token_types is True,
        known.head or {},
    )


def graph_of(checkpoint: Checkpoint, variant: Variant) -> Graph:
    return build(spec_of(checkpoint), WeightStore(checkpoint.tensors, variant.precision), variant)


def variants(name: str, *attentions: str) -> list[Variant]:
    windows = (False, True) if name.startswith("modernbert") else (False,)
    return [Variant("f32", attention, window) for attention in attentions for window in windows]  # type: ignore[arg-type]


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


def run(graph: Graph, rows: Sequence[Sequence[int]], width: int, *, pad: int = 0) -> np.ndarray:
    """Run padded rows of one width."""
    feed = padded_feed(rows, width, pad)
    session = binding.session(graph, threads=1)
    output: np.ndarray = session.run(None, {name: feed[name] for name in graph.inputs})[0]
    return output


def rows_for(name: str, variant: Variant) -> list[int]:
    """Return the rows a variant may run: without blocks, ModernBERT's must lie inside the window."""
    short = name.startswith("modernbert") and not variant.window
    return [i for i, row in enumerate(case(name).rows()) if not short or len(row) <= WINDOW + 1]


def width_for(rows: Sequence[Sequence[int]], variant: Variant) -> int:
    longest = max(map(len, rows))
    return -(-longest // WINDOW) * WINDOW if variant.window else longest


def error(c: Case, output: np.ndarray, golden: np.ndarray) -> None:
    assert np.isfinite(output).all()
    if c.task == "rerank":
        assert np.abs(output[:, 0] - golden).max() <= 1e-4
    else:
        assert cosines(output, golden).min() >= 0.99999
        assert np.abs(output - golden).max() <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(name: str, checkpoints: Checkpoints, goldens: dict[str, np.ndarray]) -> None:
    c = case(name)
    for variant in variants(name, "plain"):
        chosen = rows_for(name, variant)
        rows = [c.rows()[i] for i in chosen]
        output = run(graph_of(checkpoints(name), variant), rows, width_for(rows, variant))
        error(c, output, goldens[name][chosen])


def packed_feed(rows: Sequence[Sequence[int]], spare: int = 0) -> dict[str, np.ndarray]:
    """What the packed graph reads of *rows*, with *spare* columns beyond the longest."""
    batch = batch_of(rows)
    lens = np.array([len(row) for row in rows], np.int32)
    width = int(lens.max()) + spare
    offset, cumulative, positions = staging.packed_offsets(lens, width)
    return {
        "input_ids": batch.input_ids,
        "positions": positions,
        "token_offset": offset,
        "cu_seqlens": cumulative,
        "columns": np.arange(width, dtype=np.int32),
        "type_starts": np.repeat(staging.type_starts(batch, 3), lens),
    }


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("bert")])
def test_the_packed_graph_equals_transformers(
    name: str, checkpoints: Checkpoints, goldens: dict[str, np.ndarray]
) -> None:
    """No provider but CUDA has packed attention: onnx's evaluator computes it here."""
    c = case(name)
    graph = graph_of(checkpoints(name), Variant("f32", "packed"))
    for spare in (0, 5):
        error(c, evaluate(graph, packed_feed(c.rows(), spare)), goldens[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_graph_equals_transformers(
    name: str, checkpoints: Checkpoints, goldens: dict[str, np.ndarray]
) -> None:
    """GroupQueryAttention with norms inside (Qwen3) has no other provider; what it leaves open is never read."""
    c = case(name)
    for variant in variants(name, "fused"):
        chosen = rows_for(name, variant)
        rows = [c.rows()[i] for i in chosen]
        graph = graph_of(checkpoints(name), variant)
        error(c, evaluate(graph, padded_feed(rows, width_for(rows, variant))), goldens[name][chosen])


@pytest.mark.parametrize("name", ["bert-mean", "modernbert-rerank", "qwen3-last", "qwen3-rerank"])
def test_half_precision_storage_stays_within_the_gate(
    name: str, checkpoints: Checkpoints, goldens: dict[str, np.ndarray]
) -> None:
    """The GPU's precision, where the CPU provider has the kernels: the plain graph in float16."""
    c = case(name)
    variant = Variant("f16", "plain", window=name.startswith("modernbert"))
    rows = c.rows()
    output = run(graph_of(checkpoints(name), variant), rows, width_for(rows, variant))
    if c.task == "rerank":
        assert np.abs(output[:, 0] - goldens[name]).max() <= 0.02
    else:
        assert cosines(output, goldens[name]).min() >= 0.999


@pytest.mark.parametrize("name", NAMES)
def test_padding_never_reaches_a_row(name: str, checkpoints: Checkpoints) -> None:
    """Whatever fills the padding, and however much of it there is."""
    c = case(name)
    variant = variants(name, "plain")[-1]
    graph = graph_of(checkpoints(name), variant)
    rows = [row for row in c.rows() if len(row) <= 18]
    base = run(graph, rows, 24, pad=0)
    assert np.abs(run(graph, rows, 24, pad=c.vocab - 1) - base).max() == 0.0
    assert np.abs(run(graph, rows, 64, pad=1) - base).max() <= 2e-5
    alone = np.concatenate([run(graph, [row], width_for([row], variant)) for row in rows])
    assert np.abs(alone - base).max() <= 2e-5


# --- structure -------------------------------------------------------------------------------------------------------


def every_variant(checkpoint: Checkpoint) -> list[Variant]:
    spec = spec_of(checkpoint)
    made = [v for v, _ in cpu_variants(spec)]
    for attention in ("auto", "fused", "plain"):
        made += [v for v, _ in cuda_variants(spec, attention, "f16")]
    made += [v for v, _ in recorded_variants(spec, "f16")]
    return list(dict.fromkeys(made))


@pytest.mark.parametrize("name", NAMES)
def test_structure_of_every_variant(name: str, checkpoints: Checkpoints) -> None:
    """int32 in, float32 out, nothing about shapes, no sigmoid in a head, every operator as the runtime declares it."""
    schemas = {(s.domain, s.name): s for s in ort.capi.onnxruntime_pybind11_state.get_all_operator_schema()}
    for variant in every_variant(checkpoints(name)):
        graph = graph_of(checkpoints(name), variant)
        model = onnx.load_model_from_string(graph.model)
        assert len(graph.model) < 1 << 20, "weights belong outside"
        kinds = {node.op_type for node in model.graph.node}
        assert not kinds & {"Shape", "Size", "Range", "Expand", "ConstantOfShape", "If", "Loop"}
        if variant.attention != "plain" or not name.startswith("qwen3"):
            assert "Sigmoid" not in kinds  # qwen3's plain SwiGLU is x * sigmoid(x)
        assert [i.type.tensor_type.elem_type for i in model.graph.input] == [onnx.TensorProto.INT32] * len(graph.inputs)
        output = model.graph.output[0]
        assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        assert output.name == ("logits" if case(name).task == "rerank" else "embedding")
        big = {key: array for key, array in graph.weights.items() if array.ndim == 2 and not key.endswith(":f32")}
        if variant.precision == "f16":
            assert all(array.dtype == np.float16 for key, array in big.items() if key != "readout")
        for node in model.graph.node:
            schema, given = schemas[node.domain, node.op_type], {a.name for a in node.attribute}
            assert given <= set(schema.attributes), node
            assert {key for key, a in schema.attributes.items() if a.required} <= given, node
        # An input that no node reads costs a copy to the host in every run on the GPU.
        read = {value for node in model.graph.node for value in node.input}
        assert {i.name for i in model.graph.input} == set(graph.inputs) <= read
        assert {i.name for i in model.graph.initializer} <= read and set(graph.weights) <= read
        assert all((read | {output.name}).intersection(node.output) for node in model.graph.node)


def test_modernbert_takes_blocks_only_beyond_its_window(checkpoints: Checkpoints) -> None:
    (short, limit), (long, _) = cpu_variants(spec_of(checkpoints("modernbert-cls")))
    assert (short.window, long.window, limit) == (False, True, WINDOW + 1)
    model = onnx.load_model_from_string(graph_of(checkpoints("modernbert-cls"), long).model)
    shapes = {i.name: tuple(i.dims) for i in model.graph.initializer}
    assert shapes["band"] == (WINDOW, 3 * WINDOW)
    band = onnx.numpy_helper.to_array(next(i for i in model.graph.initializer if i.name == "band"))
    # Query 0 of a block sees the whole block before it, its own place and the window after it, inclusive.
    assert (band[0] == 0).nonzero()[0].tolist() == list(range(2 * WINDOW + 1))
    assert (band[-1] == 0).nonzero()[0].tolist() == list(range(WINDOW - 1, 3 * WINDOW))


def test_a_table_is_not_copied(checkpoints: Checkpoints) -> None:
    """Mapped tensors that need no change stay mapped."""
    checkpoint = checkpoints("qwen3-last")
    graph = graph_of(checkpoint, Variant())
    table = graph.weights["embed_tokens.weight"]
    assert not table.flags.owndata and not table.flags.writeable


# --- refusals --------------------------------------------------------------------------------------------------------


def test_refuses_what_it_cannot_build(checkpoints: Checkpoints) -> None:
    def refused(code: ErrorCode, words: str, spec: ModelSpec, tensors: Any, variant: Variant = Variant()) -> None:  # noqa: B008
        with pytest.raises(EngineError, match=words) as caught:
            build(spec, WeightStore(tensors, variant.precision), variant)
        assert caught.value.code is code

    checkpoint = checkpoints("bert-mean")
    spec, tensors = spec_of(checkpoint), dict(checkpoint.tensors)
    refused(ErrorCode.MODEL_UNSUPPORTED, "pooling", ModelSpec("bert", "embed", 64, spec.config, "max"), tensors)
    relu = {**spec.config, "hidden_act": "relu"}
    refused(ErrorCode.MODEL_UNSUPPORTED, "hidden_act", ModelSpec("bert", "embed", 64, relu), tensors)
    refused(ErrorCode.ARTIFACT_INVALID, "hidden_size", ModelSpec("bert", "embed", 64, {}), tensors)
    key = "encoder.layer.1.output.dense.weight"
    refused(ErrorCode.ARTIFACT_INVALID, f"lacks {key}", spec, {k: v for k, v in tensors.items() if k != key})
    refused(ErrorCode.ARTIFACT_INVALID, "expected", spec, {**tensors, key: tensors[key].T})
    huge = {**tensors, key: np.full_like(tensors[key], 70000.0)}
    refused(ErrorCode.ARTIFACT_INVALID, "beyond float16", spec, huge, Variant("f16"))
    assert build(spec, WeightStore(huge, "f32"), Variant())
    headless = ModelSpec("qwen3", "rerank", 1, checkpoints("qwen3-rerank").config)
    refused(ErrorCode.ARTIFACT_INVALID, "head.yes", headless, checkpoints("qwen3-rerank").tensors)
    outside = ModelSpec("qwen3", "rerank", 1, checkpoints("qwen3-rerank").config, head={"yes": 320, "no": 1})
    refused(ErrorCode.ARTIFACT_INVALID, "must lie", outside, checkpoints("qwen3-rerank").tensors)


# --- the output stage's worked examples (6.6) ------------------------------------------------------------------------


def small(body: Callable[[GraphBuilder], Graph], *, dims: int = 2, normalize: bool = False, **feed: np.ndarray) -> Any:
    """Run a graph made of a few builder calls."""
    spec = ModelSpec("bert", "embed", dims, {"hidden_size": dims}, normalize=normalize)
    graph = body(GraphBuilder(spec, WeightStore({}, "f32"), Variant()))
    read = {name: feed[name] for name in graph.inputs}
    return binding.session(graph, threads=1).run(None, read)[0]


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [4.0, 6.0]), ("last", [6.0, 8.0]), ("cls", [2.0, 4.0])])
def test_pooling_examples(pooling: str, expected: list[float]) -> None:
    def body(b: GraphBuilder) -> Graph:
        lens, positions = b.input("lens", ["B"]), b.input("positions", ["S"])
        states = b.constant("states", np.array([[[2, 4], [6, 8], [100, 200]]], np.float32))
        return b.embedding(b.pool(states, b.real_positions(positions, lens), lens, pooling))

    lens, positions = np.array([2], np.int32), np.arange(3, dtype=np.int32)
    assert small(body, lens=lens, positions=positions).tolist() == [expected]


@pytest.mark.parametrize(("vector", "expected"), [([3.0, 4.0], [0.6, 0.8]), ([0.0, 0.0], [0.0, 0.0])])
def test_l2_examples(vector: list[float], expected: list[float]) -> None:
    def body(b: GraphBuilder) -> Graph:
        lens = b.input("lens", ["B"])
        zero = b.op("Unsqueeze", b.op("Mul", b.cast(lens, "f32"), b.scalar(0.0)), b.ints(1))
        return b.embedding(b.add(b.constant("v", np.array([vector], np.float32)), zero))

    assert small(body, normalize=True, lens=np.array([1], np.int32))[0] == pytest.approx(expected, abs=1e-7)


def test_rope_examples() -> None:
    cos, sin = rope_tables(160000.0, 64, 8)
    frequencies = np.arctan2(sin[1, :3], cos[1, :3])
    assert frequencies == pytest.approx([1.0, 0.687656, 0.472871], abs=1e-6)
    angles = np.array([3.0, 2.062968, 1.418612])
    assert cos[3, :3] == pytest.approx(np.cos(angles), abs=1e-6)
    assert cos.shape == (8, 32) and cos.dtype == np.float32
