"""The pages that scripts make: README's status table, and the Python API."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from synapse_host.certificates import document as documents
from synapse_host.config import HostConfig
from synapse_host.host import Host
from synapse_host.placement.matrix import load
from tests.support.evidence import evidence

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def status_table() -> ModuleType:
    return script("status_table")


def test_the_page_of_the_api_is_what_the_code_says() -> None:
    made = script("app_page").page()
    assert made == (ROOT / "docs" / "app.md").read_text("utf-8"), "make it anew: scripts/app_page.py --write"
    calls = {name for name, value in vars(Host).items() if callable(value) and not name.startswith("_")}
    for name in (*calls, *(f"`{each.name}`" for each in dataclasses.fields(HostConfig)), "`engine_crashed`", "`order`"):
        assert name in made


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
