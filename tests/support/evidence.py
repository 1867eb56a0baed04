"""Evidence documents for tests, made of nothing but numbers: a clean one of each task, and changes to it."""

from __future__ import annotations

from typing import Any

import msgspec

from synapse_host import gates
from synapse_host.evidence import (
    Case,
    EmbedInputs,
    EngineFacts,
    Evidence,
    Fixture,
    Function,
    GenerateInputs,
    Machine,
    Model,
    Performance,
    Placement,
    RerankInputs,
)

DIGEST = "sha256:" + "a" * 64
N = 260


def embed_inputs(**changes: Any) -> EmbedInputs:
    clean = EmbedInputs(
        cosine=[0.99999] * N,
        norm=[1.0] * N,
        overlap=[1.0] * N,
        batch_own=[0.99999] * N,
        batch_best=[0.99999] * N,
        permuted_own=[0.99999] * N,
        permuted_best=[0.99999] * N,
        neighbour=[(n + 1) % N for n in range(N)],
        reference_neighbour=[(n + 1) % N for n in range(N)],
        neighbour_pearson=[0.9999] * N,
        unit=True,
    )
    return msgspec.structs.replace(clean, **changes)


def rerank_inputs(**changes: Any) -> RerankInputs:
    scores = [float(n % 13 - 6) for n in range(N)]
    clean = RerankInputs(
        query=[n // 13 for n in range(N)],
        reference=scores,
        single=[score + 0.001 for score in scores],
        batch=[score + 0.002 for score in scores],
        permuted=[score + 0.001 for score in scores],
        exchange=[n // 13 for n in range(N)],
    )
    return msgspec.structs.replace(clean, **changes)


def generate_inputs(**changes: Any) -> GenerateInputs:
    rows = [[n + 10, n + 11, n + 12, n + 13] for n in range(N)]
    clean = GenerateInputs(
        reference=rows,
        greedy=[list(row) for row in rows],
        depth=[n % 4 for n in range(N)],
        next=[rows[n][n % 4] for n in range(N)],
        stops=[2],
    )
    return msgspec.structs.replace(clean, **changes)


INPUTS = {"embed": embed_inputs, "rerank": rerank_inputs, "generate": generate_inputs}


def function(name: str = "s128", *, ane: int = 95, cpu: int = 5, **more: Any) -> Function:
    """A synthetic plan of 100 operations."""
    operations = {"ios17.conv": {"neuralEngine": ane}, "ios17.cast": {"cpu": cpu}, "const": {"const": 40}}
    fields = {
        "kind": "bucket",
        "tokens": 128,
        "operations": operations,
        "cost": {"neuralEngine": 0.99, "cpu": 0.01},
        "ops_sha256": "0" * 64,
    }
    return Function(name=name, **{**fields, **more})


def placement(**changes: Any) -> Placement:
    clean = Placement(
        share=0.95,
        generation=1,
        functions=[function(), function("s256", tokens=256)],
        cpu_allowed=["cast", "gather"],
        forced_ms=[9.0] * 16,
        native_ms=[3.0] * 16,
    )
    return msgspec.structs.replace(clean, **changes)


def bounds(task: str, *, ane: bool = False, approximate: bool = False) -> dict[str, float]:
    names = {
        "embed": ["norm_error", "min_cosine", "mean_cosine", "worst_decile", "batch_single"],
        "rerank": ["pearson", "max_error"],
        "generate": ["top1", "first_token"],
    }[task]
    names = ["reference_probes", *names]
    names += ["approximate_pearson", "approximate_top1"] if approximate else []
    names += ["placement_share", "cost_share", "speedup"] if ane else []
    return {name: gates.BOUNDS[name].default for name in names}


def evidence(task: str = "embed", *, ane: bool = False, dtype: str = "f16", **changes: Any) -> Evidence:
    """A clean, judged document; *ane* makes it a Neural Engine lane's with a synthetic plan."""
    device = "ane" if ane else "cpu"
    expected = "ane-coreml-worker" if ane else "llama.cpp-worker"
    precision = gates.precision_of(dtype)
    clean = Evidence(
        format="synapse-evidence-v1",
        created="2026-11-29T12:00:00+00:00",
        lane=task,
        software={"python": "3.11.7"},
        model=Model("toy", "toy", "bert", task, 8, 64, "b" * 64, DIGEST, "gguf", dtype),  # type: ignore[arg-type]
        engine=EngineFacts(
            id="ane" if ane else "llama-cpu",
            device=device,
            command=[],
            runtime_config={},
            packages={"llama-cpp-python": "0.3.36"},
            expected=expected,
            observed=expected,
            version="1",
            build_flags={"device": device},
        ),
        machine=Machine("linux", "6", "6.1", "x86_64", "a cpu", ["avx2"], 2, 2, None, 2**30),
        precision=precision,
        thresholds=bounds(task, ane=ane, approximate=precision == "approximate"),
        placement_required=ane,
        fixture=Fixture(DIGEST, DIGEST, "a reference", N, 0),
        tokens=[n % 60 + 3 for n in range(N)],
        generations=[1],
        limits=[
            Case(
                name,
                1,
                "sequence_too_long" if name == "max + 1" else "ok",
                "sequence_too_long" if name == "max + 1" else "ok",
            )
            for name in gates.CASES
        ],
        repeat_differs=0,
        performance=Performance([1.0 + n / 100 for n in range(N)], 9000, 1.5, 12.0, 60),
        gates=[],
        reported={},
        verdict="uncertified",
        reasons=[],
        inputs=INPUTS[task](),
        placement=placement() if ane else None,
    )
    return gates.judge(msgspec.structs.replace(clean, **changes))


def failed(document: Evidence) -> set[str]:
    """Names of the gates that failed."""
    return {gate.name for gate in document.gates if not gate.passed}


def failed_groups(document: Evidence) -> set[str]:
    """Groups in which a gate failed."""
    return {gate.group for gate in document.gates if not gate.passed}
