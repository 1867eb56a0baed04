"""int8 packages on the CPU: close to float32, the same alone and in a batch, and never on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from engines.cuda.engine import CudaEngine
from engines.cuda.graphs.builder import Variant, WeightStore
from engines.cuda.graphs.families import build
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.engine import Probe, WorkerOptions
from engines.runtime.progress import silent
from tests.cuda.cases import case
from tests.cuda.conftest import Bundles, Loader, spec_of
from tests.support.owned_bundle import load_request, repackaged
from tests.support.rows import batch_of, cosines


@pytest.mark.parametrize("name", ["bert-mean", "bert-cls", "bert-rerank"])
def test_close_to_float_and_the_same_in_a_batch(
    name: str, bundles: Bundles, load: Loader, goldens: dict[str, np.ndarray]
) -> None:
    model, rows, golden = load(bundles(name, dtype="int8")), case(name).rows(), goldens[name]
    got = model.forward(batch_of(rows), silent())
    if case(name).task == "rerank":
        assert np.abs(got[:, 0] - golden).max() <= 0.05 * (golden.max() - golden.min())
        assert np.corrcoef(got[:, 0], golden)[0, 1] >= 0.995
    else:
        assert cosines(got, golden).min() >= 0.99
    assert np.abs(got.reshape(-1) - golden.reshape(-1)).max() > 1e-5, "these are float32's numbers"
    alone = np.concatenate([model.forward(batch_of([row]), silent()) for row in rows])
    # A float sum in another order may tip a value to the next of 255 levels; a shared range would move all of them.
    assert np.abs(got - alone).max() <= 2e-3 * np.abs(alone).max()
    assert np.median(np.abs(got - alone)) <= 1e-5


def test_the_graph_multiplies_integers_and_stores_them(bundles: Bundles) -> None:
    spec, tensors = spec_of(bundles("bert-rerank", dtype="int8"))
    graph = build(spec, WeightStore(tensors, "f32"), Variant(int8=True))
    kinds = [node.op_type for node in onnx.load_model_from_string(graph.model).graph.node]
    layers = spec.config["num_hidden_layers"]
    assert kinds.count("MatMulIntegerToFloat") == 6 * layers
    assert kinds.count("MatMul") == 6 * layers + 2  # attention's own, channels apart, pooler and classifier
    assert sum(array.dtype == np.int8 for array in graph.weights.values()) == 6 * layers


def refused(bundle: Bundle, code: ErrorCode, words: str, device: str = "cpu") -> None:
    engine = CudaEngine(WorkerOptions(device=device, manifest=bundle.root / manifest.FILE_NAME))
    engine.probe_floor = lambda: Probe("ok", "ok", {}, {})  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=words) as caught:
        engine.load(load_request(bundle), progress=silent())
    assert caught.value.code is code


def test_the_gpu_refuses_it(bundles: Bundles) -> None:
    refused(bundles("bert-mean", dtype="int8"), ErrorCode.MODEL_UNSUPPORTED, "only the CPU serves", "cuda")


def put(array: np.ndarray, value: float) -> np.ndarray:
    array.flat[0] = value
    return array


LAYER = "encoder.layer.0."
F32 = {"dtype": "f32"}


@pytest.mark.parametrize(
    ("name", "change", "fields", "words"),
    [
        (LAYER + "output.dense.weight.scale", lambda a: put(a, np.nan), {}, "dense.weight.scale holds NaN or infinity"),
        (LAYER + "output.dense.weight.scale", lambda a: put(a, 0.0), {}, "dense.weight.scale holds .*isn't above 0"),
        (LAYER + "attention.self.key.weight.scale", lambda a: None, {}, "key.weight.scale' is missing"),
        (LAYER + "attention.self.query.weight.apart", lambda a: a[:, :3].copy(), {}, r"apart' has shape \[64, 3\]"),
        ("apart", lambda a: put(a, 64), {}, "apart holds .*not different channels below 64"),
        ("apart", lambda a: put(a, a[1]), {}, "apart holds .*not different channels below 64"),
        (LAYER + "intermediate.dense.weight.apart", lambda a: put(a, np.inf), {}, "dense.weight.apart holds NaN"),
        (LAYER + "intermediate.dense.bias", lambda a: put(a, np.nan), {}, "dense.bias holds NaN or infinity"),
        (LAYER + "output.dense.weight", lambda a: a.astype(np.float32), {}, "dtype F32, an int8 package has I8"),
        ("apart", np.copy, F32, "dtype I8, only F32"),
    ],
)
def test_a_damaged_package_is_refused(
    name: str, change: Callable[[np.ndarray], np.ndarray | None], fields: dict[str, str], words: str,
    bundles: Bundles, tmp_path: Path,
) -> None:  # fmt: skip
    """One tensor changed, or gone, or called something else, described by an honest digest."""

    def one(tensors: dict[str, np.ndarray]) -> None:
        if (changed := change(tensors.pop(name))) is not None:
            tensors[name] = changed

    bundle = repackaged(bundles("bert-rerank", dtype="int8"), tmp_path, one, **fields)
    refused(bundle, ErrorCode.ARTIFACT_INVALID, words)
