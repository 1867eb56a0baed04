"""Certification of a Neural Engine lane over real worker processes, and what its certificate then lets the host do.

The worker is the numpy evaluator. Its engine name gets past the handshake only because these tests replace what the
lane expects; no matrix key, variable or flag can.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.bundle import manifest
from engines.bundle.manifest import Bundle
from engines.protocol.messages import ANE_ENGINE
from synapse_host.certificates import binding, verdict
from synapse_host.certificates import document as documents
from synapse_host.certificates.document import Evidence, Placement
from synapse_host.certification.run import Order, certify
from synapse_host.config import HostConfig
from synapse_host.errors import SynapseError
from synapse_host.host import Host
from synapse_host.placement import assignment
from synapse_host.placement.matrix import load as load_matrix
from tests.ane.make_goldens import GOLDENS, rows
from tests.support.ane_bundle import prepared
from tests.support.certified import grant
from tests.support.evidence import function, placement
from tests.support.mil_reference import ENGINE
from tests.support.sabotage import embed_arrays, give_fixtures, rerank_arrays, rewrite
from tests.support.small_bundle import write_matrix
from tests.support.worker_client import ROOT

pytestmark = pytest.mark.process
FUNCTIONS = ("s16", "s32", "s64", "packed64")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certification")


@pytest.fixture(autouse=True)
def private_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))


@pytest.fixture(scope="module")
def toy(bundles: Callable[[str], Bundle], home: Path) -> Bundle:
    """The toy encoder with the transformers goldens as its reference fixtures."""
    found = [row.tolist() for row in rows("bert")]
    return probed(bundles("bert"), home, "embed", len(found), embed_arrays(found, np.load(GOLDENS)["bert"]))


@pytest.fixture(scope="module")
def judge(bundles: Callable[[str], Bundle], home: Path) -> Bundle:
    """The toy cross-encoder, with probes whose reference nobody computed: what its functions cost is asked here."""
    pairs = rerank_arrays([[5, 6, 7], [8, 9]], [[10 + n, 11, 12, 13] for n in range(6)], [0, 0, 0, 1, 1, 1], [0.0] * 6)
    return probed(bundles("cross"), home, "rerank", 6, pairs)


def probed(source: Bundle, home: Path, task: str, count: int, arrays: dict[str, Any]) -> Bundle:
    """Copy a prepared bundle and give it fixtures."""
    folder = home / task
    shutil.copytree(source.root, folder)
    give_fixtures(folder, task, [None] * count, arrays)
    rewrite(folder, max_tokens=64)
    prepared(source, home / "cache" / "synapse")
    return manifest.read(folder)


@pytest.fixture(scope="module")
def matrix(home: Path) -> Path:
    """A matrix whose worker command is the evaluator: as far as any configuration can go."""
    worker = {"command": [sys.executable, "-m", "tests.support.ane_worker"]}
    return write_matrix(home, engine="ane", worker=worker, env={"PYTHONPATH": str(ROOT)})


def expecting_the_evaluator(patch: pytest.MonkeyPatch) -> None:
    """Let lanes expect the evaluator's name: what only a test can do."""
    made = assignment._spec
    patch.setattr(assignment, "_spec", lambda *a, **f: replace(made(*a, **f), expected_engine=ENGINE))


@pytest.fixture
def evaluator_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """And let its ``--version`` say the engine's name."""
    ask = binding.version_line
    monkeypatch.setattr(binding, "version_line", lambda *a: ask(*a).replace(ENGINE, ANE_ENGINE))
    expecting_the_evaluator(monkeypatch)


def run(matrix: Path, bundle: Bundle, home: Path) -> Evidence:
    task, config = bundle.manifest.task, HostConfig(data_dir=home / "data")
    order = Order(lane=task, model="toy", bundle=bundle.root)
    return asyncio.run(certify(order, load_matrix(matrix), config, plans=lambda lane: ([], [], "no framework here")))


async def ask(matrix: Path, bundle: Bundle, data: Path) -> Any:
    """Ask for one row, or one pair."""
    async with Host.open(matrix, {"toy": bundle.root}, HostConfig(data_dir=data)) as host:
        if bundle.manifest.task == "rerank":
            return await host.rerank_ids("toy", [5, 6], [[7, 8]])
        return await host.embed_ids("toy", [[5, 6, 7]])


@pytest.mark.timeout(300)
def test_ane_reference_can_not_be_chosen_and_ends_uncertified(matrix: Path, toy: Bundle, home: Path) -> None:
    evidence = run(matrix, toy, home)
    assert evidence.verdict == "uncertified" and "lane_refused" in evidence.reasons
    assert evidence.inputs is None and evidence.engine.expected == "ane-coreml-worker"
    with pytest.raises(SynapseError) as refused:
        asyncio.run(ask(matrix, toy, home / "none"))
    assert refused.value.code == "lane_refused"
    assert (refused.value.details["reason"], refused.value.details["observed"]) == ("engine", ENGINE)


