"""The hardware floor: every verdict of llama-cuda.md 6.1 from plain facts."""

from __future__ import annotations

import pytest

from engines.cuda import floor
from engines.cuda.floor import Facts
from engines.protocol.errors import ErrorCode

OLD, LIBRARY = "install series 580", "pip install"


@pytest.mark.parametrize(
    ("facts", "code", "fix"),
    [
        (Facts(13000, (7, 5)), "ok", ""),
        (Facts(13020, (9, 0)), "ok", ""),
        (Facts(13000, (12, 1)), "ok", ""),
        (Facts(), "cuda_no_driver", "install a driver"),
        (Facts(13000), "cuda_no_driver", ""),  # a driver without a device
        (Facts(12080), "cuda_driver_too_old", OLD),
        (Facts(12080, (7, 0)), "cuda_driver_too_old", OLD),  # the driver is compared before the capability
        (Facts(12080, (7, 5), "libcublas.so.13"), "cuda_driver_too_old", OLD),
        (Facts(13000, (7, 0)), "cuda_compute_capability_too_low", "older than compute capability 7.5"),
        (Facts(13000, (7, 0), "libcublas.so.13"), "cuda_compute_capability_too_low", ""),
        (Facts(13000, (9, 0), "libcublas.so.13"), "cuda_runtime_missing:libcublas.so.13", LIBRARY),
        (Facts(missing="cuda-python"), "cuda_runtime_missing:cuda-python", LIBRARY),
        # No machine code and no PTX: nothing to install brings it.
        (Facts(13000, (10, 0)), "cuda_runtime_missing:onnxruntime-sm_100", "7.5, 8.0, 8.6, 8.9, 9.0, 12.0 or"),
    ],
)
def test_verdicts_and_what_a_refusal_says(facts: Facts, code: str, fix: str) -> None:
    probe = floor.judge(facts)
    assert (probe.code, probe.status) == (code, "ok" if code == "ok" else "refused")
    assert probe.required == {"driver_api": 13000, "compute_capability": {"major": 7, "minor": 5}}
    seen = None
    if facts.driver_api and facts.capability:
        major, minor = facts.capability
        seen = {"driver_api": facts.driver_api, "compute_capability": {"major": major, "minor": minor}}
    assert probe.observed == seen
    if code != "ok":
        error = floor.refusal(probe)
        assert error.code is ErrorCode.BACKEND_MISSING and error.msg.startswith(f"{code}: ")
        assert fix in error.msg and "never runs on the CPU" in error.msg


def test_only_devices_with_machine_code_run() -> None:
    assert all(map(floor.runs_on, [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0)]))
    assert not any(map(floor.runs_on, [(5, 2), (7, 2), (10, 0), (10, 3), (11, 0), (13, 0)]))


def test_the_cpu_lane_skips_the_floor() -> None:
    assert (floor.skipped(None).status, floor.skipped(None).code) == ("ok", "ok")
    missing = floor.skipped("onnxruntime")
    assert (missing.status, missing.code) == ("refused", "cuda_runtime_missing:onnxruntime")
