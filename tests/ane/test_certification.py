"""Certification of a Neural Engine lane over real worker processes, and what its certificate then lets the host do.

The worker is the numpy evaluator. Its engine name gets past the handshake only because these tests replace what the
lane expects; no matrix key, variable or flag can.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.bundle import fixtures, manifest
from engines.bundle.digest import file_digest
from engines.bundle.manifest import Bundle, FileRef
from engines.protocol.messages import ANE_ENGINE
from synapse_host.certificates import binding, standing, verdict
from synapse_host.certificates import document as documents
from synapse_host.certificates.document import Evidence, Function, Placement
from synapse_host.certification.run import Order, certify
from synapse_host.config import HostConfig
from synapse_host.errors import SynapseError
from synapse_host.host import Host
from synapse_host.placement import assignment
from synapse_host.placement.matrix import load as load_matrix
from tests.ane.make_goldens import GOLDENS, rows
from tests.support.ane_bundle import prepared
from tests.support.certified import document, grant
from tests.support.evidence import REFERENCE, placement
from tests.support.mil_reference import ENGINE
from tests.support.sabotage import give_fixtures, rerank_arrays
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
    source = bundles("bert")
    folder = home / "bundle"
    shutil.copytree(source.root, folder)
    found = [row.tolist() for row in rows("bert")]
    ids, cu = fixtures.flatten(found)
    quantized, scale = fixtures.quantize(np.load(GOLDENS)["bert"])
    fixtures.write(
        folder / "fixtures.npz",
        task="embed",
        texts=[None] * len(found),
        computed_by=REFERENCE,
        arrays={"input_ids": ids, "cu_seqlens": cu, "vectors_q": quantized, "vectors_scale": scale},
    )
    reference = FileRef("fixtures.npz", f"sha256:{file_digest(folder / 'fixtures.npz')}")
    manifest.write(folder, msgspec.structs.replace(source.manifest, fixtures=reference, max_tokens=64))
    prepared(source, home / "cache" / "synapse")
    return manifest.read(folder)


@pytest.fixture(scope="module")
def matrix(home: Path) -> Path:
    """A lane whose worker command is the evaluator: as far as any configuration can go."""
    command = json.dumps([sys.executable, "-m", "tests.support.ane_worker"])
    path = home / "matrix.yaml"
    path.write_text(
        "version: 1\nhardware:\n  any: {}\nengines:\n"
        f"  ane: {{engine: ane, device: ane, format: coreml, requires: any, env: {{PYTHONPATH: {ROOT}}},\n"
        f"    worker: {{command: {command}}}}}\n"
        "lanes:\n  embed: {task: embed, engines: [ane]}\n"
    )
    return path


@pytest.fixture
def evaluator_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lanes expect the evaluator's name, and its ``--version`` say the engine's: what only a test can do."""
    ask = binding.version_line
    monkeypatch.setattr(binding, "version_line", lambda *a: ask(*a).replace(ENGINE, ANE_ENGINE))
    made = assignment._spec

    def expecting(*args: Any, **fields: Any) -> Any:
        return replace(made(*args, **fields), expected_engine=ENGINE)

    monkeypatch.setattr(assignment, "_spec", expecting)


def run(matrix: Path, toy: Bundle, home: Path) -> Evidence:
    order = Order(lane="embed", model="toy", bundle=toy.root)
    config = HostConfig(data_dir=home / "data")
    return asyncio.run(certify(order, load_matrix(matrix), config, plans=lambda lane: ([], [], "no framework here")))


@pytest.mark.timeout(300)
def test_ane_reference_can_not_be_chosen_and_ends_uncertified(matrix: Path, toy: Bundle, home: Path) -> None:
    evidence = run(matrix, toy, home)
    assert evidence.verdict == "uncertified" and "lane_refused" in evidence.reasons
    assert evidence.inputs is None and evidence.engine.expected == "ane-coreml-worker"
    with pytest.raises(SynapseError) as refused:
        asyncio.run(_one_row(matrix, toy, home))
    assert refused.value.code == "lane_refused"
    assert (refused.value.details["reason"], refused.value.details["observed"]) == ("engine", ENGINE)


async def _one_row(matrix: Path, toy: Bundle, home: Path) -> Any:
    config = HostConfig(data_dir=home / "none")
    async with Host.open(matrix, {"toy": toy.root}, config) as host:
        return await host.embed_ids("toy", [[5, 6, 7]])


@pytest.fixture(scope="module")
def evidence(matrix: Path, toy: Bundle, home: Path) -> Evidence:
    """One whole certification run on the evaluator."""
    patch = pytest.MonkeyPatch()
    made = assignment._spec
    patch.setattr(assignment, "_spec", lambda *a, **f: replace(made(*a, **f), expected_engine=ENGINE))
    patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    try:
        return run(matrix, toy, home)
    finally:
        patch.undo()


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
    assert verdict.qualified_widths(placed(evidence)) == [64]


