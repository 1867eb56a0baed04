"""The default models on llama.cpp against the fixtures that are shipped with them: what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import fixtures
from engines.checkpoint.read import Checkpoint
from engines.llama.build.convert import build
from engines.protocol.messages import Pooling
from engines.runtime.batch import RerankPairs, TokenBatch
from engines.runtime.progress import silent
from tests.support.rows import batch_of, cosines
from tests.support.toy_gguf import ToyGguf, sha256

pytestmark = [pytest.mark.llama, pytest.mark.numerics]

SHIPPED = Path(__file__).parents[2] / "synapse_host" / "fixtures"

Make = Callable[[str, str], ToyGguf]


def bundle(name: str) -> Path:
    from synapse_host.errors import SynapseError
    from synapse_host.models import catalogue

    try:
        return catalogue.obtain(name).root
    except SynapseError as exc:
        pytest.skip(f"the model {name} can't be had here: {exc}")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Build a default model as GGUF in one dtype, from the bundle's own fp32 weights."""
    folder = tmp_path_factory.mktemp("real")
    made: dict[str, ToyGguf] = {}

    def call(name: str, dtype: str) -> ToyGguf:
        path = folder / f"{name}-{dtype}.gguf"
        if path.name not in made:
            root = bundle(name)
            manifest = json.loads((root / "manifest.json").read_text())
            package = next(a for a in manifest["artifacts"] if a["format"] == "safetensors-package")
            checkpoint = Checkpoint.from_package(
                root / package["path"], config=manifest["config"], family=manifest["family"], task=manifest["task"]
            )
            build(checkpoint, path, dtype=dtype)
            made[path.name] = ToyGguf(path, root, sha256(path))
        return made[path.name]

    return call


@pytest.mark.parametrize(("dtype", "cosine"), [("f32", 0.9999), ("q8_0", 0.997)])
def test_minilm(make: Make, load: Any, dtype: str, cosine: float) -> None:
    model = load(make("minilm", dtype), threads=1)  # spinning threads collapse beside others
    known = fixtures.read(SHIPPED / "minilm.npz").arrays
    rows = TokenBatch(known["input_ids"], known["cu_seqlens"])
    ours = model.embed(rows, pooling=Pooling.MEAN, normalize=True, packed_width=None, progress=silent())
    assert cosines(ours, known["vectors_q"] * known["vectors_scale"][:, None]).min() >= cosine


@pytest.mark.parametrize(("dtype", "error"), [("f32", 0.05), ("q8_0", 0.3)])
def test_ms_marco(make: Make, load: Any, dtype: str, error: float) -> None:
    """Logits near the reference's; pairs that the reference tells apart come in its order."""
    model = load(make("ms-marco", dtype), threads=1)
    known = fixtures.read(SHIPPED / "ms-marco.npz").arrays
    candidates = np.split(known["candidate_ids"], known["candidate_cu"][1:-1])
    for number, query in list(enumerate(np.split(known["query_ids"], known["query_cu"][1:-1])))[::4]:
        mine = np.flatnonzero(known["query_of"] == number)
        pairs = RerankPairs(query, batch_of([candidates[n] for n in mine]))
        ours, theirs = model.rerank(pairs, progress=silent()), known["logits"][mine]
        assert np.abs(ours - theirs).max() <= error, f"query {number}: {np.abs(ours - theirs).max():.4f}"
        apart = np.subtract.outer(theirs, theirs) > (1e-2 if dtype == "f32" else 2 * error)
        assert (np.subtract.outer(ours, ours)[apart] > 0).all()


@pytest.fixture(scope="module")
def smollm2() -> ToyGguf:
    path = bundle("smollm2") / "model-q4_1.gguf"
    return ToyGguf(path, path.parent, sha256(path))


def test_smollm2_follows_the_reference(load: Any, smollm2: ToyGguf) -> None:
    """llama.cpp rounds activations to 8 bits beside Q4_1 weights: the matrix asks for top1 0.95 of the clear tokens."""
    model, known = load(smollm2, threads=1), fixtures.read(SHIPPED / "smollm2.npz")
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
