"""Each fault fails its own gate and no other; thresholds come from the matrix and may be overridden per engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.ane import placement as ane_placement
from engines.ane.compute_plan import Device, Operation, PlanView
from engines.ane.compute_plan import Function as PlanFunction
from engines.ane.plan import counted
from synapse_host import figures, gates
from synapse_host.evidence import Fault, Function
from synapse_host.matrix import load
from tests.support.evidence import (
    INPUTS,
    N,
    embed_inputs,
    evidence,
    failed,
    failed_groups,
    fixture,
    function,
    generate_inputs,
    placement,
    rerank_inputs,
)


def changed(values: list[Any], index: int, value: Any) -> list[Any]:
    return [*values[:index], value, *values[index + 1 :]]


@pytest.mark.parametrize("task", ["embed", "rerank", "generate"])
def test_a_clean_run_is_certified(task: str) -> None:
    document = evidence(task)
    assert failed(document) == set()
    assert document.verdict == "certified"
    assert document.reasons == []


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_a_clean_neural_engine_run_is_certified(task: str) -> None:
    document = evidence(task, ane=True)
    assert failed(document) == set()
    assert document.verdict == "certified"


EMBED = embed_inputs()
SWAPPED = [0.2, 0.3, *[0.99999] * (N - 2)]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"cosine": changed(EMBED.cosine, 7, 0.9)}, {"min_cosine"}),
        ({"cosine": [0.9991] * N}, {"mean_cosine"}),
        ({"cosine": [0.998] * N}, {"min_cosine", "mean_cosine"}),
        ({"overlap": [0.5] * 26 + [1.0] * (N - 26)}, {"worst_decile"}),
        ({"norm": changed(EMBED.norm, 3, 1.01)}, {"norm_error"}),
        ({"cosine": changed(EMBED.cosine, 3, None)}, {"unmeasured"}),
        ({"batch_own": SWAPPED}, {"order"}),
        ({"permuted_own": SWAPPED}, {"order"}),
        ({"batch_own": [0.99] * N, "batch_best": [0.99] * N}, {"batch_single"}),
        ({"permuted_own": [0.99] * N, "permuted_best": [0.99] * N}, {"batch_single"}),
    ],
)
def test_embedding_faults(change: dict[str, Any], names: set[str]) -> None:
    document = evidence(inputs=embed_inputs(**change))
    assert failed(document) == names
    assert document.verdict == "uncertified"
    assert set(document.reasons) == names


def test_lengths_of_a_bundle_that_does_not_normalise_are_the_references_within_its_rounding() -> None:
    assert failed(evidence(inputs=embed_inputs(norm=[1.04] * N))) == {"norm_error"}
    assert failed(evidence(inputs=embed_inputs(norm=[1.04] * N, unit=False))) == set()
    assert failed(evidence(inputs=embed_inputs(norm=[1.06] * N, unit=False))) == {"length_error"}


RERANK = rerank_inputs()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"single": [score * 0.99 for score in RERANK.reference]}, set()),
        ({"single": changed(RERANK.single, 5, RERANK.reference[5] + 0.5)}, {"max_error"}),
        ({"batch": [score + 0.3 for score in RERANK.reference]}, {"batch_single"}),
        ({"single": changed(RERANK.single, 5, None)}, {"unmeasured"}),
        ({"batch": [*RERANK.batch[:13][::-1], *RERANK.batch[13:]]}, {"order"}),
        ({"permuted": [*RERANK.batch[:13][::-1], *RERANK.batch[13:]]}, {"order"}),
    ],
)
def test_reranking_faults(change: dict[str, Any], names: set[str]) -> None:
    inputs = rerank_inputs(**change)
    if "single" in change:
        inputs = msgspec.structs.replace(inputs, batch=inputs.single, permuted=inputs.single)
    document = evidence("rerank", inputs=inputs)
    assert failed(document) == names


def test_scores_without_relation_fail_every_agreement_gate() -> None:
    wrong = [-score for score in RERANK.reference]
    document = evidence("rerank", inputs=rerank_inputs(single=wrong, batch=wrong, permuted=wrong))
    assert failed(document) == {"pearson", "max_error", "rank_order"}
    assert failed_groups(document) == {"agreement"}


def test_an_order_that_changes_where_the_reference_is_clear() -> None:
    reference = [float(n % 13) / 8 for n in range(N)]  # 0.125 apart, more than max_error
    single = list(reference)
    single[4], single[5] = reference[4] + 0.07, reference[5] - 0.07
    document = evidence(
        "rerank", inputs=rerank_inputs(reference=reference, single=single, batch=single, permuted=single)
    )
    assert failed(document) == {"rank_order"}


GENERATE = generate_inputs()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"next": [-1] * 13 + GENERATE.next[13:]}, set()),
        ({"next": [-1] * 14 + GENERATE.next[14:]}, {"top1"}),
        ({"greedy": [[0]] * 5 + GENERATE.greedy[5:]}, set()),
        ({"greedy": [[0]] * 6 + GENERATE.greedy[6:]}, {"first_token"}),
        ({"greedy": [[]] * 6 + GENERATE.greedy[6:]}, {"first_token"}),
    ],
)
def test_generation_faults(change: dict[str, Any], names: set[str]) -> None:
    assert failed(evidence("generate", inputs=generate_inputs(**change))) == names


def test_a_stop_is_a_next_token_too() -> None:
    stop = [[n + 10, 2, 0, 0] for n in range(N)]
    clean = generate_inputs(
        reference=stop,
        greedy=[row[:1] for row in stop],
        next=[row[0] if n % 4 == 0 else -1 for n, row in enumerate(stop)],
    )
    clean = msgspec.structs.replace(clean, depth=[min(depth, 1) for depth in clean.depth])
    document = evidence("generate", inputs=clean)
    assert failed(document) == set()
    assert document.reported["prefix_share"] == 1.0
    missed = msgspec.structs.replace(clean, next=[6 if token < 0 else token for token in clean.next])
    assert failed(evidence("generate", inputs=missed)) == {"top1"}


@pytest.mark.parametrize("task", ["embed", "rerank", "generate"])
@pytest.mark.parametrize(
    ("change", "names", "group"),
    [
        ({"generations": [1, 2]}, {"worker_generations"}, "worker"),
        ({"generations": []}, {"worker_generations"}, "worker"),
        ({"repeat_differs": 3}, {"repeat"}, "batch"),
        ({"limits": []}, {"limits"}, "limits"),
        ({"fixture": fixture(stale_rows=2)}, {"reference_stale"}, "reference"),
        ({"fixture": fixture(digest="sha256:" + "0" * 64)}, {"reference_stale"}, "reference"),
    ],
)
def test_faults_of_the_run(task: str, change: dict[str, Any], names: set[str], group: str) -> None:
    document = evidence(task, **change)
    assert failed(document) == names
    assert failed_groups(document) == {group}


def test_an_edge_length_with_another_outcome_fails() -> None:
    clean = evidence()
    longer = [msgspec.structs.replace(c, outcome="ok") if c.name == "max + 1" else c for c in clean.limits]
    assert failed(evidence(limits=longer)) == {"limits"}
    shorter = [
        msgspec.structs.replace(c, outcome="inference_failed") if c.name == "length 1" else c for c in clean.limits
    ]
    assert failed(evidence(limits=shorter)) == {"limits"}


def test_without_fixtures_nothing_is_certified() -> None:
    document = evidence(fixture=None, inputs=None, tokens=[])
    assert document.verdict == "uncertified"
    assert document.reasons[0] == "reference_fixture_missing"


def test_a_run_without_measurements_is_never_certified() -> None:
    document = evidence(inputs=None)
    assert {"unmeasured", "min_cosine", "batch_single"} <= failed(document)
    assert document.verdict == "uncertified"


@pytest.mark.parametrize(
    "facts",
    [
        {"observed": "ane-reference"},
        {"observed": None},
        {"build_flags": {"device": "cuda"}},
        {"build_flags": {"device": "cpu", "backend": "cuda"}},
    ],
)
def test_another_engine_or_device_than_the_matrix_says(facts: dict[str, Any]) -> None:
    clean = evidence()
    document = evidence(engine=msgspec.structs.replace(clean.engine, **facts))
    assert failed(document) == {"identity"}
    assert failed_groups(document) == {"device"}


def test_a_refused_worker_fails_the_device_gate_and_a_lost_one_the_workers() -> None:
    facts = msgspec.structs.replace(evidence().engine, observed=None)
    nothing = {"inputs": None, "engine": facts, "generations": []}
    refused = evidence(fault=Fault("lane_refused", "no", "load"), **nothing)
    assert failed_groups(refused) == {"device"}
    lost = evidence(fault=Fault("engine_crashed", "dead", "singles"), **nothing)
    assert failed(lost) == {"fault"}
    assert "engine_crashed" in lost.reasons


# --- placement -------------------------------------------------------------------------------------------------------


def planned(ane: int) -> dict[str, Any]:
    """A synthetic plan with *ane* of 100 operations on the Neural Engine, and the worker's share of it."""
    operations = [Operation("ios17.conv", Device.ANE, 0.99 / ane) for _ in range(ane)]
    operations += [Operation("ios17.cast", Device.CPU, 0.01 / (100 - ane)) for _ in range(100 - ane)]
    operations += [Operation("const", Device.UNKNOWN) for _ in range(30)]
    plan = PlanView("program", {"main": PlanFunction(("input_ids",), tuple(operations))})
    told = Function(name="s128", kind="bucket", tokens=128, **counted(plan))
    share = ane_placement.share(plan)
    assert figures.share_of(told) == share
    return {"share": share, "functions": [told]}


