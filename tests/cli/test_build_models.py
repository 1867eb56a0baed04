"""``synapse build`` and ``synapse models``, through the command's own entry."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from synapse_host.cli import main
from synapse_host.models import catalogue
from tests.support import toy_models

pytestmark = pytest.mark.process


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, err = call(capsys, *arguments, "--json")
    assert out.count("\n") == 1, "one document and nothing else"
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return code, found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return toy_models.write_bert(tmp_path / "checkpoint")


def test_build_prints_the_documented_keys(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "My Model (v2)"
    code, found = document(capsys, "build", checkpoint, out, "--max-tokens", 32, "--pooling", "cls")
    assert code == 0
    assert found["bundle"] == str(out)
    assert set(found) == {"bundle", "manifest_digest", "artifacts", "notes"} and found["notes"] == []
    assert [(a["format"], a["dtype"]) for a in found["artifacts"]] == [
        ("gguf", "f16"), ("safetensors-package", "f32"),
    ]  # fmt: skip
    for artifact in found["artifacts"]:
        assert artifact["bytes"] == (out / artifact["path"]).stat().st_size
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert (manifest["model_id"], manifest["pooling"], manifest["max_tokens"]) == ("My-Model-v2", "cls", 32)
    assert catalogue.obtain(str(out)).digest == found["manifest_digest"]


@pytest.mark.skipif(sys.platform != "linux", reason="sends signals to a command and finds its children")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_build_with_its_converter_and_leaves_nothing(
    tmp_path: Path, checkpoint: Path, number: int
) -> None:
    out = tmp_path / "out" / "b"
    words = [sys.executable, "-m", "synapse_host", "build", str(checkpoint), str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        while not (children := psutil.Process(command.pid).children()):
            assert command.poll() is None
            time.sleep(0.002)
        time.sleep(0.1)  # the command has it in hand by now
        children[0].suspend()  # it can't be done before the signal is
        command.send_signal(number)
        said, err = command.communicate(timeout=60)
    assert (command.returncode, said, err) == (130, b"", b"synapse: interrupted\n")
    assert not children[0].is_running() and not list(out.parent.iterdir())


def test_build_for_people(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "build", checkpoint, tmp_path / "b", "--formats", "gguf", "--dtype", "q8_0")
    assert code == 0
    assert "bert embed" in out
    assert "model-q8_0.gguf" in out
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere", "OUT"], 2, "nowhere is not a folder"),
        (["CP", "OUT", "--formats", "onnx"], 2, "'onnx' is not one of"),
        (["CP", "OUT", "--dtype", "int4"], 2, "not possible here"),
        (["CP", "OUT", "--dtype", "coreml=f16"], 2, "--dtype"),
        (["CP", "OUT", "--max-tokens", "65"], 2, "64 positions"),
        (["CP", "OUT", "--max-tokens", "0"], 2, "positive whole number"),
        (["CP", "OUT", "--score", "sigmoid"], 2, "for rerankers"),
        (["CP", "OUT", "--task", "rerank"], 2, "pooler.dense.weight"),
        (["CP", "CP"], 2, "not empty and not a bundle"),
        (["CP", "CP/config.json"], 2, "is a file"),
        (["CP"], 2, "OUT"),
        (["CP", "OUT", "--name", "no good"], 2, "model_id"),
    ],
)
def test_build_refuses_in_one_line(
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    places = {"CP": str(checkpoint), "OUT": str(tmp_path / "out"), "CP/config.json": str(checkpoint / "config.json")}
    status, out, err = call(capsys, "build", *(places.get(argument, argument) for argument in arguments))
    assert (status, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_build_replaces_a_bundle_only_when_told(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", checkpoint, tmp_path / "b", "--formats", "safetensors-package"]
    assert call(capsys, *arguments)[0] == 0
    code, _, err = call(capsys, *arguments)
    assert (code, "--force" in err) == (2, True)
    assert call(capsys, *arguments, "--force")[0] == 0


def test_models_lists_verifies_and_finds(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models"
    code, found = document(capsys, "models", "--models-dir", models)
    assert (code, found["models"]) == (0, [])
    assert found["available"] == ["minilm", "ms-marco", "smollm2"]
    call(capsys, "build", checkpoint, models / "mine", "--formats", "safetensors-package")
    code, found = document(capsys, "models", "list", "--models-dir", models)
    (entry,) = found["models"]
    assert set(entry) == {"name", "task", "path", "manifest_digest", "formats"}
    assert (entry["name"], entry["task"], entry["formats"]) == ("mine", "embed", ["safetensors-package"])
    size = (models / "mine" / "model-f32.safetensors").stat().st_size / 1e6
    assert f"  {size:.1f} MB  safetensors-package f32\n" in call(capsys, "models", "--models-dir", models)[1]
    code, out, _ = call(capsys, "models", "path", "mine", "--models-dir", models)
    assert (code, out) == (0, f"{models / 'mine'}\n")
    code, found = document(capsys, "models", "verify", "--models-dir", models)
    assert (code, found["models"][0]["ok"]) == (0, True)
    (models / "mine" / "tokenizer.json").write_text("{}")
    code, found = document(capsys, "models", "verify", "mine", "--models-dir", models)
    assert (code, found["models"][0]["ok"]) == (1, False)
    assert "tokenizer.json" in found["models"][0]["wrong"][0]
    code, out, _ = call(capsys, "models", "verify", "--models-dir", models)
    assert (code, "WRONG" in out) == (1, True)


def test_a_broken_bundle_is_listed_as_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_text("{}")
    code, found = document(capsys, "models", "--models-dir", tmp_path)
    assert (code, found["models"]) == (0, [])
    assert found["broken"][0]["name"] == "bad"
    code, _, err = call(capsys, "models", "verify", "bad", "--models-dir", tmp_path)
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["path", "nope"], "no model 'nope'"),
        (["verify", "nope"], "no model 'nope'"),
        (["install", "nope"], "no model 'nope'"),
        (["path", "minilm"], "synapse models install minilm"),
        (["path"], "needs a name"),
        (["install"], "needs a name"),
        (["remove"], "needs a name"),
        (["drop"], "invalid choice"),
    ],
)
def test_models_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = call(capsys, "models", *arguments, "--models-dir", tmp_path)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    code, found = document(capsys, "models", *arguments, "--models-dir", tmp_path)
    assert found["error"]["code"] in ("unknown_model", "bundle_invalid", "invalid_request")


def test_a_model_is_shown_and_removed(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models"
    assert call(capsys, "build", checkpoint, models / "mine")[0] == 0
    code, found = document(capsys, "models", "show", "mine", "--models-dir", models)
    [shown] = found["models"]
    assert code == 0 and (shown["name"], shown["family"], shown["task"]) == ("mine", "bert", "embed")
    assert [item["format"] for item in shown["artifacts"]] == ["gguf", "safetensors-package"]
    assert "max_tokens" in call(capsys, "models", "show", "mine", "--models-dir", models)[1]
    assert document(capsys, "models", "remove", "mine", "--models-dir", models)[0] == 0
    assert document(capsys, "models", "--models-dir", models)[1]["models"] == []
    assert call(capsys, "models", "remove", "mine", "--models-dir", models)[0] == 2
    # Not what isn't ours to delete.
    assert call(capsys, "build", checkpoint, tmp_path / "own")[0] == 0
    assert call(capsys, "models", "remove", tmp_path / "own", "--models-dir", models)[0] == 2
    assert (tmp_path / "own" / "manifest.json").is_file()


def test_the_models_folder_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNAPSE_MODELS_DIR", str(tmp_path / "shelf"))
    assert f"models in {tmp_path / 'shelf'}" in call(capsys, "models")[1]
    assert f"models in {tmp_path / 'other'}" in call(capsys, "models", "--models-dir", tmp_path / "other")[1]
