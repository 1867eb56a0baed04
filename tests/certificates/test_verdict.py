"""Each fault in what was measured fails its own gates and no other; whatever is missing or absurd fails; thresholds
come from the matrix and may be overridden per engine."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synapse_host.certificates import figures, verdict
from synapse_host.certificates.document import Evidence, Fault, Packing
from synapse_host.placement.matrix import load
from tests.support.evidence import (
    INPUTS,
    KINDS,
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
from tests.support.sabotage import SABOTAGES


def changed(values: list[Any], index: int, value: Any) -> list[Any]:
    return [*values[:index], value, *values[index + 1 :]]


def bent(kind: str, change: dict[str, Any]) -> Evidence:
    """The clean document of a kind with some of its measurements changed, judged."""
    make = INPUTS[KINDS[kind]["task"]]
    inputs = {name: value for name, value in change.items() if name in make().__struct_fields__}
    if inputs:
        change = {name: value for name, value in change.items() if name not in inputs} | {"inputs": make(**inputs)}
    return evidence(**KINDS[kind], **change)


EMBED, RERANK, GENERATE = embed_inputs(), rerank_inputs(), generate_inputs()
SWAPPED = [0.2, 0.3, *[0.99999] * (N - 2)]
BATCHES = ("batch_own", "batch_best", "permuted_own", "permuted_best")
NONE, ONE = [None] * N, [0.99999, *[None] * (N - 1)]
REVERSED = [*RERANK.batch[:13][::-1], *RERANK.batch[13:]]
WRONG = [-score for score in RERANK.reference]
CLOSE = [float(n % 13) / 8 for n in range(N)]  # 0.125 apart, more than max_error
FLIPPED = [*CLOSE[:4], CLOSE[4] + 0.07, CLOSE[5] - 0.07, *CLOSE[6:]]


def scores(single: list[Any], **more: Any) -> dict[str, Any]:
    """The same answers alone and in both batches."""
    return {"single": single, "batch": single, "permuted": single, **more}


def facts(**changes: Any) -> Any:
    return msgspec.structs.replace(evidence().engine, **changes)


def outcome(name: str, came: str) -> Any:
    clean = evidence().limits
    return [msgspec.structs.replace(case, outcome=came, expected=came) if case.name == name else case for case in clean]


MEASUREMENTS = [
    ("embed", {"cosine": changed(EMBED.cosine, 7, 0.9)}, {"min_cosine"}),
    ("embed", {"cosine": [0.9991] * N}, {"mean_cosine"}),
    ("embed", {"cosine": [0.998] * N}, {"min_cosine", "mean_cosine"}),
    ("embed", {"overlap": [0.5] * 26 + [1.0] * (N - 26)}, {"worst_decile"}),
    ("embed", {"norm": changed(EMBED.norm, 3, 1.0009)}, set()),
    ("embed", {"norm": changed(EMBED.norm, 3, 1.0011)}, {"norm_error"}),
    ("embed", {"norm": [1.0499] * N, "unit": False}, set()),
    ("embed", {"norm": [1.0501] * N, "unit": False}, {"length_error"}),
    ("embed", {"permuted_norm": changed(EMBED.norm, 3, 1.0099)}, set()),
    ("embed", {"permuted_norm": changed(EMBED.norm, 3, 1.0101)}, {"batch_norm"}),
    ("embed", {"batch_own": SWAPPED}, {"order"}),
    ("embed", {"permuted_own": SWAPPED}, {"order"}),
    ("embed", {"batch_own": [0.99] * N, "batch_best": [0.99] * N}, {"batch_single"}),
    ("embed", {"permuted_own": [0.99] * N, "permuted_best": [0.99] * N}, {"batch_single"}),
    ("embed", {"reference_neighbour": [1] * 195 + EMBED.neighbour[195:]}, set()),
    ("embed", {"reference_neighbour": [1] * 196 + EMBED.neighbour[196:]}, {"reference_varied"}),
    # What was not measured: a null, every batch, all but one row of the batches, a series too short or too long.
    ("embed", {"cosine": changed(EMBED.cosine, 3, None)}, {"unmeasured"}),
    (
        "embed",
        dict.fromkeys((*BATCHES, "batch_norm", "permuted_norm"), NONE),
        {"unmeasured", "batch_single", "batch_norm"},
    ),
    ("embed", dict.fromkeys(BATCHES, ONE), {"unmeasured"}),
    ("embed", {"tokens": [5] * (N - 1)}, {"unmeasured", "min_cosine", "mean_cosine", "worst_decile", "norm_error",
                                        "batch_single", "batch_norm", "order", "reference_varied"}),
    ("rerank", {"batch": NONE, "permuted": NONE}, {"unmeasured", "batch_single"}),
    ("rerank", {"batch": [RERANK.batch[0], *NONE[1:]], "permuted": [RERANK.batch[0], *NONE[1:]]}, {"unmeasured"}),
    ("rerank int8", {"permuted": NONE}, {"unmeasured"}),
    ("rerank", scores(changed(RERANK.single, 5, None)), {"unmeasured"}),
    ("rerank", scores([score * 0.99 for score in RERANK.reference]), set()),
    ("rerank", scores(changed(RERANK.single, 5, RERANK.reference[5] + 0.5)), {"max_error"}),
    ("rerank", {"batch": [score + 0.3 for score in RERANK.reference]}, {"batch_single"}),
    ("rerank", {"batch": REVERSED}, {"order"}),
    ("rerank", {"permuted": REVERSED}, {"order"}),
    ("rerank", {"reference": [0.5] * N, **scores([0.5] * N)}, {"reference_varied", "pearson"}),
    ("rerank", {"exchange": [*range(26), *[99] * 234]}, set()),
    ("rerank", {"exchange": [*range(27), *[99] * 233]}, {"reference_company"}),
    ("rerank", scores(WRONG), {"pearson", "max_error", "rank_order"}),
    ("rerank", {"reference": CLOSE, **scores(FLIPPED)}, {"rank_order"}),
    ("generate", {"next": [-1] * 13 + GENERATE.next[13:]}, set()),
    ("generate", {"next": [-1] * 14 + GENERATE.next[14:]}, {"top1"}),
    ("generate", {"greedy": [[0]] * 5 + GENERATE.greedy[5:]}, set()),
    ("generate", {"greedy": [[0]] * 6 + GENERATE.greedy[6:]}, {"first_token"}),
    ("generate", {"greedy": [[]] * 6 + GENERATE.greedy[6:]}, {"first_token"}),
    ("generate", {"stops": list(range(10, N + 20))}, {"reference_varied", "top1"}),
    # The class of int8: coarser alone, not in a batch; the same space and the same scale as the model's.
    ("embed int8", {"cosine": [0.9501] * N}, set()),
    ("embed int8", {"cosine": [0.9499] * N}, {"mean_cosine"}),
    ("embed int8", {"neighbour": [0] * N}, {"top1"}),
    ("embed int8", {"neighbour_pearson": [0.9949] * N}, {"pearson"}),
    ("embed int8", {"batch_own": [0.99] * N, "batch_best": [0.99] * N}, {"batch_single"}),
    ("rerank int8", scores([s + (0.15 if n % 2 else -0.15) for n, s in enumerate(RERANK.reference)]), set()),
    ("rerank int8", scores([score * 1.149 for score in RERANK.reference]), set()),
    ("rerank int8", scores([score * 1.151 for score in RERANK.reference]), {"scale_error"}),
    ("rerank int8", scores([s if n % 13 else s + 20 for n, s in enumerate(RERANK.reference)]),
     {"pearson", "top1", "scale_error"}),
    ("rerank int8", {"batch": [score + 0.0009 for score in RERANK.single]}, set()),
    ("rerank int8", {"batch": [score + 0.0011 for score in RERANK.single]}, {"batch_single"}),
    ("rerank int8", {"batch": [0.0] * N}, {"batch_single", "order"}),
    ("rerank int8", {"batch": REVERSED}, {"order"}),
]  # fmt: skip
BLIND = {"ios17.conv": {"neuralEngine": 90, "unknown": 5}, "ios17.cast@mask_position": {"cpu": 5}}
CROWDED = {"ios17.conv": {"neuralEngine": 400}, "ios17.cast@mask_position": {"cpu": 17}}
ON_GPU = {"ios17.conv": {"neuralEngine": 99, "gpu": 1}}
CPU_HEAVY = {"ios17.matmul": {"neuralEngine": 95, "cpu": 1}, "const": {"const": 9}}
PLACEMENTS = [
    ({"share": None}, {"placement_share"}),
    ({"generation": 2}, {"placement_share"}),
    ({"share": 0.90}, set()),
    ({"share": 0.8999}, {"placement_share"}),
    ({"functions": [function(ane=90, cpu=10)]}, set()),
    ({"functions": [function(ane=89, cpu=11)]}, {"function_share"}),
    ({"forced_ms": [4.5] * 16}, set()),
    ({"share": 1.5}, {"placement_share"}),
    ({"functions": []}, {"functions_unreported", "function_share", "cost_share"}),
    ({"functions": [function(), function("s256", operations={})]}, {"functions_unreported", "function_share"}),
    ({"functions": [function(operations=BLIND)]}, {"functions_unreported", "function_share"}),
    ({"functions": [function(), function(ane=80, cpu=20)]}, {"function_share", "cpu_operations"}),
    ({"functions": [function(cost={"neuralEngine": 0.9, "cpu": 0.1})]}, {"cost_share"}),
    ({"functions": [function(cost={})]}, {"cost_share"}),
    ({"functions": [function(cost={"neuralEngine": 9.0, "cpu": -1.0})]}, {"cost_share"}),
    ({"functions": [function(operations=CPU_HEAVY)]}, {"cpu_operations"}),
    ({"functions": [function(operations=CROWDED)]}, {"cpu_operations"}),
    ({"functions": [function(operations=ON_GPU)]}, {"cpu_operations"}),
    ({"forced_ms": [4.0] * 16}, {"speedup"}),
    ({"forced_ms": []}, {"speedup"}),
    ({"native_ms": [3.0]}, {"speedup"}),
]


@pytest.mark.parametrize(("kind", "change", "names"), MEASUREMENTS)
@pytest.mark.report("microsoft/onnxruntime#32569")
@pytest.mark.report("microsoft/onnxruntime#9799")
def test_faults_of_what_was_measured(kind: str, change: dict[str, Any], names: set[str]) -> None:
    document = bent(kind, change)
    assert failed(document) == names
    assert set(document.reasons) == names
    assert (document.verdict == "certified") == (not names)


@pytest.mark.parametrize("kind", ["embed ane", "rerank ane"])
@pytest.mark.parametrize(("change", "names"), PLACEMENTS)
def test_faults_of_placement(kind: str, change: dict[str, Any], names: set[str]) -> None:
    document = bent(kind, {"placement": placement(**change)})
    assert failed(document) == names
    assert ("placement_unreported" in document.reasons) == ("share" in change and change["share"] is None)


OF_RUN = [
    ({"generations": [1, 2]}, {"worker_generations"}),
    ({"generations": []}, {"worker_generations"}),
    ({"repeat_differs": 3}, {"repeat"}),
    ({"repeat_differs": None}, {"repeat"}),
    ({"limits": []}, {"limits"}),
    # What the document says it expected is no excuse.
    ({"limits": outcome("max + 1", "ok")}, {"limits"}),
    ({"limits": outcome("length 1", "inference_failed")}, {"limits"}),
    ({"fixture": fixture(stale_rows=2)}, {"reference_stale"}),
    ({"fixture": fixture(digest="sha256:" + "0" * 64)}, {"reference_stale"}),
    ({"engine": facts(build_flags={})}, set()),
    ({"engine": facts(observed="ane-reference")}, {"identity"}),
    ({"engine": facts(observed=None)}, {"identity"}),
    ({"engine": facts(build_flags={"device": "cuda"})}, {"identity"}),
    ({"engine": facts(build_flags={"device": "cpu", "backend": "cuda"})}, {"identity"}),
    # A worker that names no device is no accelerator's.
    ({"engine": facts(build_flags={}, device="metal")}, {"identity"}),
    ({"fixture": fixture(distinct=234)}, set()),
    ({"fixture": fixture(distinct=233)}, {"reference_distinct"}),
    # Fewer probes than there are answers.
    ({"fixture": fixture(probes=256, distinct=256)}, {"unmeasured"}),
    ({"fixture": fixture(probes=255, distinct=255)}, {"unmeasured", "reference_fixture"}),
]


@pytest.mark.parametrize("task", INPUTS)
@pytest.mark.parametrize(("change", "names"), OF_RUN)
def test_faults_of_the_run(task: str, change: dict[str, Any], names: set[str]) -> None:
    assert failed(bent(task, change)) == names


@pytest.mark.parametrize(("task", "stage"), [(task, stage) for task in INPUTS for stage in figures.STAGES[task]])
def test_every_stage_counts_its_first_attempts(task: str, stage: str) -> None:
    counts = dict.fromkeys(figures.STAGES[task], 0)
    assert failed(bent(task, {"non_finite": {**counts, stage: 1}})) == {"non_finite"}
    del counts[stage]
    assert failed(bent(task, {"non_finite": counts})) == {"non_finite"}


def test_every_gate_has_a_fault_that_fails_it() -> None:
    planted = [names for _, _, names in MEASUREMENTS] + [names for _, names in [*PLACEMENTS, *OF_RUN]]
    planted += [sabotage.gates for sabotage in SABOTAGES.values()]
    assert {rule.name for rule in verdict.GATES} == set().union(*planted)


# --- any figure, any absurdity ---------------------------------------------------------------------------------------

ROWS = st.integers(0, N - 1)
ABSURD = st.sampled_from([None, math.inf, -math.inf, math.nan, 1e300, -7.5e30])


@settings(deadline=None)
@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_a_figure_that_is_missing_or_absurd_is_never_certified(kind: str, data: st.DataObject) -> None:
    """Any one number of any series: no value that it can't have leaves the verdict as it was."""
    clean = INPUTS[KINDS[kind]["task"]]()
    name, row, value = data.draw(st.sampled_from(list(figures.columns(clean)))), data.draw(ROWS), data.draw(ABSURD)
    plain = msgspec.to_builtins(clean)
    for series in (changed(plain[name], row, value), plain[name][:-1], plain[name][:1]):
        with suppress(msgspec.ValidationError):  # a document with this in it can't be read at all
            inputs = msgspec.convert({**plain, name: series}, type(clean))
            assert bent(kind, {"inputs": inputs}).verdict == "uncertified"