@pytest.fixture(scope="module")
def evidence(matrix: Path, toy: Bundle, home: Path) -> Evidence:
    """One whole certification run on the evaluator."""
    with pytest.MonkeyPatch.context() as patch:
        expecting_the_evaluator(patch)
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        return run(matrix, toy, home)


@pytest.mark.timeout(300)
def test_with_good_numbers_and_no_share_the_evaluator_still_ends_uncertified(evidence: Evidence) -> None:
    passed = {gate.name: gate.passed for gate in evidence.gates}
    assert evidence.fault is None and evidence.generations == [1]
    assert passed["min_cosine"] and passed["batch_single"] and passed["order"] and passed["limits"]
    assert evidence.placement is not None and evidence.placement.share is None
    assert evidence.verdict == "uncertified" and "placement_unreported" in evidence.reasons
    assert not passed["placement_share"] and verdict.qualified_widths(evidence) == []


@pytest.mark.timeout(300)
def test_every_width_of_the_manifest_is_tried_and_packs(evidence: Evidence) -> None:
    """Certification starts the worker with all widths; rows are the same bits whatever lies beside them."""
    assert evidence.engine.packed_widths == [64]
    (packing,) = evidence.packing
    assert packing.reason is None and sum(map(len, packing.mixes)) >= 64 and len(packing.mixes) >= 8
    assert min(packing.cosine) >= 0.9999  # type: ignore[type-var]
    assert set(packing.alone) == {0.0} and set(packing.moved) == {0.0}
    assert set(evidence.cost_ms) == set(FUNCTIONS) and all(ms > 0 for ms in evidence.cost_ms.values())
    assert verdict.qualified_widths(msgspec.structs.replace(evidence, placement=placed())) == [64]


def placed() -> Placement:
    """Where a Mac would have run the toy: every function on the Neural Engine but for its id look-up."""
    operations = {"conv": {"neuralEngine": 99}, "ios17.gather@token_embedding": {"cpu": 1}, "const": {"const": 200}}
    functions = [function(name, operations=operations) for name in FUNCTIONS[:3]]
    functions.append(function("packed64", kind="packed", tokens=64, operations=operations))
    return placement(functions=functions, cpu_allowed=["gather@token_embedding"])


def serve(matrix: Path, toy: Bundle, data: Path) -> tuple[Any, dict[str, Any]]:
    found = [rows("bert")[n].tolist() for n in range(13)]

    async def main() -> tuple[Any, dict[str, Any]]:
        async with Host.open(matrix, {"toy": toy.root}, HostConfig(data_dir=data)) as host:
            vectors = await host.embed_ids("toy", found)
            health = await host.ping("toy")
            if health["packed_widths"]:
                # The first request runs on its rungs; behind it the width is admitted, for the next one.
                while not health["resident_packed"]:
                    health = await host.ping("toy")
                vectors = await host.embed_ids("toy", found)
            return vectors, health

    return asyncio.run(main())


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("evaluator_expected")
def test_a_reranker_s_functions_are_timed_and_a_slow_one_is_refused(
    judge: Bundle, matrix: Path, tmp_path: Path
) -> None:
    """What packing nothing has to do with: Core ML may put a reranker on the CPU as well (ane.md 4)."""
    found = run(matrix, judge, tmp_path)
    assert found.fault is None and found.packing == []
    buckets = {function.name for function in judge.artifacts("coreml")[0].functions}  # type: ignore[union-attr]
    assert set(found.cost_ms) == buckets and all(ms > 0 for ms in found.cost_ms.values())

    held = grant(load_matrix(matrix), "scripted", judge, tmp_path, ane=True, cost_ms=dict.fromkeys(buckets, 1e5))
    assert verdict.qualified_widths(documents.read(held)[0]) == []
    assert asyncio.run(ask(matrix, judge, tmp_path)).shape == (1,)
    grant(load_matrix(matrix), "scripted", judge, tmp_path, ane=True, cost_ms=dict.fromkeys(buckets, 1e-6))
    with pytest.raises(SynapseError) as caught:
        asyncio.run(ask(matrix, judge, tmp_path))
    assert caught.value.code == "invalid_placement" and "certified" in caught.value.message


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("evaluator_expected")
def test_a_certificate_s_widths_serve_mixed_requests_over_the_socket(
    evidence: Evidence, toy: Bundle, matrix: Path, tmp_path: Path
) -> None:
    expected = np.load(GOLDENS)["bert"]
    plain, health = serve(matrix, toy, tmp_path / "without")
    assert health["packed_widths"] == [] and not health["resident_packed"], "no certificate, no packing"
    measured = {"placement": placed(), "packing": evidence.packing, "cost_ms": dict.fromkeys(FUNCTIONS, 1e5)}
    grant(load_matrix(matrix), "scripted", toy, tmp_path, ane=True, **measured)
    packed, health = serve(matrix, toy, tmp_path)
    assert health["packed_widths"] == [64] and list(health["resident_packed"].values()) == [[64]]
    for vectors in (plain, packed):
        assert (vectors.astype(np.float64) * expected).sum(1).min() >= 0.999
    assert (packed.astype(np.float64) * plain).sum(1).min() >= 0.9999