@pytest.mark.parametrize("task", ["embed", "rerank"])
@pytest.mark.parametrize(("ane", "passed"), [(89, False), (90, True), (91, True)])
def test_a_recorded_plan_below_the_share_fails_and_above_it_passes(task: str, ane: int, passed: bool) -> None:
    document = evidence(task, ane=True, placement=placement(**planned(ane)))
    assert (document.verdict == "certified") == passed
    assert failed(document) == (set() if passed else {"placement_share", "function_share"})


CPU_HEAVY = {"ios17.matmul": {"neuralEngine": 95, "cpu": 1}, "const": {"const": 9}}
BLIND = {"ios17.conv": {"neuralEngine": 90, "unknown": 5}, "ios17.cast": {"cpu": 5}}
CROWDED = {"ios17.conv": {"neuralEngine": 400}, "ios17.cast": {"cpu": 17}}
ON_GPU = {"ios17.conv": {"neuralEngine": 99, "gpu": 1}}


@pytest.mark.parametrize("task", ["embed", "rerank"])
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"share": None}, {"placement_share"}),
        ({"generation": 2}, {"placement_share"}),
        ({"share": 0.85}, {"placement_share"}),
        ({"functions": []}, {"functions_unreported", "function_share", "cost_share"}),
        ({"functions": [function(), function("s256", operations={})]}, {"functions_unreported"}),
        ({"functions": [function(operations=BLIND)]}, {"functions_unreported", "function_share"}),
        ({"functions": [function(), function(ane=80, cpu=20)]}, {"function_share", "cpu_operations"}),
        ({"functions": [function(cost={"neuralEngine": 0.9, "cpu": 0.1})]}, {"cost_share"}),
        ({"functions": [function(cost={})]}, {"cost_share"}),
        ({"functions": [function(operations=CPU_HEAVY)]}, {"cpu_operations"}),
        ({"functions": [function(operations=CROWDED)]}, {"cpu_operations"}),
        ({"functions": [function(operations=ON_GPU)]}, {"cpu_operations"}),
        ({"forced_ms": [4.0] * 16}, {"speedup"}),
        ({"forced_ms": []}, {"speedup"}),
    ],
)
def test_placement_faults(task: str, change: dict[str, Any], names: set[str]) -> None:
    document = evidence(task, ane=True, placement=placement(**change))
    assert failed(document) == names
    assert failed_groups(document) == {"placement"}


