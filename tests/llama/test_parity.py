"""The default models on llama.cpp against the fixtures that are shipped with them: what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import fixtures
from engines.bundle.manifest import Bundle
from engines.checkpoint.read import Checkpoint
from engines.llama.build.convert import build
from engines.protocol.messages import Pooling
from engines.runtime.batch import RerankPairs, TokenBatch
from engines.runtime.progress import silent
from tests.support.rows import batch_of, cosines
from tests.support.toy_gguf import ToyGguf, sha256

pytestmark = [pytest.mark.llama, pytest.mark.numerics]

Bundles = Callable[[str], Bundle]


def built(bundle: Bundle, folder: Path, dtype: str) -> ToyGguf:
    """Build a default model as GGUF in one dtype, from the bundle's own fp32 weights."""
    known, package = bundle.manifest, bundle.artifacts("safetensors-package")[0]
    assert isinstance(known.config, dict)
    file = bundle.path(package.path)
    build(
        Checkpoint.from_package(file, config=known.config, family=known.family, task=known.task),
        folder / "model.gguf",
        dtype=dtype,
    )
    return ToyGguf(folder / "model.gguf", bundle.root, sha256(folder / "model.gguf"))


@pytest.mark.parametrize(("dtype", "cosine"), [("f32", 0.9999), ("q8_0", 0.997)])
def test_minilm(default_bundle: Bundles, load: Any, tmp_path: Path, dtype: str, cosine: float) -> None:
    bundle = default_bundle("minilm")
    model = load(built(bundle, tmp_path, dtype), threads=1)  # spinning threads collapse beside others
    known = fixtures.read(bundle.path("fixtures.npz")).arrays
    rows = TokenBatch(known["input_ids"], known["cu_seqlens"])
    ours = model.embed(rows, pooling=Pooling.MEAN, normalize=True, packed_width=None, progress=silent())
    assert cosines(ours, known["vectors_q"] * known["vectors_scale"][:, None]).min() >= cosine


@pytest.mark.parametrize(("dtype", "error"), [("f32", 0.05), ("q8_0", 0.3)])
def test_ms_marco(default_bundle: Bundles, load: Any, tmp_path: Path, dtype: str, error: float) -> None:
    """Logits near the reference's; pairs that the reference tells apart come in its order."""
    bundle = default_bundle("ms-marco")
    model = load(built(bundle, tmp_path, dtype), threads=1)
    known = fixtures.read(bundle.path("fixtures.npz")).arrays
    candidates = np.split(known["candidate_ids"], known["candidate_cu"][1:-1])
    for number, query in list(enumerate(np.split(known["query_ids"], known["query_cu"][1:-1])))[::4]:
        mine = np.flatnonzero(known["query_of"] == number)
        pairs = RerankPairs(query, batch_of([candidates[n] for n in mine]))
        ours, theirs = model.rerank(pairs, progress=silent()), known["logits"][mine]
        assert np.abs(ours - theirs).max() <= error, f"query {number}: {np.abs(ours - theirs).max():.4f}"
        apart = np.subtract.outer(theirs, theirs) > (1e-2 if dtype == "f32" else 2 * error)
        assert (np.subtract.outer(ours, ours)[apart] > 0).all()


def test_smollm2_follows_the_reference(default_bundle: Bundles, load: Any) -> None:
    """llama.cpp rounds activations to 8 bits beside Q4_1 weights: the matrix asks for top1 0.95 of the clear tokens."""
    bundle = default_bundle("smollm2")
    path = bundle.path("model-q4_1.gguf")
    model, known = load(ToyGguf(path, bundle.root, sha256(path)), threads=1), fixtures.read(bundle.path("fixtures.npz"))
    prompt = np.array([504, 3575, 282, 4649, 314], dtype=np.int32)  # "The capital of France is"
    assert model.generate(prompt, max_tokens=8, progress=silent()).text.startswith(" Paris.")
    asked = agreed = 0
    for row, greedy, apart in list(zip(known.rows(), known.arrays["greedy"], known.arrays["clear"], strict=True))[::9]:
        steps = len(apart) if apart.all() else int(apart.argmin())
        found = model.generate(row, max_tokens=steps, progress=silent()).generated_token_ids
        same = next((n for n, (a, b) in enumerate(zip(found, greedy, strict=False)) if a != b), len(found))
        agreed += same
        asked += min(same + 1, steps)  # behind a token that differs the two continue different texts
    assert asked > 60 and agreed >= 0.95 * asked, f"{agreed} of {asked}"
