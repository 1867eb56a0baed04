"""``synapse certify`` as people and jobs use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.support.sabotage import embed_arrays, give_fixtures, rewrite
from tests.support.scripted import expected_vector

pytestmark = pytest.mark.process
N = 256


@pytest.fixture
def certifiable(cli: Command) -> Command:
    """The toy bundle with the scripted worker's own answers as its reference; it writes into the test's folder."""
    cli.environment["XDG_DATA_HOME"] = str(cli.root / "data")
    bundle = cli.root / "models" / "toy"
    rewrite(bundle, normalize=False)
    rows = [[2, 4 + n % 8, 4 + n // 8 % 8, 4 + n // 64, 3] for n in range(N)]
    give_fixtures(bundle, "embed", [None] * N, embed_arrays(rows, [expected_vector(row, 8) for row in rows]))
    return cli


def out(cli: Command) -> str:
    return str(cli.root / "evidence")


def test_certify_writes_evidence_report_and_certificate(certifiable: Command) -> None:
    done = certifiable("certify", "embed", "--model", "toy", "--out", out(certifiable), "--json")
    assert done.code == 0, done.err + done.out
    document = done.document
    assert document["verdict"] == "certified"
    assert all({"name", "value", "threshold", "passed"} <= set(gate) for gate in document["gates"])
    evidence = Path(document["evidence"])
    assert evidence.exists()
    assert Path(document["report"]).read_text().startswith("<!doctype html>")
    certificates = list((certifiable.root / "data" / "synapse" / "certificates" / "scripted").iterdir())
    assert [json.loads(file.read_text())["engine_id"] for file in certificates] == ["scripted"]
    # Nothing in the document names this machine's folders.
    assert str(certifiable.root) not in evidence.read_text()

    again = certifiable("certify", "--recheck", str(evidence), "--json")
    assert (again.code, again.document["verdict"], again.document["problems"]) == (0, "certified", [])
    plain = json.loads(evidence.read_text())
    plain["gates"][0]["value"] = 9999
    evidence.write_text(json.dumps(plain))
    edited = certifiable("certify", "--recheck", str(evidence), "--json")
    assert (edited.code, edited.document["verdict"]) == (1, "refused")
    assert edited.document["problems"]
    assert "REFUSED" in certifiable("certify", "--recheck", str(evidence)).out


def test_the_page(certifiable: Command) -> None:
    done = certifiable("certify", "embed", "--model", "toy", "--out", out(certifiable))
    assert done.code == 0
    assert "min cosine" in done.out
    assert "PASS" in done.out
    assert "placement   not required on this engine" in done.out
    assert done.err == ""


def test_an_uncertified_lane_exits_1_and_loses_its_certificate(certifiable: Command) -> None:
    assert certifiable("certify", "embed", "--model", "toy", "--out", out(certifiable)).code == 0
    certifiable.setup({"rules": [{"on": "EMBED_BATCH", "from": 40, "do": [{"abort": True}]}]})
    done = certifiable("certify", "embed", "--model", "toy", "--out", out(certifiable), "--json")
    assert (done.code, done.document["verdict"]) == (1, "uncertified")
    assert "engine_crashed" in done.document["reasons"]
    assert not list((certifiable.root / "data" / "synapse" / "certificates" / "scripted").iterdir())


def test_a_bundle_without_fixtures(cli: Command) -> None:
    cli.environment["XDG_DATA_HOME"] = str(cli.root / "data")
    done = cli("certify", "embed", "--model", "toy", "--out", out(cli))
    assert done.code == 1
    assert "reference_fixture_missing" in done.out


def test_a_demanded_certificate_opens_the_lane(certifiable: Command) -> None:
    lanes = {"embed": {"task": "embed", "engines": ["scripted"], "require_certificate": True}}
    certifiable.setup(lanes=lanes)
    refused = certifiable("embed", "a", "--model", "toy", "--json")
    assert (refused.code, refused.document["error"]["code"]) == (3, "not_certified")
    assert certifiable("certify", "embed", "--model", "toy", "--out", out(certifiable)).code == 0
    assert certifiable("embed", "a", "--model", "toy").code == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["certify"], 2, "name a lane"),
        (["certify", "nowhere"], 2, "no lane 'nowhere'"),
        (["certify", "nowhere", "--model", "toy"], 2, "no lane 'nowhere'"),
        (["certify", "embed", "--model", "nowhere"], 2, "no model 'nowhere'"),
        (["certify", "embed", "--model", "toy", "--engine", "cuda"], 2, "no engine 'cuda'"),
        (["certify", "rerank", "--model", "toy"], 2, "no lane 'rerank' for toy"),
        (["certify", "embed", "--model", "toy", "--min-placement-share", "2"], 2, "0 to 1"),
        (["certify", "--recheck", "nowhere.json"], 2, "nowhere.json"),
        (["certify", "embed", "--recheck", "e.json"], 2, "not both"),
    ],
)
def test_bad_input(cli: Command, words: list[str], code: int, said: str) -> None:
    done = cli(*words)
    assert done.code == code
    assert said in done.err
    assert "Traceback" not in done.err