def test_a_missing_share_says_so() -> None:
    assert "placement_unreported" in evidence(ane=True, placement=placement(share=None)).reasons
    assert "placement_unreported" in evidence(ane=True, placement=None).reasons


# --- precision classes and thresholds --------------------------------------------------------------------------------


def test_an_approximate_reranker_may_be_coarser_than_an_exact_one_but_not_in_a_batch() -> None:
    off = [score + (0.15 if n % 2 else -0.15) for n, score in enumerate(RERANK.reference)]
    loose = rerank_inputs(single=off, batch=off, permuted=off)
    assert failed(evidence("rerank", inputs=loose)) == {"max_error"}
    document = evidence("rerank", dtype="int8", inputs=loose)
    assert document.verdict == "certified"
    assert document.precision == "approximate"
    assert {"pearson", "top1"} <= {gate.name for gate in document.gates}
    moved = msgspec.structs.replace(loose, batch=[score + 0.01 for score in off])
    document = evidence("rerank", dtype="int8", inputs=moved)
    assert failed(document) == {"batch_single"}
    assert document.reported["batch_error"] == pytest.approx(0.01)
    best = [score if n % 13 else score + 20 for n, score in enumerate(off)]
    assert {"pearson", "top1"} <= failed(evidence("rerank", dtype="int8", inputs=rerank_inputs(single=best)))


