"""``synapse build`` and ``synapse models``, through the command's own entry; what they refuse: test_bad_input.py."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from synapse_host.models import catalogue
from tests.cli.conftest import Command, Done, Here, finished
from tests.support import toy_models
from tests.support.toy_gguf import build_toy

pytestmark = pytest.mark.process


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(toy_models.write_bert(tmp_path / "checkpoint"))


def test_build_and_build_again(cli: Command, here: Here, checkpoint: str) -> None:
    out = cli.root / "My Model (v2)"
    done = here("build", checkpoint, str(out), "--max-tokens", "32", "--pooling", "cls", "--json")
    found = done.document
    assert (done.code, done.err, found["bundle"]) == (0, "", str(out))
    assert set(found) == {"bundle", "manifest_digest", "artifacts", "notes"} and found["notes"] == []
    assert [(a["format"], a["dtype"]) for a in found["artifacts"]] == [
        ("gguf", "f16"), ("safetensors-package", "f32"),
    ]  # fmt: skip
    for artifact in found["artifacts"]:
        assert artifact["bytes"] == (out / artifact["path"]).stat().st_size
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert (manifest["model_id"], manifest["pooling"], manifest["max_tokens"]) == ("My-Model-v2", "cls", 32)
    assert catalogue.obtain(str(out)).digest == found["manifest_digest"]
    # For people; over a bundle only when asked.
    again = ("build", checkpoint, str(out), "--formats", "gguf", "--dtype", "q8_0")
    refused = here(*again)
    assert (refused.code, "--force" in refused.err) == (2, True)
    done = here(*again, "--force")
    assert (done.code, done.err) == (0, "") and "bert embed" in done.out and "model-q8_0.gguf" in done.out


@pytest.mark.skipif(sys.platform != "linux", reason="sends signals to a command and finds its children")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_build_with_its_converter_and_leaves_nothing(
    cli: Command, checkpoint: str, number: signal.Signals
) -> None:
    command = cli.spawn("build", checkpoint, "out/b")
    while not (children := psutil.Process(command.pid).children()):
        assert command.poll() is None
        time.sleep(0.002)
    time.sleep(0.1)  # the command has it in hand by now
    children[0].suspend()  # it can't be done before the signal is
    command.send_signal(number)
    assert finished(command) == Done(130, "", "synapse: interrupted\n")
    assert not children[0].is_running() and not list((cli.root / "out").iterdir())


def test_models_are_listed_shown_verified_and_removed(cli: Command, here: Here, checkpoint: str) -> None:
    mine = cli.root / "models" / "mine"
    (cli.root / "models" / "bad").mkdir()
    (cli.root / "models" / "bad" / "manifest.json").write_text("{}")
    assert here("build", checkpoint, str(mine), "--formats", "safetensors-package").code == 0
    found = here("models", "list", "--json").document
    assert found["available"] == ["minilm", "ms-marco", "smollm2"]
    assert [entry["name"] for entry in found["broken"]] == ["bad"]
    entry, _ = found["models"]
    assert set(entry) == {"name", "task", "path", "manifest_digest", "formats"}
    assert (entry["name"], entry["task"], entry["formats"]) == ("mine", "embed", ["safetensors-package"])
    size = (mine / "model-f32.safetensors").stat().st_size / 1e6
    assert f"  {size:.1f} MB  safetensors-package f32\n" in here("models").out
    assert here("models", "path", "mine").out == f"{mine}\n"
    [shown] = here("models", "show", "mine", "--json").document["models"]
    assert (shown["family"], shown["artifacts"][0]["dtype"]) == ("bert", "f32")
    assert "max_tokens" in here("models", "show", "mine").out
    for damage, code in (("", 0), ("{}", 1)):
        if damage:
            (mine / "tokenizer.json").write_text(damage)
        done = here("models", "verify", "mine", "--json")
        assert (done.code, done.document["models"][0]["ok"]) == (code, code == 0)
    assert "tokenizer.json" in done.document["models"][0]["wrong"][0]
    done = here("models", "verify", "mine", "toy")
    assert (done.code, "WRONG" in done.out, " ok" in done.out) == (1, True, True)
    mine.rename(cli.root / "own")
    refused = here("models", "remove", str(cli.root / "own"))
    assert refused.code == 2 and (cli.root / "own").exists(), "not what isn't ours to delete"
    assert [here("models", "remove", "toy").code for _ in range(2)] == [0, 2]
    assert not (cli.root / "models" / "toy").exists()


def test_the_models_folder_may_come_from_the_environment(
    cli: Command, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNAPSE_MODELS_DIR", str(cli.root / "shelf"))
    assert f"models in {cli.root / 'shelf'}" in here("models", bare=True).out
    assert f"models in {cli.root / 'models'}" in here("models").out


def test_a_gguf_is_taken_as_it_is(cli: Command, here: Here, checkpoint: str, tmp_path: Path) -> None:
    toy = build_toy(tmp_path, "toy", toy_models.write_llama)
    out, own = str(cli.root / "gguf"), str(toy.checkpoint / "tokenizer.json")
    for words, why in (
        ((str(toy.path), out, "--dtype", "q8_0"), "--dtype is for a checkpoint"),
        ((str(toy.path), out, "--formats", "safetensors-package"), "--formats is for a checkpoint"),
        ((checkpoint, out, "--tokenizer", own), "--tokenizer is for a GGUF"),
        ((own, out), "not a usable GGUF file"),
    ):
        refused = here("build", *words)
        assert (refused.code, why in refused.err, Path(out).exists()) == (2, True, False)
    done = here("build", str(toy.path), out, "--tokenizer", own, "--task", "embed", "--pooling", "mean", "--json")
    assert (done.code, done.err) == (0, "")
    assert "normalised" in done.document["notes"][0]
    assert catalogue.obtain(out).manifest.task == "embed"
    # A checkpoint that only one engine reads becomes that engine's format alone.
    only = str(toy_models.TOYS["mistral-generate"](tmp_path / "mistral"))
    made = here("build", only, str(cli.root / "only"), "--json").document["artifacts"]
    assert [artifact["format"] for artifact in made] == ["gguf"]