@pytest.mark.parametrize("task", INPUTS)
def test_no_series_is_recorded_that_no_gate_reads(task: str) -> None:
    """Wrong throughout, each of them costs the certificate; what was asked together is no measurement."""
    clean = INPUTS[task]()
    for name in {*figures.columns(clean)} - {"query"}:
        value = getattr(clean, name)
        wrong = list(range(N)) if name == "exchange" else [[1]] * N if isinstance(value[0], list) else [0] * N
        verdicts = [bent(kind, {name: wrong}).verdict for kind in KINDS if KINDS[kind]["task"] == task]
        assert "uncertified" in verdicts, name


@settings(deadline=None)
@given(task=st.sampled_from(list(INPUTS)), name=st.data(), value=ABSURD)
def test_a_threshold_that_is_missing_or_absurd_is_never_met(
    task: str, name: st.DataObject, value: float | None
) -> None:
    clean = evidence(task)
    key = name.draw(st.sampled_from(sorted({*clean.thresholds} - {"length_error"})))  # of another kind of bundle
    rest = {other: limit for other, limit in clean.thresholds.items() if other != key}
    assert evidence(task, thresholds=rest).verdict == "uncertified"
    if value is not None and not math.isnan(value):
        easier = verdict.weaker({**rest, key: value}, clean.thresholds)
        assert easier == [key] or evidence(task, thresholds={**rest, key: value}).verdict == "uncertified"


