"""``synapse certify`` as people and jobs use it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from synapse_host.certificates.document import Gate
from synapse_host.cli import certify
from tests.cli.conftest import Command, Here
from tests.support.sabotage import embed_arrays, give_fixtures, rewrite
from tests.support.scripted import expected_vector

pytestmark = pytest.mark.process
N = 256


@pytest.fixture
def certifiable(cli: Command) -> Command:
    """The toy bundle with the scripted worker's own answers as its reference; it writes into the test's folder."""
    bundle = cli.root / "models" / "toy"
    rewrite(bundle, normalize=False)
    rows = [[2, 4 + n % 8, 4 + n // 8 % 8, 4 + n // 64, 3] for n in range(N)]
    give_fixtures(bundle, "embed", [None] * N, embed_arrays(rows, [expected_vector(row, 8) for row in rows]))
    return cli


CERTIFY = ("certify", "embed", "--model", "toy")
DIES = {"rules": [{"on": "EMBED_BATCH", "from": 40, "do": [{"abort": True}]}]}


def stored(cli: Command) -> list[Path]:
    return sorted((cli.root / "data" / "synapse" / "certificates").glob("*/*"))


def scripted(cli: Command, script: dict[str, Any] | None = None) -> Command:
    """Put a worker behind the lane whose script is a file: another script is another build, the same configuration."""
    file = cli.root / "script.json"
    file.write_text(json.dumps(script or {}))
    with cli.setup().bent_matrix() as matrix:
        matrix["engines"]["scripted"]["worker"]["command"][-1] = str(file)
    return cli


def test_certify_writes_evidence_report_and_certificate(certifiable: Command, here: Here) -> None:
    done = certifiable(*CERTIFY, "--json")
    assert done.code == 0, done.err + done.out
    document = done.document
    assert document["verdict"] == "certified"
    assert all({"name", "value", "threshold", "passed"} <= set(gate) for gate in document["gates"])
    evidence = Path(document["evidence"])
    assert Path(document["report"]).read_text().startswith("<!doctype html>")
    # One document, one truth: the certificate is the evidence.
    (certificate,) = stored(certifiable)
    assert str(certificate) == document["certificate"] and certificate.read_bytes() == evidence.read_bytes()
    # Nothing in the document names this machine's folders.
    assert str(certifiable.root) not in evidence.read_text()

    again = here("certify", "--recheck", str(evidence), "--json")
    assert (again.code, again.document["verdict"], again.document["problems"]) == (0, "certified", [])
    plain = json.loads(evidence.read_text())
    plain["gates"][0]["value"] = 9999
    evidence.write_text(json.dumps(plain))
    edited = here("certify", "--recheck", str(evidence), "--json")
    assert (edited.code, edited.document["verdict"]) == (1, "refused") and edited.document["problems"]
    assert "REFUSED" in here("certify", "--recheck", str(evidence)).out


def test_an_uncertified_lane_exits_1_and_loses_its_certificate(certifiable: Command, here: Here) -> None:
    """And what a person reads of one that is certified."""
    scripted(certifiable)
    done = here(*CERTIFY)
    rows = done.out.splitlines()
    assert rows[0].startswith("certifying embed · scripted · toy ") and rows[0].endswith(" 256/256 probes"), rows[0]
    assert "256 probes, the reference of the bundle's author · scripted on cpu" in rows[1]
    assert rows[2].startswith("  quality     min cosine           1.00       ≥ 0.999    pass"), rows[2]
    assert any(row.split() == ["non-finite", "0", "=", "0", "pass"] for row in rows)
    assert "placement   not required on this engine" in done.out
    assert rows[-3].startswith("PASS  ") and rows[-1].strip() == f"certificate: {stored(certifiable)[0]}"
    assert (done.code, done.err) == (0, "")
    scripted(certifiable, DIES)
    done = here(*CERTIFY, "--json")
    assert (done.code, done.document["verdict"], done.document["certificate"]) == (1, "uncertified", None)
    assert "engine_crashed" in done.document["reasons"]
    assert stored(certifiable) == []


def test_a_question_writes_a_report_and_changes_no_certificate(certifiable: Command, here: Here) -> None:
    """--min-placement-share asks what would be, whether it passes or fails; production keeps what it has."""
    asking = (*CERTIFY, "--min-placement-share", "0.5")
    scripted(certifiable)
    done = here(*asking)
    assert done.code == 0 and stored(certifiable) == [] and "this run asked another question" in done.out
    assert here(*CERTIFY).code == 0
    before = [file.read_bytes() for file in stored(certifiable)]
    scripted(certifiable, DIES)
    done = here(*asking, "--json")
    assert (done.code, done.document["verdict"], done.document["certificate"]) == (1, "uncertified", None)
    assert [file.read_bytes() for file in stored(certifiable)] == before != []


def test_a_certificate_that_no_host_takes_is_no_success(certifiable: Command, here: Here) -> None:
    """The worker passes every gate and doesn't say which version it is: nobody could notice another one."""
    with certifiable.bent_matrix() as matrix:
        engine = matrix["engines"]["scripted"]
        python, program, script = engine["worker"]["command"]
        silent = certifiable.root / "silent.sh"
        silent.write_text(
            f'case "$1" in --version) exit 1;; esac\nexec {python} {program} {shlex.quote(script)} "$@"\n'
        )
        engine["worker"]["command"] = ["/bin/sh", str(silent)]
    done = here(*CERTIFY)
    assert done.code == 1 and "FAIL  " in done.out
    assert "certificate: not valid: its worker doesn't say which engine and version it is" in " ".join(done.out.split())


