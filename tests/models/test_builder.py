"""Builder programs as children, staging, bundle assembly and re-checking."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.bundle import manifest
from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.manifest import FileRef
from synapse_host.errors import BundleInvalid, InvalidRequest, StorageFull, SynapseError
from synapse_host.models import builder
from tests.support import toy_models

pytestmark = pytest.mark.process


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A builder program of our own: it obeys its first argument."""
    (tmp_path / "toytool.py").write_text(
        "import json, sys, time\n"
        "what = sys.argv[1]\n"
        "def say(**line): print(json.dumps(line), flush=True)\n"
        "say(stage='x', done=1, total=2)\n"
        "print('noise from a library', flush=True)\n"
        "print('[1, 2]', flush=True)\n"
        "say(stage='x', done='many', total=2)\n"
        "if what == 'hang': time.sleep(600)\n"
        "if what == 'fail': sys.exit('toytool: the disk said no\\n')\n"
        "if what == 'full': sys.exit('toytool: [Errno 28] No space left on device\\n')\n"
        "if what == 'crash': import os; os.abort()\n"
        "if what == 'chatty': sys.stderr.write('warning\\n' * 200000)\n"
        "say(stage='x', done=2, total=2)\n"
        "if what != 'silent': say(stage='result', path='p')\n"
    )
    (tmp_path / "toytool-1.0.dist-info").mkdir()  # installed there, as by pip install --target
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "toytool"


@pytest.mark.parametrize("what", ["ok", "chatty"])
def test_progress_and_the_result_come_through(tool: str, what: str) -> None:
    """A lot on stderr doesn't block."""
    seen: list[tuple[str, int, int]] = []
    result = builder.run_tool([tool, what], stage="s", progress=lambda *step: seen.append(step))
    assert result == {"stage": "result", "path": "p"}
    assert seen == [("s", 1, 2), ("s", 2, 2)]


