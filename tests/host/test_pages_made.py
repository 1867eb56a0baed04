"""README's status table is what its script makes; the pages' Python is what the code says, and runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from synapse_host import errors
from synapse_host.certificates import document as documents
from synapse_host.config import HostConfig, Windows
from synapse_host.errors import SynapseError
from synapse_host.host import Host
from synapse_host.placement.matrix import load
from synapse_host.results import EmbedResult, Generation, Piece, RerankResult
from synapse_host.sync import SyncHost
from tests.support.evidence import evidence
from tests.support.small_bundle import write_bundle, write_matrix

ROOT = Path(__file__).parents[2]
APP = (ROOT / "docs" / "app.md").read_text("utf-8")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(title: str) -> str:
    return APP.split(f"\n## {title}\n")[1].split("\n## ")[0]


def calls(host: type[Host | SyncHost]) -> set[str]:
    return {name for name, value in vars(host).items() if name[0] != "_" and name != "open" and callable(value)}


def arguments(call: Callable[..., Any]) -> str:
    """Return the arguments of a call with their defaults, without their types."""
    listed = inspect.signature(call).parameters.values()
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in listed if each.name != "self"]
    return str(inspect.Signature(plain))[1:-1]


@pytest.fixture(scope="module")
def status_table() -> ModuleType:
    return script("status_table")


def test_the_page_of_the_api_lists_what_there_is() -> None:
    """Calls with their defaults, settings with theirs, fields of results, errors called like their codes."""
    listed = re.findall(r"^- `(\w+)\((.*?)\)`:?", section("Calls"), re.MULTILINE)
    written = {name: said.replace("…", "lane=None, deadline=None") for name, said in listed}
    assert written == {name: arguments(getattr(Host, name)) for name in calls(Host)}
    assert calls(Host) - calls(SyncHost) == {"on_loop", "aclose"} and calls(SyncHost) - calls(Host) == {"call"}
    assert f"`open({arguments(SyncHost.open)})`" in APP
    settings = re.findall(r"^- `(\w+)` (.+?): ", section("HostConfig"), re.MULTILINE)
    assert dict(settings) == {
        each.name: repr(getattr(HostConfig(), each.name)).partition("(")[0] for each in dataclasses.fields(HostConfig)
    }
    for name, seconds in dataclasses.asdict(Windows()).items():
        assert f"`{name}` {seconds}" in section("HostConfig")
    for kind in (EmbedResult, RerankResult, Generation, Piece):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in section("Results"), field
    for error in SynapseError.__subclasses__():
        if error.__module__ == errors.__name__ and error is not errors.WorkerError:
            assert error.code.replace("_", "") == error.__name__.lower()


@pytest.mark.process
def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "minilm", model_id="minilm")
    write_bundle(tmp_path / "ms-marco", model_id="ms-marco", task="rerank")
    chat = {"chat_template": "{{ messages[0]['content'] }}", "frame": False}
    write_bundle(tmp_path / "smollm2", model_id="smollm2", task="generate", **chat)
    matrix = load(write_matrix(tmp_path))
    monkeypatch.setattr("synapse_host.host.load_matrix", lambda _: matrix)
    monkeypatch.setenv("SYNAPSE_MODELS_DIR", str(tmp_path))
    (example,) = re.findall(r"^```python\n(.*?)^```$", APP, re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    exec(example, found)
    assert len(found["scores"]) == 2


@pytest.mark.process
def test_the_smallest_engine_of_the_page_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "engines.md").read_text("utf-8")
    for kind, name in (("python", "mine.py"), ("yaml", "matrix.yaml")):
        (example,) = re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(example)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    with SyncHost.open(tmp_path / "matrix.yaml", {"toy": write_bundle(tmp_path / "toy", dims=384)}) as host:
        assert host.embed("toy", ["a", "b"]).sum(axis=1).tolist() == [1, 1]


def test_the_readme_says_what_the_documents_say(status_table: ModuleType) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    made = status_table.table(load(ROOT / "hw_matrix.yaml"), ROOT / "evidence")
    assert status_table.placed(text, made) == text, "make it anew: .venv/bin/python scripts/status_table.py --write"


def test_a_document_counts_as_what_its_measurements_say(status_table: ModuleType, tmp_path: Path) -> None:
    """One that passed, one that failed, one that was edited, and engines without any."""
    failed = msgspec.structs.replace(evidence("rerank"), repeat_differs=1)
    from synapse_host.certificates.verdict import judge

    for name, document in {"good": evidence("embed"), "failed": judge(failed), "edited": evidence("generate")}.items():
        documents.write(tmp_path / "llama-cpu-a-cpu-linux" / f"{name}.json", document)
    edited = tmp_path / "llama-cpu-a-cpu-linux" / "edited.json"
    plain = json.loads(edited.read_text())
    plain["reported"]["prefix_share"] = 0.5
    edited.write_text(json.dumps(plain))
    (tmp_path / "llama-cpu-a-cpu-linux" / "hardware.json").write_text("{}")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in status_table.table(load(), tmp_path).splitlines()
    ]
    verdicts = [row[3] for row in rows if row[0] == "llama-cpu"]
    assert sorted(verdicts) == ["certified", "refused", "uncertified"]
    others = {row[0]: row[3] for row in rows[2:] if row[0] != "llama-cpu"}
    assert set(others) == set(load().engines) - {"llama-cpu"} and set(others.values()) == {"not measured"}
