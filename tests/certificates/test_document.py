"""The document: written whole, and every edit of it found, by its digest or by judging it again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from engines.ane import compute_plan
from engines.bundle import manifest
from synapse_host.certificates import document as documents
from synapse_host.certificates import verdict
from synapse_host.certificates.document import Evidence
from synapse_host.certificates.recheck import CPU_ALLOWED, Recheck, recheck
from synapse_host.errors import InvalidRequest
from synapse_host.placement.matrix import load
from tests.support.certified import certified
from tests.support.evidence import KINDS, embed_inputs, evidence
from tests.support.small_bundle import write_bundle

Change = Callable[[dict[str, Any]], object]
MATRIX = load()


def edited(tmp_path: Path, document: Evidence, change: Change) -> Recheck:
    """Write, edit the JSON, put a fitting digest, recheck."""
    path = tmp_path / "e.json"
    documents.write(path, document)
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps({**plain, "digest": documents.digest_of(plain)}))
    return recheck(path, MATRIX)


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_document_fits_the_schema_and_rechecks(kind: str, tmp_path: Path) -> None:
    document = evidence(**KINDS[kind])
    path = tmp_path / "deep" / "e.json"
    documents.write(path, document)
    plain = json.loads(path.read_text())
    jsonschema.validate(plain, documents.json_schema())
    assert plain["digest"] == documents.digest_of(plain)
    assert [file.name for file in path.parent.iterdir()] == ["e.json"]
    found = recheck(path, MATRIX)
    assert (found.problems, found.certified) == ([], True)
    assert found.evidence.gates == document.gates


def test_an_honest_failure_rechecks_as_one(tmp_path: Path) -> None:
    found = edited(tmp_path, evidence(repeat_differs=1), lambda plain: None)
    assert (found.problems, found.certified) == ([], False)


def test_model_and_reference_are_those_of_the_bundle(tmp_path: Path) -> None:
    """A document is judged by the artifact that it names of the bundle, and by the reference that the bundle has."""
    path, document = tmp_path / "e.json", evidence()
    documents.write(path, document)
    bundle = manifest.read(write_bundle(tmp_path / "toy", model_id="toy"))
    first = bundle.manifest.artifacts[0]
    mine = msgspec.structs.replace(first, digest=document.model.artifact_digest, dtype="q8_0", path="mine.gguf")
    listed = msgspec.structs.replace(bundle.manifest, artifacts=[first, mine])
    found = recheck(path, MATRIX, bundle=msgspec.structs.replace(bundle, manifest=listed)).evidence
    assert found.model.dtype == "q8_0"
    assert [gate.name for gate in found.gates if not gate.passed and "reference" in gate.name] == ["reference_stale"]


# --- edits, each by its own word -------------------------------------------------------------------------------------


def claim(keep: Callable[[dict[str, Any]], bool] = lambda gate: True, **values: Any) -> Change:
    """Leave gates out, set fields of the others' and call the run certified."""

    def change(plain: dict[str, Any]) -> None:
        plain.update(
            gates=[{**gate, **values} for gate in plain["gates"] if keep(gate)], verdict="certified", reasons=[]
        )

    return change


def drop_probe(plain: dict[str, Any]) -> None:
    for series in plain["inputs"].values():
        if isinstance(series, list):
            del series[0]
    del plain["tokens"][0]


BAD = embed_inputs(cosine=[0.9, *[0.99999] * 259])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (claim(passed=True), "gates.min_cosine"),
        (claim(lambda gate: gate["name"] != "min_cosine"), "gates.min_cosine"),
        (lambda plain: plain["gates"].append(plain["gates"][-1]), "occurs twice"),
        (drop_probe, "tokens"),
        (lambda plain: plain["inputs"].update(cosine=[2.0] * 260), "inputs.cosine"),
        (lambda plain: plain["model"].update(task="rerank"), "inputs"),
    ],
)
def test_every_edit_is_refused_even_with_a_fitting_digest(change: Change, word: str, tmp_path: Path) -> None:
    found = edited(tmp_path, evidence(inputs=BAD), change)
    assert not found.certified and word in "; ".join(found.problems)


def test_the_list_of_operators_on_the_cpu_is_the_engine_s() -> None:
    assert compute_plan.CPU_ALLOWED == CPU_ALLOWED


def test_a_share_asked_for_is_the_one_rechecked(tmp_path: Path) -> None:
    document = evidence(ane=True)
    relaxed = msgspec.structs.replace(document, thresholds={**document.thresholds, "placement_share": 0.8})
    path = tmp_path / "e.json"
    documents.write(path, verdict.judge(relaxed))
    assert recheck(path, MATRIX).problems
    assert recheck(path, MATRIX, share=0.8).certified


# --- every field -----------------------------------------------------------------------------------------------------

DESCRIPTIVE = (
    "created", "software.python", "software.msgspec", "model.name", "engine.command", "engine.runtime_config.threads",
    "engine.build_flags", "engine.packed_widths", "engine.buckets", "machine.os_version", "machine.cpu_features",
    "machine.cores", "machine.cores_total", "machine.quota", "machine.ram_bytes", "fixture.computed_by", "tokens.0",
    "generations", "limits.0.tokens", "performance", "cost_ms", "placement.reason", "placement.functions.0.ops_sha256",
    "placement.functions.0.name", "placement.functions.0.tokens", "thresholds.length_error",
)  # fmt: skip
"""What nothing is judged by and nothing is bound to: only the digest shows that it was edited. Vectors of length 1 are
judged by ``norm_error``, so nobody asks for ``length_error``."""
MEASURED = ("inputs.", "placement.", "packing")
"""Who signs an edit here has forged a measurement; it counts as one, and what a gate makes of it must fit."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every field of a plain document; of a list itself and its first entry."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from leaves(value[0], (*path, 0))


def others(value: Any) -> Iterator[Any]:
    """Yield other values of a field's kind."""
    match value:
        case dict():
            yield {**value, "another": "1"}
        case list():
            yield value[:-1] if value else ["another"]
            if value:
                yield [*value, value[0]]
        case bool():
            yield not value
        case str():
            yield value + "x"
            yield ""
        case int() | float():
            yield value + 1
            yield value - 1
        case None:
            yield "x"
            yield 0.5


@pytest.mark.parametrize("kind", ["ane", "rerank", "generate"])
def test_any_edit_of_any_field_voids_a_certificate(kind: str, tmp_path: Path) -> None:
    case = certified(tmp_path, task="embed" if kind == "ane" else kind, on_ane=kind == "ane")
    plain = json.loads(case.path.read_text())
    survivors, edits = set(), 0
    for path, value in leaves(plain):
        for other in others(value):
            bent = copy.deepcopy(plain)
            place = bent
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = other
            name = ".".join(map(str, path))
            edits += 1
            digest = documents.digest_of(bent)
            if name == "digest":
                continue
            assert digest != plain["digest"], f"{name} edited"
            case.path.write_text(json.dumps({**bent, "digest": digest}))
            if not case.why():
                survivors.add(name)
    assert edits > 150
    case.path.write_text(json.dumps({**plain, "created": "today"}))
    assert "digest" in "; ".join(case.why())
    accepted = (name for name in survivors if not name.startswith(MEASURED))
    assert {
        name for name in accepted if not any(name == one or name.startswith(f"{one}.") for one in DESCRIPTIVE)
    } == set()


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"format": "synapse-evidence-v1"}', '{"a": NaN}', '{"a": 1e999}', "\x00", "[" * 100_000],
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
