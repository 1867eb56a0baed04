"""The document: written whole, schema shipped, every edit of it found by a recheck."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

import synapse_host
from synapse_host import evidence as documents
from synapse_host.errors import InvalidRequest
from synapse_host.evidence import Evidence
from synapse_host.matrix import load
from synapse_host.recheck import Recheck, recheck
from tests.support.evidence import embed_inputs, evidence, placement

Change = Callable[[dict[str, Any]], object]
SCHEMA = Path(synapse_host.__file__).parent / documents.SCHEMA_NAME
MATRIX = load()
KINDS = {
    "embed": lambda: evidence("embed"),
    "rerank": lambda: evidence("rerank"),
    "generate": lambda: evidence("generate"),
    "ane": lambda: evidence("embed", ane=True),
    "int8": lambda: evidence("rerank", dtype="int8"),
}


def edited(tmp_path: Path, document: Evidence, change: Change, *, sign: bool) -> Recheck:
    """Write, edit the JSON, put a fitting digest where *sign* is set, recheck."""
    path = tmp_path / "e.json"
    documents.write(path, document)
    plain = json.loads(path.read_text())
    change(plain)
    if sign:
        plain["digest"] = documents.digest_of(plain)
    path.write_text(json.dumps(plain))
    return recheck(path, MATRIX)


def test_the_shipped_schema_is_the_code() -> None:
    assert json.loads(SCHEMA.read_text()) == documents.json_schema()


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_document_fits_the_schema_and_rechecks(kind: str, tmp_path: Path) -> None:
    document = KINDS[kind]()
    path = tmp_path / "deep" / "e.json"
    digest = documents.write(path, document)
    plain = json.loads(path.read_text())
    jsonschema.validate(plain, json.loads(SCHEMA.read_text()))
    assert plain["digest"] == digest == documents.digest_of(plain)
    assert [file.name for file in path.parent.iterdir()] == ["e.json"]
    found = recheck(path, MATRIX)
    assert (found.problems, found.certified) == ([], True)
    assert found.evidence.gates == document.gates


def test_an_honest_failure_rechecks_as_one(tmp_path: Path) -> None:
    found = edited(tmp_path, evidence(repeat_differs=1), lambda plain: None, sign=False)
    assert (found.problems, found.certified) == ([], False)


def claim(*names: str, **values: Any) -> Change:
    """Set fields of these gates (of all without names) and call the run certified."""

    def change(plain: dict[str, Any]) -> None:
        for gate in plain["gates"]:
            if gate["name"] in (names or {gate["name"]}):
                gate.update(values)
        if "threshold" in values:
            plain["thresholds"][names[0]] = values["threshold"]
        plain.update(verdict="certified", reasons=[])

    return change


def without_gates(plain: dict[str, Any], key: str, value: str) -> None:
    plain["gates"] = [gate for gate in plain["gates"] if gate[key] != value]
    claim()(plain)


def drop_probe(plain: dict[str, Any]) -> None:
    for series in plain["inputs"].values():
        if isinstance(series, list):
            del series[0]
    del plain["tokens"][0]


def remove_placement(plain: dict[str, Any]) -> None:
    plain["placement_required"], plain["placement"] = False, None
    without_gates(plain, "group", "placement")


BAD = embed_inputs(cosine=[0.9, *[0.99999] * 259])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda plain: plain.update(verdict="certified"), "verdict"),
        (claim(passed=True), "gates.min_cosine"),
        (claim("min_cosine", value=0.9999, passed=True), "gates.min_cosine"),
        (claim("min_cosine", threshold=0.5, passed=True), "thresholds.min_cosine"),
        (lambda plain: without_gates(plain, "name", "min_cosine"), "gates.min_cosine"),
        (lambda plain: plain["gates"].append(plain["gates"][-1]), "occurs twice"),
        (lambda plain: plain["thresholds"].pop("min_cosine"), "thresholds.min_cosine"),
        (drop_probe, "tokens"),
        (lambda plain: plain["inputs"]["batch_own"].pop(0), "inputs.batch_own"),
        (lambda plain: plain.update(precision="approximate"), "precision"),
        (lambda plain: plain["reported"].update(tokens_per_s=1.0), "reported"),
        (lambda plain: plain["model"].update(task="rerank"), "inputs"),
        (lambda plain: plain["fixture"].update(origin="project"), "fixture.origin"),
    ],
)
def test_every_edit_is_refused_even_with_a_fitting_digest(change: Change, word: str, tmp_path: Path) -> None:
    found = edited(tmp_path, evidence(inputs=BAD), change, sign=True)
    assert not found.certified
    assert any(word in problem for problem in found.problems), found.problems
    assert not any("digest" in problem for problem in found.problems)


LOWER_SHARE = claim("placement_share", "function_share", threshold=0.5, passed=True)


@pytest.mark.parametrize(
    ("change", "word"), [(remove_placement, "placement_required"), (LOWER_SHARE, "placement_share")]
)
def test_a_placement_gate_can_not_be_edited_away(change: Change, word: str, tmp_path: Path) -> None:
    found = edited(tmp_path, evidence(ane=True, placement=placement(share=0.6)), change, sign=True)
    assert not found.certified
    assert any(word in problem for problem in found.problems), found.problems


def test_a_share_asked_for_is_the_one_rechecked(tmp_path: Path) -> None:
    document = evidence(ane=True)
    relaxed = msgspec.structs.replace(document, thresholds={**document.thresholds, "placement_share": 0.8})
    from synapse_host.gates import judge

    path = tmp_path / "e.json"
    documents.write(path, judge(relaxed))
    assert recheck(path, MATRIX).problems
    assert recheck(path, MATRIX, share=0.8).certified


def test_any_other_edit_breaks_the_digest(tmp_path: Path) -> None:
    found = edited(tmp_path, evidence(), lambda plain: plain["machine"].update(cpu="another"), sign=False)
    assert not found.certified
    assert "digest" in found.problems[0]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": "synapse-evidence-v1"}', '{"a": NaN}', "\x00", "[" * 100_000]
)
def test_what_is_no_document_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"e\.json"):
        recheck(path, MATRIX)
    with pytest.raises(InvalidRequest, match="nowhere"):
        recheck(tmp_path / "nowhere", MATRIX)


def test_the_machine_profile_has_no_field_for_a_serial_number() -> None:
    names = set(documents.Machine.__struct_fields__)
    assert not {name for name in names if any(word in name for word in ("serial", "uuid", "host", "user", "mac"))}
