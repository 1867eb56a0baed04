from __future__ import annotations

from pathlib import Path

import pytest

from engines.bundle.manifest import read
from synapse_host.certification import probes
from synapse_host.errors import BundleInvalid
from tests.support.small_bundle import WORDS, write_bundle


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