def test_everything_that_runs_here_and_the_list_of_it(certifiable: Command, here: Here) -> None:
    scripted(certifiable).bundle("bare")
    done = here("certify", "--all", "--json")
    rows = {row["model"]: row for row in done.document["runs"]}
    assert (done.code, done.document["verdict"], set(rows)) == (1, "uncertified", {"toy", "bare"})
    assert rows["bare"]["reasons"][:2] == ["reference_fixture_missing", "reference_fixture"]
    assert rows["toy"]["verdict"] == "certified"
    file = Path(rows["toy"]["evidence"])
    assert file.name == "embed-toy.json" and file.parent.name.startswith("scripted-")
    assert file.parent.parent == Path("evidence") and file.stat().st_size < 200_000

    (row,) = here("certificates", "--json").document["certificates"]
    assert [row[key] for key in ("lane", "model", "engine", "valid", "why")] == ["embed", "toy", "scripted", True, None]
    assert 0 <= row["age_s"] < 300 and row["path"] == rows["toy"]["certificate"]
    assert row["reference"].startswith("the reference of the bundle's author: a test 1")
    assert here("certificates").out.startswith("valid  embed · scripted · toy · ")
    # What it stood on is another now: the list says so as the host would.
    scripted(certifiable, {"version": "scripted-2"})
    done = here("certificates")
    assert done.code == 0 and done.out.startswith("void ")
    assert "the engine version changed scripted-1 → scripted-2" in done.out
    assert "fix: synapse certify embed --model toy --engine scripted" in done.out
    # By another matrix it is of no use, and not to be removed: the one above still serves by it.
    with certifiable.bent_matrix() as matrix:
        matrix["engines"]["scripted"]["runtime_config"] = {"threads": "2"}
    (row,) = here("certificates", "--json").document["certificates"]
    assert not row["valid"] and "configures its engine otherwise" in row["why"] and row["fix"] is None


def test_without_a_model_or_an_engine_there_is_nothing_to_certify(cli: Command, here: Here) -> None:
    done = here("certify", "--all", "--models-dir", str(cli.root / "none"))
    assert done.code == 2 and "synapse models install" in done.err
    assert here("certificates").out.startswith("No lane is certified on this machine.")
    with cli.bent_matrix() as matrix:
        matrix["hardware"]["any"] = {"cpu_features": ["warp_drive"]}
    done = here("certify", "--all", "--json")
    assert (done.code, done.document) == (1, {"verdict": "uncertified", "runs": []})


@pytest.mark.parametrize(
    ("value", "comparison", "threshold", "shown"),
    [
        (0.998999999, ">=", 0.999, "0.99899 ≥ 0.999"), (0.9999965, ">=", 0.9999, "0.99999 ≥ 0.9999"),
        (1.0, ">=", 0.9, "1.00 ≥ 0.90"), (269.0, ">=", 256.0, "269 ≥ 256"), (0.0, "==", 0.0, "0 = 0"),
        (0.001001, "<=", 0.001, "0.00101 ≤ 0.001"), (1.37e-7, "<=", 0.001, "1.37e-07 ≤ 0.001"),
        (4.1, ">=", 1.5, "4.10 ≥ 1.5"), (None, ">=", 0.9, "none ≥ 0.90"),
    ],
)  # fmt: skip
def test_a_number_never_looks_better_than_it_is(
    value: float | None, comparison: Any, threshold: float, shown: str
) -> None:
    gate = Gate("min_cosine", "agreement", value, comparison, threshold, True)
    assert certify._placed(gate) == f"min cosine {shown}"
