from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.bundle import fixtures
from engines.bundle.fixtures import Reference
from engines.bundle.manifest import read
from synapse_host.certification import probes
from synapse_host.errors import BundleInvalid
from tests.support.small_bundle import CLS, SEP, WORDS, write_bundle


def test_what_ends_a_generation_is_of_the_manifest_and_the_tokenizer(tmp_path: Path) -> None:
    end = WORDS.index("<|im_end|>")
    options = {"task": "generate", "frame": False, "special_ids": {"eos": 1, "bos": 2}}
    assert probes.stops(read(write_bundle(tmp_path, **options))) == {1, end}


def test_a_changed_tokenizer_ends_nothing(tmp_path: Path) -> None:
    bundle = read(write_bundle(tmp_path, task="generate", frame=False))
    file = bundle.path("tokenizer.json")
    file.write_text(file.read_text().replace("<|im_end|>", "<|im_fine|>"))
    with pytest.raises(BundleInvalid, match="was changed"):
        probes.stops(bundle)


def test_the_rows_of_a_reference_are_those_of_the_default_prompt(tmp_path: Path) -> None:
    bundle = read(write_bundle(tmp_path, prompts={"query": "query "}, default_prompt="query"))
    by = Reference("transformers", "5", "float64", "sha256:" + "0" * 64, "f32")
    rows = [[CLS, WORDS.index("query"), WORDS.index("a"), SEP], [CLS, WORDS.index("b"), SEP]]
    ids, cu = fixtures.flatten(rows)
    quantised, scale = fixtures.quantize(np.ones((2, 8)))
    arrays = {"input_ids": ids, "cu_seqlens": cu, "vectors_q": quantised, "vectors_scale": scale}
    fixtures.write(tmp_path / "f.npz", task="embed", texts=["a", "b"], computed_by=by, arrays=arrays)
    assert probes.stale_rows(bundle, fixtures.read(tmp_path / "f.npz")) == 1, "the second has no prompt"
