"""Real packages: reproducible bytes, honest signatures, refused nonsense."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.ane import inputs
from engines.ane.build import convert, package
from engines.ane.inputs import InputRules
from engines.ane.signature import Key
from engines.bundle import manifest
from engines.bundle.digest import tree_digest
from engines.bundle.manifest import Bundle, BundleError
from engines.checkpoint.read import Checkpoint
from engines.protocol.errors import EngineError
from tests.support import mil_reference, toy_models
from tests.support.ane_bundle import packed, shape
from tests.support.worker_client import ROOT

Checkpoints = Callable[[str], Checkpoint]
Bundles = Callable[[str], Bundle]

pytestmark = pytest.mark.numerics


def test_two_builds_agree_byte_for_byte_even_in_another_process(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints("bert")
    keys = shape(16, 32) + packed(64)
    first = convert.build(checkpoint, tmp_path / "a.mlpackage", keys=keys)
    again = convert.build(checkpoint, tmp_path / "b.mlpackage", keys=keys)
    command = [sys.executable, "-m", "engines.ane", "build", str(checkpoint.folder), str(tmp_path / "c.mlpackage")]
    run = subprocess.run(
        [*command, "--buckets", "16,32", "--packed", "64"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["stage"] for line in lines][-1] == "result"
    assert {"stage": "convert", "done": 3, "total": 3} in lines
    assert first["digest"] == again["digest"] == lines[-1]["digest"]
    assert first["tree"] == again["tree"] == lines[-1]["tree"]
    old = [convert.build(checkpoint, tmp_path / name, keys=shape(16), target="macos14") for name in ("d", "e")]
    assert old[0]["tree"] == old[1]["tree"]


def test_the_manifest_entry_is_what_lies_on_disk(bundles: Bundles) -> None:
    bundle = bundles("bert")
    (artifact,) = bundle.artifacts("coreml")
    found = tree_digest(bundle.path(artifact.path))
    assert artifact.digest == f"sha256:{found.compatible}" and artifact.tree == f"sha256:{found.injective}"
    assert artifact.layers == 2 and artifact.dtype == "f16"
    assert [function.name for function in artifact.functions] == ["s16", "s32", "s64", "packed64"]  # type:
    # ignore[union-attr]
    assert manifest.read(bundle.root).digest == bundle.digest


def test_functions_share_their_weights(bundles: Bundles, checkpoints: Checkpoints) -> None:
    root, checkpoint = bundles("modernbert").root, checkpoints("modernbert")
    weights = root / "model.mlpackage" / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"
    parameters = sum(int(np.prod(checkpoint.shape(tensor))) for tensor in checkpoint.tensors)
    # fp16 once, with room for the rotary tables and the position table's cuts; not once a function (3 or 4 of them).
    assert weights.stat().st_size < 2 * parameters * 2


def test_metadata_and_versions(bundles: Bundles) -> None:
    made = package.load_proto(bundles("bert").root / "model.mlpackage")
    told = made.description.metadata.userDefined
    assert made.specificationVersion >= 9 and set(made.mlProgram.functions) == {"s16", "s32", "s64", "packed64"}
    assert told["synapse.model_kind"] == "bert-embed" and told["synapse.output_name"] == "last_hidden_state"
    assert told["synapse.seq_len"] == "16,32,64" and told["synapse.packed_width"] == "64"
    assert package.VOLATILE not in told
    old = package.load_proto(bundles("bert:macos14").root / "model-macos14" / "s16.mlpackage")
    assert old.specificationVersion == 8 and set(old.mlProgram.functions) == {"main"}
    assert package.VOLATILE not in old.description.metadata.userDefined


@pytest.mark.parametrize("name", ["bert", "cross", "modernbert", "qwen3"])
def test_what_is_added_to_a_bucket_s_scores_is_0_or_at_most_minus_10_000(
    name: str, bundles: Bundles, checkpoints: Checkpoints
) -> None:
    """Padding, later tokens of a causal model, and tokens beyond a local layer's window; never an infinity."""
    function = mil_reference.load(bundles(name).root / "model.mlpackage", "s64")
    rules = InputRules.of(checkpoints(name).family, checkpoints(name).config, token_types=name == "cross", sep_id=3)
    softmaxes = [operation for operation in function.operations if operation.op_type == "softmax"]
    found = [softmax.inputs["x"].op.inputs["y"] for softmax in softmaxes]
    function.outputs = list(dict.fromkeys(found))
    masks = function.run(inputs.single(np.arange(5, 46, dtype=np.int32), 64, rules))
    seen = set()
    for mask in masks.values():
        table = np.broadcast_to(mask, (1, 1, 64, 64))[0, 0, :41].astype(np.float64)
        allowed = table == 0
        assert np.isfinite(table).all() and table[~allowed].max() <= inputs.MASKED
        seen.add(allowed.tobytes())
    near = [None] if rules.window is None else [None, rules.window]
    plain = {(inputs.bias((41,), 64, causal=rules.causal, window=one)[0, 0, :41] == 0).tobytes() for one in near}
    assert seen == plain


