"""Out of memory, a device that is lost, NaN and small budgets: what the provider says and what the lane makes of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engines.cuda.faults import STICKY
from tests.cuda.cases import Case
from tests.rehearsal.conftest import Bundles, Rehearse, case
from tests.rehearsal.test_path import LEFT, served
from tests.support import toy_models

OOM, LOST = 2, STICKY["cudaErrorIllegalAddress"]
SMALL = {"cuda_graphs": "0", "warm": "0"}
"""No memory beyond the weights is asked for before the first request."""


def nothing_left(found: dict[str, Any]) -> None:
    left = {what: found["left"][what] for what in LEFT if found["left"][what]}
    assert not left and not found["left"]["violations"], (left, found["left"]["violations"])


@pytest.mark.parametrize(("function", "words"), [("cudaMalloc", "Failed to allocate memory"), ("gemm", "ALLOC_FAILED")])
def test_out_of_memory_in_a_forward_is_halved(function: str, words: str, bundles: Bundles, rehearse: Rehearse) -> None:
    """The arena refused by cudaMalloc, and cuBLAS without memory of its own; twice is the answer, in their words."""
    rows = case("bert-mean").rows() * 4
    steps: list[list[Any]] = [
        ["fault", function, 0, 1, OOM, 0], ["request", rows, "once"],
        ["fault", function, 0, 10**6, OOM, 0], ["request", rows * 16, "always"],
        ["heal"], ["request", rows, "after"], ["close"],
    ]  # fmt: skip
    found = rehearse(bundles("bert-mean"), [["request", [[5]], "tiny"], *steps], **SMALL)
    once = served(found["steps"]["once"])
    assert re.match("US+UDRWUDRW", once["order"]), "an upload, settled when its run failed; then two halves, alone"
    refused = found["steps"]["always"]
    assert (refused["ok"], refused["type"], refused["code"]) == (False, "EngineError", "oom"), refused
    assert words in refused["text"]
    served(found["steps"]["after"])
    served(found["steps"]["close"])
    nothing_left(found)


def test_the_limits_own_words_are_out_of_memory(bundles: Bundles, rehearse: Rehearse) -> None:
    """Beyond gpu_mem_limit_mb the arena says 'Available memory of … is smaller than requested bytes of …'."""
    few, many = case("bert-mean").rows()[:8], case("bert-mean").rows() * 16
    steps = [["request", few, "few"], ["request", [[7] * 128] * 6, "half"], ["request", many, "many"],
             ["request", few, "again"], ["close"]]  # fmt: skip
    found = rehearse(bundles("bert-mean"), steps, gpu_mem_limit_mb="1", **SMALL)
    served(found["steps"]["few"])
    refused = found["steps"]["many"]
    assert (refused["ok"], refused["code"]) == (False, "oom") and "is smaller than requested bytes" in refused["text"]
    served(found["steps"]["again"])
    nothing_left(found)


def test_a_load_that_fails_at_any_allocation_leaves_nothing(bundles: Bundles, rehearse: Rehearse) -> None:
    """Upload, second session, slots, warming, recording: oom, everything released, no cycle that keeps the sessions."""
    bundle = bundles("modernbert-mean")
    calls = rehearse(bundle, [["close"]], call_tokens="128")["steps"]["load"]["stats"]["calls"]
    for function, parts in (("cudaMalloc", 5), ("cudaHostAlloc", 2), ("cudaEventCreateWithFlags", 2)):
        count = calls[function]
        for skip in sorted({count * part // parts for part in range(parts)}):
            found = rehearse(bundle, [["fault", function, skip, 10**6, OOM, 0], ["load"]], call_tokens="128")
            load = found["steps"]["load"]
            assert (load["ok"], load.get("code")) == (False, "oom"), (function, skip, load)
            nothing_left(found)


@pytest.mark.parametrize(
    ("where", "graphs"),
    [("kernel", "0"), ("kernel", "1"), ("gemm", "0"), ("cudaEventSynchronize", "1"), ("cudaMemcpyAsync", "1")],
)
def test_a_lost_device_is_distinguished_from_a_failed_request(
    where: str, graphs: str, bundles: Bundles, rehearse: Rehearse
) -> None:
    """Names, numbers or 'CUBLAS failure 13': whatever the provider says, the lane asks the device itself."""
    steps = [["fault", where, 0, 1, LOST, 1], ["request", case("bert-mean").rows(), "asked"]]
    found = rehearse(bundles("bert-mean"), steps, cuda_graphs=graphs)
    asked = found["steps"]["asked"]
    assert (asked["ok"], asked["type"], asked["code"]) == (False, "DeviceLost", "inference_failed"), asked
    if where == "kernel" and graphs == "0":
        assert "while running" in asked["text"], "onnxruntime gives the error's name and the operator's"


def test_a_device_lost_meanwhile_outranks_the_requests_own_error(bundles: Bundles, rehearse: Rehearse) -> None:
    """The second bucket fails by itself; the first, still in flight, turns out to have lost the device."""
    rows = [[7] * 64] * 8
    counted = rehearse(bundles("bert-mean"), [["request", rows[:2], "one"]], call_tokens="128", cuda_graphs="0")
    products = counted["steps"]["one"]["stats"]["calls"]["gemm"]
    steps = [["fault", "gemm", products + 1, 1, 1, 0], ["fault", "cudaEventSynchronize", 0, 1, LOST, 1],
             ["request", rows, "asked"]]  # fmt: skip
    found = rehearse(bundles("bert-mean"), steps, call_tokens="128", cuda_graphs="0")
    asked = found["steps"]["asked"]
    assert (asked["ok"], asked["type"]) == (False, "DeviceLost"), asked


def test_an_error_that_does_not_stay_is_the_requests_alone(bundles: Bundles, rehearse: Rehearse) -> None:
    rows = case("bert-mean").rows()
    steps = [["fault", "gemm", 0, 1, 1, 0], ["request", rows, "asked"], ["request", rows, "after"], ["close"]]
    found = rehearse(bundles("bert-mean"), steps)
    asked = found["steps"]["asked"]
    assert (asked["ok"], asked["type"], asked["code"]) == (False, "EngineError", "inference_failed"), asked
    served(found["steps"]["after"])
    nothing_left(found)


def test_a_release_that_fails_keeps_nothing_else(bundles: Bundles, rehearse: Rehearse) -> None:
    steps = [["fault", "cudaFreeHost", 0, 1, 1, 0], ["close"]]
    found = rehearse(bundles("bert-mean"), steps)
    close = found["steps"]["close"]
    assert (close["ok"], close["code"]) == (False, "inference_failed"), close
    assert {what: found["left"][what] for what in LEFT if found["left"][what]} == {"pinned_blocks": 1}


@pytest.mark.parametrize(("name", "tokens"), [("bert-mean", "1"), ("qwen3-rerank", "7")])
def test_recorded_shapes_fit_whatever_the_call_budget(
    tokens: str, name: str, bundles: Bundles, rehearse: Rehearse
) -> None:
    steps = [["request", case(name).rows(), "asked"], ["close"]]
    found = rehearse(bundles(name), steps, call_tokens=tokens)
    for step in ("load", "asked", "close"):
        served(found["steps"][step])
    nothing_left(found)


def test_memory_full_of_nan_is_refused_at_load(bundles: Bundles, rehearse: Rehearse) -> None:
    """What a device that computes nothing answers; its weights are sound, so they aren't blamed."""
    found = rehearse(bundles("bert-mean"), [], settings={"CUDASHIM_FILL": "255"})
    load = found["steps"]["load"]
    assert (load["ok"], load["code"]) == (False, "nonfinite_output"), load
    nothing_left(found)


