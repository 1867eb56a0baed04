"""Evidence documents for tests, made of nothing but numbers: a clean one of each task, and changes to it."""

from __future__ import annotations

from typing import Any

import msgspec

from engines.bundle.fixtures import Reference
from synapse_host.certificates import figures, verdict
from synapse_host.certificates.document import (
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
from synapse_host.placement.matrix import load

DIGEST = "sha256:" + "a" * 64
MATRIX = load()
N = 260
REFERENCE = Reference("a test", "1", "float64", DIGEST, "f32")


def embed_inputs(**changes: Any) -> EmbedInputs:
    clean = EmbedInputs(
        cosine=[0.99999] * N,
        norm=[1.0] * N,
        overlap=[1.0] * N,
        batch_own=[0.99999] * N,
        batch_best=[0.99999] * N,
        permuted_own=[0.99999] * N,
        permuted_best=[0.99999] * N,
        batch_norm=[1.0] * N,
        permuted_norm=[1.0] * N,
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
        batch=[score + 0.0015 for score in scores],
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


def fixture(**changes: Any) -> Fixture:
    clean = Fixture(DIGEST, DIGEST, REFERENCE, N, 0, N, "bundle")
    return msgspec.structs.replace(clean, **changes)


INPUTS = {"embed": embed_inputs, "rerank": rerank_inputs, "generate": generate_inputs}
KINDS: dict[str, dict[str, Any]] = {
    "embed": {"task": "embed"},
    "rerank": {"task": "rerank"},
    "generate": {"task": "generate"},
    "embed int8": {"task": "embed", "dtype": "int8"},
    "rerank int8": {"task": "rerank", "dtype": "int8"},
    "embed ane": {"task": "embed", "ane": True},
    "rerank ane": {"task": "rerank", "ane": True},
}


def function(name: str = "s128", *, ane: int = 95, cpu: int = 5, **more: Any) -> Function:
    """A synthetic plan of 100 operations."""
    operations = {"ios17.conv": {"neuralEngine": ane}, "ios17.cast@mask_position": {"cpu": cpu}, "const": {"const": 40}}
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
        cpu_allowed=["cast@mask_position", "gather@token_embedding"],
        forced_ms=[9.0] * 16,
        native_ms=[3.0] * 16,
    )
    return msgspec.structs.replace(clean, **changes)


def bounds(task: str, *, ane: bool = False, dtype: str = "f16") -> dict[str, float]:
    return verdict.thresholds(MATRIX, MATRIX.engines["ane" if ane else "llama-cpu"], task=task, dtype=dtype)


def evidence(task: str = "embed", *, ane: bool = False, dtype: str = "f16", **changes: Any) -> Evidence:
    """A clean, judged document; *ane* makes it a Neural Engine lane's with a synthetic plan."""
    device = "ane" if ane else "cpu"
    expected = "ane-coreml-worker" if ane else "llama.cpp-worker"
    clean = Evidence(
        format="synapse-evidence-v1",
        created="2026-11-29T12:00:00+00:00",
        lane=task,
        software={"python": "3.11.7"},
        model=Model("toy", "toy", "bert", task, 8, 64, "b" * 64, DIGEST, "coreml" if ane else "gguf", dtype),  # type: ignore[arg-type]
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
        precision=verdict.precision_of(dtype),
        thresholds=bounds(task, ane=ane, dtype=dtype),
        placement_required=ane,
        fixture=fixture(),
        tokens=[n % 60 + 3 for n in range(N)],
        generations=[1],
        limits=[Case(name, 1, outcome, outcome) for name, outcome in figures.CASES.items()],
        repeat_differs=0,
        non_finite=dict.fromkeys(figures.STAGES[task], 0),
        performance=Performance([1.0 + n / 100 for n in range(N)], 9000, 1.5, 12.0, 60),
        gates=[],
        reported={},
        verdict="uncertified",
        reasons=[],
        inputs=INPUTS[task](),
        placement=placement() if ane else None,
    )
    return verdict.judge(msgspec.structs.replace(clean, **changes))


def failed(document: Evidence) -> set[str]:
    """Names of the gates that failed."""
    return {gate.name for gate in document.gates if not gate.passed}


def failed_groups(document: Evidence) -> set[str]:
    """Groups in which a gate failed."""
    return {gate.group for gate in document.gates if not gate.passed}