def placed(evidence: Evidence, **packed: Any) -> Evidence:
    """The document as a Mac would have written it: every function on the Neural Engine but for its id look-up."""
    operations = {"conv": {"neuralEngine": 99}, "ios17.gather@token_embedding": {"cpu": 1}, "const": {"const": 200}}
    functions = [
        Function(name, "bucket", int(name[1:]), operations, {"neuralEngine": 0.99, "cpu": 0.01}, "0" * 64)
        for name in FUNCTIONS[:3]
    ]
    fields = {"operations": operations, "cost": {"neuralEngine": 0.99, "cpu": 0.01}} | packed
    functions.append(Function(name="packed64", kind="packed", tokens=64, ops_sha256="0" * 64, **fields))
    where = Placement(share=0.99, generation=1, functions=functions, cpu_allowed=["gather@token_embedding"])
    return msgspec.structs.replace(evidence, placement=where)


def certificate(evidence: Evidence, toy: Bundle, matrix: Path, data: Path, ms: float, **machine: Any) -> None:
    """Store the certificate that a Mac would have with this run's packing; every function costs *ms*."""
    where = placed(evidence).placement
    assert where is not None
    loaded = load_matrix(matrix)
    whole = document(
        loaded,
        "ane",
        toy,
        ane=True,
        placement=placement(functions=where.functions, cpu_allowed=where.cpu_allowed),
        packing=evidence.packing,
        cost_ms=dict.fromkeys(FUNCTIONS, ms),
    )
    assert verdict.qualified_widths(whole) == [64] and whole.verdict == "certified", whole.reasons
    whole = msgspec.structs.replace(whole, machine=msgspec.structs.replace(whole.machine, **machine))
    assert standing.settle(whole, loaded, data) is not None


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


@pytest.fixture(scope="module")
def judge(bundles: Callable[[str], Bundle], home: Path) -> Bundle:
    """The toy cross-encoder, with probes whose reference nobody computed: what its functions cost is asked here."""
    source = bundles("cross")
    folder = home / "judge"
    shutil.copytree(source.root, folder)
    pairs = rerank_arrays([[5, 6, 7], [8, 9]], [[10 + n, 11, 12, 13] for n in range(6)], [0, 0, 0, 1, 1, 1], [0.0] * 6)
    give_fixtures(folder, "rerank", [None] * 6, pairs)
    manifest.write(folder, msgspec.structs.replace(manifest.read(folder).manifest, max_tokens=64))
    prepared(source, home / "cache" / "synapse")
    return manifest.read(folder)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("evaluator_expected")
def test_a_reranker_s_functions_are_timed_and_a_slow_one_is_refused(
    judge: Bundle, matrix: Path, tmp_path: Path
) -> None:
    """What packing nothing has to do with: Core ML may put a reranker on the CPU as well (ane.md 4)."""
    config = HostConfig(data_dir=tmp_path)
    path = tmp_path / "matrix.yaml"
    path.write_text(matrix.read_text().replace("embed: {task: embed", "rerank: {task: rerank"))
    order = Order(lane="rerank", model="judge", bundle=judge.root)
    found = asyncio.run(certify(order, load_matrix(path), config, plans=lambda lane: ([], [], "no framework here")))
    assert found.fault is None and found.packing == []
    buckets = {function.name for function in judge.artifacts("coreml")[0].functions}  # type: ignore[union-attr]
    assert set(found.cost_ms) == buckets and all(ms > 0 for ms in found.cost_ms.values())

    async def one_pair() -> Any:
        async with Host.open(path, {"judge": judge.root}, config) as host:
            return await host.rerank_ids("judge", [5, 6], [[7, 8]])

    loaded = load_matrix(path)
    for ms, refused in ((1e5, False), (1e-6, True)):
        held = grant(loaded, "ane", judge, tmp_path, ane=True, cost_ms=dict.fromkeys(buckets, ms))
        assert verdict.qualified_widths(documents.read(held)[0]) == []
        if refused:
            with pytest.raises(SynapseError) as caught:
                asyncio.run(one_pair())
            assert caught.value.code == "invalid_placement" and "certified" in caught.value.message
        else:
            assert asyncio.run(one_pair()).shape == (1,)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("evaluator_expected")
def test_a_certificate_s_widths_serve_mixed_requests_over_the_socket(
    evidence: Evidence, toy: Bundle, matrix: Path, tmp_path: Path
) -> None:
    expected = np.load(GOLDENS)["bert"]
    plain, health = serve(matrix, toy, tmp_path / "without")
    assert health["packed_widths"] == [] and not health["resident_packed"], "no certificate, no packing"
    certificate(evidence, toy, matrix, tmp_path, 1e5)
    packed, health = serve(matrix, toy, tmp_path)
    assert health["packed_widths"] == [64] and list(health["resident_packed"].values()) == [[64]]
    for vectors in (plain, packed):
        assert (vectors.astype(np.float64) * expected).sum(1).min() >= 0.999
    assert (packed.astype(np.float64) * plain).sum(1).min() >= 0.9999
