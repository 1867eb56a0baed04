"""The hardware floor: every verdict of llama-cuda.md 6.1 from plain facts."""

from __future__ import annotations

import pytest

from engines.cuda import floor
from engines.cuda.floor import Facts
from engines.protocol.errors import ErrorCode

REQUIRED = {"driver_api": 13000, "compute_capability": {"major": 7, "minor": 5}}


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (Facts(13000, (7, 5)), "ok"),
        (Facts(13020, (9, 0)), "ok"),
        (Facts(13000, (12, 1)), "ok"),
        (Facts(), "cuda_no_driver"),
        (Facts(13000), "cuda_no_driver"),  # a driver without a device
        (Facts(12080), "cuda_driver_too_old"),
        (Facts(12080, (7, 0)), "cuda_driver_too_old"),  # the driver is compared before the capability
        (Facts(12080, (7, 5), "libcublas.so.13"), "cuda_driver_too_old"),
        (Facts(13000, (7, 0)), "cuda_compute_capability_too_low"),
        (Facts(13000, (7, 0), "libcublas.so.13"), "cuda_compute_capability_too_low"),
        (Facts(13000, (9, 0), "libcublas.so.13"), "cuda_runtime_missing:libcublas.so.13"),
        (Facts(missing="cuda-python"), "cuda_runtime_missing:cuda-python"),
        (Facts(13000, (10, 0)), "cuda_runtime_missing:onnxruntime-sm_100"),  # no machine code, no PTX
    ],
)
def test_verdicts(facts: Facts, code: str) -> None:
    probe = floor.judge(facts)
    assert (probe.code, probe.status) == (code, "ok" if code == "ok" else "refused")
    assert probe.required == REQUIRED
    if facts.driver_api and facts.capability:
        major, minor = facts.capability
        assert probe.observed == {
            "driver_api": facts.driver_api, "compute_capability": {"major": major, "minor": minor}
        }  # fmt: skip
    else:
        assert probe.observed is None


def test_only_devices_with_machine_code_run() -> None:
    assert all(map(floor.runs_on, [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0)]))
    assert not any(map(floor.runs_on, [(5, 2), (7, 2), (10, 0), (10, 3), (11, 0), (13, 0)]))


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        (Facts(), "install a driver"),
        (Facts(12080), "install series 580"),
        (Facts(13000, (6, 1)), "older than compute capability 7.5"),
        (Facts(13000, (9, 0), "libcurand.so.10"), "pip install"),
        (Facts(13000, (10, 0)), "compute capability 7.5, 8.0, 8.6, 8.9, 9.0, 12.0 or"),  # nothing to install brings it
    ],
)
def test_refusal_is_backend_missing_with_upstreams_word_first(facts: Facts, fix: str) -> None:
    probe = floor.judge(facts)
    error = floor.refusal(probe)
    assert error.code is ErrorCode.BACKEND_MISSING
    assert error.msg.startswith(f"{probe.code}: ") and "never runs on the CPU" in error.msg and fix in error.msg


def test_the_cpu_lane_skips_the_floor() -> None:
    assert (floor.skipped(None).status, floor.skipped(None).code) == ("ok", "ok")
    missing = floor.skipped("onnxruntime")
    assert (missing.status, missing.code) == ("refused", "cuda_runtime_missing:onnxruntime")