HEAVY = Case("heavy", toy_models.write_bert, options={"vocab": 60000, "max_positions": 128})


def test_weights_lie_on_the_device_once_and_share_one_limit(bundles: Bundles, rehearse: Rehearse) -> None:
    """BERT has two sessions: rows end to end, and padded ones that are recorded. Both read the same weights."""
    bundle, limit = bundles("heavy", HEAVY), 24
    weights = bundle.artifacts("safetensors-package")[0].bytes // 2  # stored as float32, loaded as float16
    found = rehearse(bundle, [["request", case("bert-mean").rows(), "asked"], ["close"]],
                     gpu_mem_limit_mb=str(limit), call_tokens="1024")  # fmt: skip
    load = served(found["steps"]["load"])
    assert len(found["sessions"]) == 2
    assert load["uploaded_bytes"] < 1.3 * weights, (load["uploaded_bytes"], weights)
    arenas = [int(session["options"]["gpu_mem_limit"]) for session in found["sessions"]]
    assert sum(arenas) < limit * 2**20 - 0.9 * weights, arenas
    staging = 2 * 2**20  # slots and recordings
    assert load["device_peak"] < limit * 2**20 + staging, load["device_peak"]
    served(found["steps"]["asked"])
    nothing_left(found)
    load = rehearse(bundle, [], gpu_mem_limit_mb="2")["steps"]["load"]
    assert (load["ok"], load["code"]) == (False, "oom") and "the weights alone take" in load["text"], load


def test_float32_calls_are_cut_by_their_attention_scores(bundles: Bundles, rehearse: Rehearse) -> None:
    """Standard operators write the scores out; by the token budget alone a call of long rows asks for tens of GiB."""
    options = {"layers": 1, "hidden": 64, "heads": 16, "kv_heads": 8, "vocab": 320, "max_positions": 4096}
    long = Case("long", toy_models.write_qwen3, options=options, vocab=320)
    found = rehearse(bundles("long", long), [["close"]], precision="f32", cuda_graphs="0")
    load = served(found["steps"]["load"])
    assert load["device_peak"] < 8 * 2**30, f"{load['device_peak'] / 2**30:.1f} GiB"