def test_nothing_of_the_current_folder_is_run(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's folder may hold a module of any name; a relative PYTHONPATH is still the caller's."""
    here = tmp_path / "checkpoint"
    here.mkdir()
    for name in ("json.py", "toytool.py", "sitecustomize.py"):
        (here / name).write_text("raise SystemExit('of the checkpoint')")
    monkeypatch.chdir(here)
    for path in ("..", os.pathsep.join(["", "..", "."])):
        monkeypatch.setenv("PYTHONPATH", path)
        assert builder.run_tool([tool, "ok"], stage="s") == {"stage": "result", "path": "p"}


def test_a_folder_given_as_a_link_is_made_where_the_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "big" / "old").mkdir(parents=True)
    for name, place in (("link", "old"), ("dangling", "new")):
        (tmp_path / name).symlink_to(tmp_path / "big" / place)
        with builder.staging(tmp_path / name) as folder:
            assert folder.parent == tmp_path / "big"
            (folder / "made").touch()
        assert (tmp_path / name).is_symlink() and (tmp_path / "big" / place / "made").exists()
    assert sorted(path.name for path in (tmp_path / "big").iterdir()) == ["new", "old"]


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("fail", BundleInvalid, "toytool: the disk said no"),
        ("crash", BundleInvalid, "status -6"),
        ("silent", BundleInvalid, "status 0"),
        ("full", StorageFull, "No space left"),
    ],
)
def test_a_failure_is_the_programs_own_last_line(tool: str, what: str, kind: type[SynapseError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        builder.run_tool([tool, what], stage="s")
    assert caught.value.details["stage"] == "s"


def test_an_interrupted_caller_takes_the_child_with_it(tool: str) -> None:
    children: list[int] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        children.extend(child.pid for child in psutil.Process().children())
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        builder.run_tool([tool, "hang"], stage="s", progress=interrupt)
    assert time.monotonic() - started < 60
    assert children
    assert not any(psutil.pid_exists(pid) for pid in children)


def test_staging_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "b"
    with builder.staging(target) as folder:
        (folder / "f").write_text("1")
        assert not target.exists()
    assert (target / "f").read_text() == "1"
    assert target.stat().st_mode & 0o777 == 0o755
    with pytest.raises(RuntimeError), builder.staging(target) as folder:
        (folder / "f").write_text("2")
        raise RuntimeError
    assert (target / "f").read_text() == "1"
    with builder.staging(target) as folder:
        (folder / "g").write_text("3")
    assert [path.name for path in target.iterdir()] == ["g"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_what_a_killed_build_left_goes_a_day_later(tmp_path: Path) -> None:
    hour = 3600.0
    target = tmp_path / "b[1]"
    gone, spare = ".b[1].aaaaaaaa.building", ".b[1].aaaaaaaa.old"
    ages = {
        gone: 25, spare: 25, "b": 25, ".b[1].bbbbbbbb.building": 23, ".b1.cccccccc.building": 25,
        ".b[1].v2.dddddddd.building": 25, ".b[1].eeeeeeee.other": 25,
    }  # fmt: skip

    def left() -> set[str]:
        return {path.name for path in tmp_path.iterdir()} & ages.keys()

    for name, age in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").touch()
        os.utime(tmp_path / name, times=(0, time.time() - age * hour))
    with builder.staging(target):
        pass
    assert left() == ages.keys() - {gone}  # the old bundle is all there is
    with builder.staging(target):
        pass
    assert left() == ages.keys() - {gone, spare}


def test_a_bundle_of_two_formats_and_three_dtypes(tmp_path: Path) -> None:
    checkpoint = toy_models.write_bert(tmp_path / "m", cross_encoder=True)
    bundle = builder.build(
        checkpoint,
        tmp_path / "out",
        formats=["gguf", "safetensors-package"],
        dtypes={"gguf": ["q8_0", "f16"], "safetensors-package": ["f16"]},
        model_id="toy",
        overrides={"max_tokens": 32, "score": "identity"},
    )
    found = bundle.manifest
    assert [(a.format, a.dtype, a.path) for a in found.artifacts] == [
        ("gguf", "q8_0", "model-q8_0.gguf"),
        ("gguf", "f16", "model-f16.gguf"),
        ("safetensors-package", "f16", "model-f16.safetensors"),
    ]
    assert (found.max_tokens, found.score, found.token_types, found.head) == (32, "identity", True, {"kind": "pooler"})
    assert {path.name for path in bundle.root.iterdir()} == {
        "manifest.json", "tokenizer.json", "model-q8_0.gguf", "model-f16.gguf", "model-f16.safetensors",
    }  # fmt: skip
    assert builder.verify(bundle) == []


def test_a_reference_computed_here_is_known_by_its_digest_and_by_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bundle says of its fixtures is its author's word: the machine that computed them remembers."""
    real = builder.run_tool

    def run_tool(argv: Sequence[str], **more: Any) -> Any:
        if argv[0] != "engines.checkpoint.reference":
            return real(argv, **more)
        Path(argv[2]).write_bytes(b"computed")
        return {}

    monkeypatch.setattr(builder, "run_tool", run_tool)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    checkpoint = toy_models.write_bert(tmp_path / "m")
    bundle = builder.build(checkpoint, tmp_path / "out", **PACKAGE, reference=True)
    assert isinstance(bundle.manifest.fixtures, FileRef)
    made = bundle.manifest.fixtures.digest
    assert builder.reference_origin(made) == "computed_here"
    assert builder.reference_origin(made, tmp_path / "data") == "computed_here"
    assert builder.reference_origin(made, tmp_path / "elsewhere") == "bundle"
    shipped = Path(builder.__file__).parents[1] / "fixtures" / "minilm.npz"
    assert builder.reference_origin(PREFIX + file_digest(shipped)) == "project"


PACKAGE: dict[str, Any] = {"formats": ["safetensors-package"], "dtypes": {}, "model_id": "toy"}


def test_a_checkpoint_without_a_tokenizer_makes_a_bundle_without_one(tmp_path: Path) -> None:
    checkpoint = toy_models.write_bert(tmp_path / "m")
    (checkpoint / "tokenizer.json").unlink()
    assert builder.build(checkpoint, tmp_path / "out", **PACKAGE).manifest.tokenizer is manifest.UNSET


def test_what_cannot_be_built_leaves_the_target_untouched(tmp_path: Path) -> None:
    checkpoint = toy_models.write_modernbert(tmp_path / "m")
    for change, words in (
        (
            {"formats": ["safetensors-package", "gguf"]},
            r"modernbert embed .* as gguf: .*safetensors-package .*or coreml",
        ),
        ({"formats": ["tflite"]}, "tflite"),
        ({"model_id": "no good"}, "model_id"),
    ):
        with pytest.raises((BundleInvalid, InvalidRequest), match=words):
            builder.build(checkpoint, tmp_path / "out", **PACKAGE | change)
    (checkpoint / "tokenizer.json").write_text('{"model": {"type": "Neural", "vocab": {}}}')
    with pytest.raises(BundleInvalid, match=r"tokenizer\.json can't be read as a tokenizer"):
        builder.build(checkpoint, tmp_path / "out", **PACKAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_chat_template_that_no_chat_could_use_is_not_built(tmp_path: Path) -> None:
    file = toy_models.write_llama(tmp_path / "m") / "chat_template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}")
    with pytest.raises(BundleInvalid, match="can't be read"):
        builder.build(file.parent, tmp_path / "out", formats=["gguf"], dtypes={}, model_id="toy")
    assert not (tmp_path / "out").exists()
    file.write_text("{{ raise_exception('two of them') }}")
    made = builder.build(file.parent, tmp_path / "out", formats=["gguf"], dtypes={}, model_id="toy")
    assert made.manifest.chat_template == file.read_text()


def test_a_default_prompt_is_the_bundles_and_must_leave_room(tmp_path: Path) -> None:
    checkpoint = toy_models.write_bert(tmp_path / "c")
    file = checkpoint / "config_sentence_transformers.json"
    file.write_text('{"prompts": {"query": "w1 w2 "}, "default_prompt_name": "query"}')
    built = builder.build(checkpoint, tmp_path / "b", **PACKAGE).manifest
    assert (built.prompts, built.default_prompt) == ({"query": "w1 w2 "}, "query")
    file.write_text('{"prompts": {"query": "%s"}, "default_prompt_name": "query"}' % ("w1 " * 64))
    with pytest.raises(BundleInvalid, match="leaves no room"):
        builder.build(checkpoint, tmp_path / "long", **PACKAGE)
    assert not (tmp_path / "long").exists()


def test_verify_names_each_file_that_changed(tmp_path: Path) -> None:
    bundle = builder.build(toy_models.write_bert(tmp_path / "m"), tmp_path / "out", **PACKAGE)
    seen: set[str] = set()
    assert builder.verify(bundle, lambda stage, done, total: seen.add(stage)) == []
    assert seen == {"model-f32.safetensors", "tokenizer.json"}
    with (bundle.root / "model-f32.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    (bundle.root / "tokenizer.json").unlink()
    wrong = builder.verify(bundle)
    assert len(wrong) == 2
    assert "model-f32.safetensors: digest is" in wrong[0]
    assert "tokenizer.json" in wrong[1]