def test_a_weight_beyond_fp16_is_refused_at_build_time(tmp_path: Path) -> None:
    from engines.checkpoint import safetensors

    (tmp_path / "huge").mkdir()
    folder = toy_models.write_bert(tmp_path / "huge")
    opened = Checkpoint.open(folder)
    tensors = {name: np.array(opened.tensors[name]) for name in opened.tensors}
    tensors["encoder.layer.0.output.dense.weight"][3, 3] = 7e4
    safetensors.write(folder / "model.safetensors", {f"bert.{name}": value for name, value in tensors.items()})
    with pytest.raises(ValueError, match="fp16"):
        convert.build(Checkpoint.open(folder), tmp_path / "x.mlpackage", keys=shape(16))
    assert not list(tmp_path.glob("*.mlpackage")), "nothing half-built stays"


@pytest.mark.parametrize(
    ("name", "keys", "out", "why"),
    [
        ("bert", packed(64), "x.mlpackage", "at least one bucket"),
        ("bert", shape(16, 16), "x.mlpackage", "distinct"),
        ("bert", shape(65), "x.mlpackage", "positions"),
        ("bert", shape(16), "z", "mlpackage"),
        ("cross", shape(16) + packed(32), "x.mlpackage", "embedding models only"),
        ("llama", shape(16), "x.mlpackage", "generate model can't be built"),
    ],
)
def test_what_cannot_be_built_is_refused(
    name: str, keys: list[Key], out: str, why: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    (tmp_path / "llama").mkdir()
    made = checkpoints(name) if name != "llama" else Checkpoint.open(toy_models.write_llama(tmp_path / "llama"))
    with pytest.raises((ValueError, BundleError), match=why):
        convert.build(made, tmp_path / out, keys=keys)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"], "nothing half-built stays"


def test_an_existing_target_is_left_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "y.mlpackage").mkdir()
    with pytest.raises(FileExistsError):
        convert.build(checkpoints("bert"), tmp_path / "y.mlpackage", keys=shape(16))


@pytest.mark.parametrize(
    "arguments", [["build"], ["build", "a", "b", "--buckets", "x"], ["build", "a", "b", "--target", "ios"], []]
)
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("damage", ["missing", "garbage", "truncated"])
def test_a_damaged_package_is_refused_when_it_is_read(damage: str, bundles: Bundles, tmp_path: Path) -> None:
    source = bundles("bert").root / "model.mlpackage" / package.SPEC
    target = tmp_path / "m.mlpackage" / package.SPEC
    target.parent.mkdir(parents=True)
    if damage == "garbage":
        target.write_bytes(b"\xff" * 100)
    elif damage == "truncated":
        target.write_bytes(source.read_bytes()[:5000])
    with pytest.raises(EngineError) as refused:
        package.read_spec(tmp_path / "m.mlpackage")
    assert refused.value.code.value in ("artifact_invalid", "model_unsupported")
