"""Every family, precision and compute capability through LOAD, recordings, requests and the end, in one process.

The plain run takes both tasks of each family on one compute capability in float16, and one task in float32 and on the
oldest; everything else is marked soak and belongs to `make rehearse-cuda`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cuda.cases import SERVED
from tests.rehearsal.conftest import Bundles, Rehearse, case
from tests.support import toy_models

OLDEST, USUAL = "7.5", "9.0"
CAPABILITIES = (OLDEST, "8.0", "8.6", "8.9", USUAL, "12.0")
EMBED, RERANK = ("bert-mean", "modernbert-mean", "qwen3-last"), ("bert-rerank", "modernbert-rerank", "qwen3-rerank")
PLAIN = ("mpnet-mean", "gemma-mean")
"""Of standard operators in float16 too: they write the attention scores out."""
NAMES = (*EMBED, *RERANK, *PLAIN, "bert-cls", "modernbert-cls", "nomic-mean", "qwen2-last")
OURS = {"cudaMemcpyAsync pinned to device", "cudaMemcpyAsync device to pinned", "cudaMemcpyAsync device to device"}
"""The only copies of a request: one up and one down a submission; within the device a graph may copy."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
LEFT = ("device_blocks", "pinned_blocks", "events", "streams", "graphs_live")


def cells() -> list[Any]:
    quick = {(name, "f16", OLDEST) for name in EMBED} | {(name, "f16", USUAL) for name in (*EMBED, *RERANK)}
    quick |= {(name, "f32", USUAL) for name in EMBED} | {
        (name, "f16", USUAL) for name in (*PLAIN, "nomic-mean", "qwen2-last")
    }
    return [
        pytest.param(name, precision, cc, marks=() if (name, precision, cc) in quick else (pytest.mark.soak,))
        for cc in CAPABILITIES
        for name in NAMES
        for precision in ("f16", "f32")
    ]


def cost(stats: dict[str, Any]) -> None:
    """Check a request's order of calls: see cudashim_event."""
    order = stats["order"].replace("G", "")
    submissions = order.count("R")
    assert submissions and order.count("U") == order.count("D") == order.count("W") == submissions, order
    assert not order.replace("UDR", "").replace("W", ""), f"a copy of onnxruntime's own or a wait: {order}"
    body, in_flight = order.rstrip("W"), 0
    for call in body:
        in_flight += {"R": 1, "W": -1}.get(call, 0)
        # A wait before the second submission is queued would leave the device idle while the host prepares.
        assert call != "W" or in_flight == 1, f"the host waits before it has queued the next bucket: {order}"
    assert not any(stats["calls"].get(wait) for wait in WAITS), stats["calls"]
    assert {what for what in stats["notes"] if "cudaMem" in what} <= OURS, stats["notes"]
    assert "kernel on the default stream" not in stats["notes"]


def served(step: dict[str, Any]) -> dict[str, Any]:
    """Return a step's counters: it went well and broke no rule of the CUDA API."""
    assert step["ok"], step
    stats: dict[str, Any] = step["stats"]
    assert not stats["violations"], stats["violations"]
    return stats


@pytest.mark.parametrize(("name", "precision", "capability"), cells())
def test_a_cell(name: str, precision: str, capability: str, bundles: Bundles, rehearse: Rehearse) -> None:
    rows = case(name).rows() * 4
    steps = [["request", rows, "first"], ["request", rows, "second"], ["request", [rows[3]], "single"], ["close"]]
    found = rehearse(bundles(name), steps, precision=precision, settings={"CUDASHIM_CC": capability}, call_tokens="512")
    assert found["floor"] == "ok"
    assert found["sessions"]
    for session in found["sessions"]:
        assert set(session["nodes"]) == {"CUDAExecutionProvider"} and session["memcpy"] == 0, session
        assert session["options"]["use_tf32"] == session["options"]["enable_cudnn"] == "0", session
    loaded = served(found["steps"]["load"])
    assert loaded["captures"] == 16 and loaded["graph_launches"] >= 16
    assert loaded["recorded"]["kernels"] > 16 * 10 and loaded["recorded"]["host"] == 0
    if precision == "f16" and name not in PLAIN:
        # Neither writes the attention scores out: flash where there is machine code for it, else memory-efficient.
        kernel = "attention_kernel_batched_impl" if capability == OLDEST else "flash_fwd_kernel"
        assert any(kernel in name for name in loaded["kernels"]), sorted(loaded["kernels"])
    shape = [len(rows), 1 if case(name).task == "rerank" else 64]
    for step in ("first", "second"):
        cost(served(found["steps"][step]))
        assert found["steps"][step]["shape"] == shape
    order = found["steps"]["second"]["stats"]["order"]
    assert order.count("R") > 3, "several buckets, so that two are in flight"
    assert 0 < order.count("G") < order.count("R"), "recorded launches and ordinary ones"
    assert "cudaMalloc" not in found["steps"]["second"]["stats"]["calls"], "an equal request asks for no memory"
    single = served(found["steps"]["single"])
    cost(single)
    assert single["order"].count("G") == single["graph_launches"] == 1
    served(found["steps"]["close"])
    left = {what: found["left"][what] for what in LEFT if found["left"][what]}
    assert not left, f"left after close: {left}"


def test_the_environment_chooses_no_kernel(bundles: Bundles, rehearse: Rehearse) -> None:
    """onnxruntime's variables would change numbers unseen by the kernel revision: ``sdpa_kernel`` overrules them."""
    variables = {"ORT_DISABLE_FLASH_ATTENTION": "1", "ORT_ENABLE_CUDNN_FLASH_ATTENTION": "1"}
    found = rehearse(bundles("qwen3-last"), [["close"]], settings=variables, warm="0")
    assert any("flash_fwd_kernel" in name for name in served(found["steps"]["load"])["kernels"])


@pytest.mark.soak
@pytest.mark.parametrize("capability", [OLDEST, USUAL, CAPABILITIES[-1]])
@pytest.mark.parametrize("name", list(SERVED))
def test_served_widths(name: str, capability: str, bundles: Bundles, rehearse: Rehearse) -> None:
    """Grids and shared memory within the hardware's limits, and machine code for every kernel that is chosen.

    The served models' widths, heads and lengths, with few layers and a small vocabulary.
    """
    layers = 4 if name == "modernbert" else 2
    shape = replace(SERVED[name], vocab=1024, options={**SERVED[name].options, "layers": layers, "vocab": 1024})
    lengths = [n for n in (5, 17, 64, 100, 128, 400, 512, 1000, 8192) if n <= shape.options["max_positions"]]
    rows = toy_models.toy_rows(11, lengths * 2, shape.vocab)
    steps = [["request", rows, "first"], ["request", rows, "second"], ["close"]]
    found = rehearse(bundles(f"{shape.name}-shape", shape), steps, settings={"CUDASHIM_CC": capability})
    loaded = served(found["steps"]["load"])
    assert loaded["captures"] == 16 and loaded["device_peak"] < 24 * 2**30, loaded["device_peak"]
    for step in ("first", "second"):
        cost(served(found["steps"][step]))
    served(found["steps"]["close"])
    assert not any(found["left"][what] for what in LEFT)