# --- stops, early ends, the handshake --------------------------------------------------------------------------------


def test_a_stop_is_a_next_token_too() -> None:
    reference = [[n + 10, 2, 0, 0] for n in range(N)]
    depth = [min(n % 4, 1) for n in range(N)]
    after = [figures.STOP if deep else row[0] for deep, row in zip(depth, reference, strict=True)]
    clean = generate_inputs(reference=reference, greedy=[row[:1] for row in reference], depth=depth, next=after)
    document = evidence("generate", inputs=clean)
    assert failed(document) == set()
    assert document.reported["prefix_share"] == 1.0
    missed = msgspec.structs.replace(clean, next=[6 if token == figures.STOP else token for token in clean.next])
    assert failed(evidence("generate", inputs=missed)) == {"top1"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_measurements_is_never_certified(kind: str) -> None:
    document = bent(kind, {"inputs": None})
    assert {"unmeasured", "reference_varied"} < failed(document)
    assert document.verdict == "uncertified"


def test_a_refused_worker_fails_the_device_gate_and_a_lost_one_the_workers() -> None:
    nothing = {"inputs": None, "engine": facts(observed=None), "generations": []}
    refused = evidence(fault=Fault("lane_refused", "no", "load"), **nothing)
    assert failed_groups(refused) == {"device"}
    lost = evidence(fault=Fault("engine_crashed", "dead", "singles"), **nothing)
    assert failed(lost) == {"fault"}
    assert "engine_crashed" in lost.reasons


# --- packed widths ---------------------------------------------------------------------------------------------------

MIXES = [[n + 1] * 8 for n in range(8)]
SHOWN = Packing(64, MIXES, [0.9999] * 64, [1e-3] * 64, [0.0] * 64)
CAST = {"ios17.cast@mask_position": {"cpu": 1}}


@pytest.mark.parametrize(
    ("trial", "where", "widths"),
    [
        ({}, {}, [64]),
        ({"cosine": changed(SHOWN.cosine, 9, 0.99989)}, {}, []),
        ({"cosine": changed(SHOWN.cosine, 9, None)}, {}, []),
        ({"alone": changed(SHOWN.alone, 9, 0.0011)}, {}, []),
        ({"moved": changed(SHOWN.moved, 9, 0.0011)}, {}, []),
        ({"reason": "engine_crashed: it died"}, {}, []),
        ({"mixes": [*MIXES[:7], MIXES[0]]}, {}, []),
        # 24 rows of 2 mixes prove nothing, nor do 63.
        ({"mixes": [[1] * 12, [2] * 12], "cosine": [1.0] * 24, "alone": [0.0] * 24, "moved": [0.0] * 24}, {}, []),
        ({"mixes": [*MIXES[:7], [8] * 7], "cosine": [1.0] * 63, "alone": [0.0] * 63, "moved": [0.0] * 63}, {}, []),
        ({"width": 128}, {}, []),
        ({}, {"kind": "bucket"}, []),
        ({}, {"operations": {"conv": {"neuralEngine": 98, "cpu": 1}, **CAST}}, []),
        ({}, {"operations": {"conv": {"unknown": 9, "neuralEngine": 1}}}, []),
        ({}, {"operations": {"conv": {"neuralEngine": 9}, "ios17.cast@mask_position": {"cpu": 2}}}, []),
        ({}, {"operations": {"conv": {"neuralEngine": 9}, **CAST}}, [64]),
        ({}, {"cost": {"neuralEngine": 0.9, "cpu": 0.1}}, []),
        ({}, {"cost": {}}, []),
    ],
)
def test_a_width_qualifies_only_with_everything_shown(
    trial: dict[str, Any], where: dict[str, Any], widths: list[int]
) -> None:
    packed = function("packed64", **{"kind": "packed", "tokens": 64, **where})
    document = evidence(
        ane=True,
        packing=[msgspec.structs.replace(SHOWN, **trial)],
        placement=placement(functions=[function(), packed]),
    )
    assert verdict.qualified_widths(document) == widths


def test_without_a_placement_nothing_packs_on_a_neural_engine() -> None:
    assert verdict.qualified_widths(evidence(ane=True, packing=[SHOWN], placement=None)) == []


# --- thresholds ------------------------------------------------------------------------------------------------------


def test_thresholds_come_from_the_matrix_and_the_engine_overrides() -> None:
    matrix = load()
    engine = matrix.engines["llama-cpu"]
    found = verdict.thresholds(matrix, engine, task="embed", dtype="f16")
    assert found["min_cosine"] == 0.999
    assert "placement_share" not in found
    engine = msgspec.structs.replace(engine, thresholds={"embed": {"min_cosine": 0.9999}})
    strict = msgspec.structs.replace(matrix, engines={**matrix.engines, "llama-cpu": engine})
    found = verdict.thresholds(strict, engine, task="embed", dtype="f16")
    assert (found["min_cosine"], found["mean_cosine"]) == (0.9999, 0.9995)
    found = verdict.thresholds(matrix, matrix.engines["ane"], task="rerank", dtype="f16", share=0.97)
    assert (found["placement_share"], found["cost_share"], found["speedup"]) == (0.97, 0.98, 1.5)
    found = verdict.thresholds(matrix, matrix.engines["onnx-cpu"], task="rerank", dtype="int8")
    assert (found["approximate_pearson"], found["approximate_top1"]) == (0.995, 0.95)
    assert "max_error" not in found


def test_defaults_are_the_packaged_matrix() -> None:
    matrix = load()
    for name, bound in verdict.BOUNDS.items():
        if bound.section is not None and bound.key is not None:
            assert matrix.thresholds[bound.section][bound.key] == bound.default, name


def test_speed_is_reported_and_never_gated() -> None:
    clean = evidence()
    slow = msgspec.structs.replace(clean.performance, single_ms=[1e6] * N, batch_s=1e6)
    document = evidence(performance=slow)
    assert document.verdict == "certified"
    assert document.reported["single_p50_ms"] == 1e6
    assert clean.reported["tokens_per_s"] == 6000
