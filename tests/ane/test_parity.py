"""Built packages against fp32 `transformers` (goldens), packed rows against themselves, padding, masks, every length.

The evaluator is not Neural Engine arithmetic: it proves the graph and fp16's range, not the device's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.ane import inputs
from engines.ane.inputs import InputRules
from engines.ane.model import AneModel
from engines.bundle.manifest import Bundle
from engines.checkpoint.read import Checkpoint
from engines.protocol.messages import Pooling
from engines.runtime.progress import silent
from tests.ane.make_goldens import GOLDENS, HOW, RERANKERS, rows
from tests.ane.recipes import RECIPES
from tests.support import mil_reference, toy_models
from tests.support.ane_bundle import shape, write_bundle
from tests.support.rows import batch_of, cosines

LoadModel = Callable[..., AneModel]
Bundles = Callable[[str], Bundle]

pytestmark = pytest.mark.numerics

POOLING = {name: Pooling(HOW.get(name, "mean")) for name in RECIPES if name not in RERANKERS}
EMBEDDERS = list(POOLING)


def admit_all(model: AneModel, widths: tuple[int, ...] = ()) -> None:
    for bucket in model.buckets:
        model.admit_shape(bucket, progress=silent())
    for width in widths:
        model.admit_packed(width, progress=silent())


def embed(model: AneModel, found: list[np.ndarray], pooling: Pooling, width: int | None = None) -> np.ndarray:
    return model.embed(batch_of(found), pooling=pooling, normalize=True, packed_width=width, progress=silent())


@pytest.mark.parametrize("name", [*EMBEDDERS, "bert:macos14", "qwen3:macos14"])
def test_vectors_against_transformers(name: str, load: LoadModel) -> None:
    model, recipe = load(name), name.partition(":")[0]
    admit_all(model, (64,))
    expected = np.load(GOLDENS)[recipe]
    alone, together = (embed(model, rows(recipe), POOLING[recipe], width) for width in (None, 64))
    assert cosines(alone, expected).min() >= 0.999
    assert cosines(together, expected).min() >= 0.999 and cosines(together, alone).min() >= 0.9999


@pytest.mark.parametrize("name", [*RERANKERS, "cross:macos14"])
def test_logits_against_transformers(name: str, load: LoadModel) -> None:
    model, recipe = load(name), name.partition(":")[0]
    admit_all(model)
    got = model.rerank_sequences(batch_of(rows(recipe)), progress=silent())
    expected = np.load(GOLDENS)[recipe][:, 0]
    assert np.abs(got - expected).max() <= 0.05
    assert np.ptp(expected) > 1, "the golden rows tell candidates apart"


@pytest.mark.parametrize("name", EMBEDDERS)
def test_a_packed_row_is_bit_identical_to_the_same_row_packed_alone(name: str, load: LoadModel) -> None:
    model = load(name)
    admit_all(model, (64,))
    mixes = [[20, 17, 9, 11], [1] * 20, [63, 1], [31, 33], [5, 40, 3, 2, 1], [64], [16, 16, 16, 16], [2, 59]]
    rng = np.random.default_rng(11)
    for lengths in mixes:
        found = [rng.integers(5, 128, n) for n in lengths]
        together = embed(model, found, POOLING[name], 64)
        alone = np.concatenate([embed(model, [row], POOLING[name], 64) for row in found])
        assert np.array_equal(together, alone), lengths


@pytest.mark.parametrize("name", EMBEDDERS)
def test_states_do_not_depend_on_the_bucket_or_the_pad_id_bitwise(name: str, bundles: Bundles) -> None:
    row = np.random.default_rng(5).integers(5, 128, 13).astype(np.int32)
    found = []
    for function, bucket in (("s16", 16), ("s64", 64)):
        program = mil_reference.load(bundles(name).root / "model.mlpackage", function)
        for pad in (0, 77):
            feeds = inputs.single(row, bucket, InputRules(vocab=128, pad_id=pad))
            found.append(program.run(feeds)["last_hidden_state"][0, :13])
    assert all(np.array_equal(found[0], other) for other in found[1:])


MID = {"layers": 4, "hidden": 256, "heads": 8, "max_positions": 128}
"""Large enough for activations to pile up, small enough to build in seconds."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "write", "options", "outliers"),
    [
        ("qwen3", toy_models.write_qwen3, {"kv_heads": 4, "head_dim": 32, "ffn": 768}, "embed_tokens.weight"),
        ("modernbert", toy_models.write_modernbert, {"ffn": 384, "rerank": True}, "embeddings.tok_embeddings.weight"),
    ],
)
def test_fp16_holds_a_mid_size_model_with_outlier_channels(
    name: str, write: Callable[..., Path], options: dict[str, Any], outliers: str, tmp_path: Path
) -> None:
    """Trained decoders carry a few channels with values in the thousands: no overflow, and rounding stays harmless.

    Compared with the same graph in float64, since the point is the range of fp16 and not the graph.
    """
    (tmp_path / "checkpoint").mkdir()
    write(tmp_path / "checkpoint", **MID, **options)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    plain, touched = checkpoint.f32, []

    def amplified(tensor: str) -> np.ndarray:
        found = plain(tensor)
        if tensor == outliers:
            found = found.copy()
            found[:, [3, 77]] *= 2000.0 / np.abs(found[:, [3, 77]]).max()
            touched.append(tensor)
        return found

    object.__setattr__(checkpoint, "f32", amplified)
    bundle = write_bundle(checkpoint, tmp_path / "bundle", shape(64))
    function = mil_reference.load(bundle.root / "model.mlpackage", "s64")
    row = np.random.default_rng(3).integers(5, 300, 60).astype(np.int32)
    feeds = inputs.single(row, 64, InputRules(vocab=320))
    (rounded,) = function.run(feeds).values()
    function.rounded = False
    (exact,) = function.run(feeds).values()
    assert touched and function.peak < 65504 and np.isfinite(rounded).all()
    if name == "qwen3":
        assert cosines(rounded[0, : len(row)], exact[0, : len(row)]).min() >= 0.999
    else:
        assert abs(float(rounded[0] - exact[0])) <= 0.05