def test_an_approximate_embedder_is_judged_by_its_neighbours() -> None:
    loose = embed_inputs(cosine=[0.98] * N)
    assert evidence(dtype="int8", inputs=loose).verdict == "certified"
    wrong = embed_inputs(neighbour=[0] * N)
    assert failed(evidence(dtype="int8", inputs=wrong)) == {"top1"}
    assert failed(evidence(dtype="int8", inputs=embed_inputs(neighbour_pearson=[0.9] * N))) == {"pearson"}


def test_thresholds_come_from_the_matrix_and_the_engine_overrides() -> None:
    matrix = load()
    found = gates.thresholds(matrix, engine="llama-cpu", task="embed", precision="exact", placement=False)
    assert found["min_cosine"] == 0.999
    assert "placement_share" not in found
    engine = msgspec.structs.replace(matrix.engines["llama-cpu"], thresholds={"embed": {"min_cosine": 0.9999}})
    strict = msgspec.structs.replace(matrix, engines={**matrix.engines, "llama-cpu": engine})
    found = gates.thresholds(strict, engine="llama-cpu", task="embed", precision="exact", placement=False)
    assert (found["min_cosine"], found["mean_cosine"]) == (0.9999, 0.9995)
    found = gates.thresholds(matrix, engine="ane", task="rerank", precision="exact", placement=True, share=0.97)
    assert (found["placement_share"], found["cost_share"], found["speedup"]) == (0.97, 0.98, 1.5)
    found = gates.thresholds(matrix, engine="nowhere", task="rerank", precision="approximate", placement=False)
    assert (found["approximate_pearson"], found["approximate_top1"]) == (0.995, 0.95)


def test_defaults_are_the_packaged_matrix() -> None:
    matrix = load()
    for name, bound in gates.BOUNDS.items():
        if bound.section is not None and bound.key is not None:
            assert matrix.thresholds[bound.section][bound.key] == bound.default, name


def test_weaker_thresholds_are_named() -> None:
    wanted = {"min_cosine": 0.999, "max_error": 0.1}
    assert gates.weaker({"min_cosine": 0.9999, "max_error": 0.05}, wanted) == []
    assert gates.weaker({"min_cosine": 0.9, "max_error": 0.1}, wanted) == ["min_cosine"]
    assert gates.weaker({"min_cosine": 0.999, "max_error": 0.2}, wanted) == ["max_error"]
    assert gates.weaker({}, wanted) == ["min_cosine", "max_error"]


@pytest.mark.parametrize("task", ["embed", "rerank", "generate"])
def test_a_missing_threshold_fails_its_gate(task: str) -> None:
    assert evidence(task, thresholds={}).verdict == "uncertified"


@pytest.mark.parametrize("task", list(INPUTS))
def test_speed_is_reported_and_never_gated(task: str) -> None:
    clean = evidence(task)
    slow = msgspec.structs.replace(clean.performance, single_ms=[1e6] * N, batch_s=1e6)
    document = evidence(task, performance=slow)
    assert document.verdict == "certified"
    assert document.reported["single_p50_ms"] == 1e6
    assert clean.reported["tokens_per_s"] == 6000
