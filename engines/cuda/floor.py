"""The hardware floor: what the CUDA lane needs of a machine, judged from plain facts.

Pure. The facts come from :func:`engines.cuda.binding.driver_facts`; the envelope and its codes from llama-cuda.md 6.1.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.engine import Probe

MIN_DRIVER_API: Final = 13000
"""onnxruntime-gpu 1.31 is built for CUDA 13.0; a 580 driver reports 13000."""
MIN_CAPABILITY: Final = (7, 5)
BUILT_FOR: Final = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
"""Machine code in onnxruntime-gpu 1.31.1 (llama-cuda.md 7.1). It carries no PTX, so nothing else can run it."""

NO_CODE: Final = "onnxruntime-sm_"
"""``cuda_runtime_missing:<this><architecture>``: nothing to install brings machine code for the device."""

LINUX: Final = (
    "nvidia/cu13/lib",
    ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10"),
    "libonnxruntime_providers_cuda.so",
)
"""Where pip's wheels keep the libraries; what the CUDA provider is linked against besides libcuda (it opens cuDNN and
cuFFT on demand, llama-cuda.md 7.1); the provider itself."""
WINDOWS: Final = (
    "nvidia/cu13/bin/x86_64",
    ("cudart64_13.dll", "cublasLt64_13.dll", "cublas64_13.dll", "curand64_10.dll"),
    "onnxruntime_providers_cuda.dll",
)


class Facts(Struct, frozen=True):
    """What the machine says. ``driver_api`` 0: no driver. ``missing``: file name of the first library not found."""

    driver_api: int = 0
    capability: tuple[int, int] | None = None
    missing: str | None = None
    device: str = ""


def _facts(driver_api: int, capability: tuple[int, int]) -> dict[str, object]:
    """Return a part of the envelope: ``required`` or ``observed``."""
    major, minor = capability
    return {"driver_api": driver_api, "compute_capability": {"major": major, "minor": minor}}


REQUIRED: Final = _facts(MIN_DRIVER_API, MIN_CAPABILITY)


def judge(facts: Facts) -> Probe:
    """Return the verdict. The driver is compared before the capability, and both before the libraries (6.1)."""
    observed: dict[str, object] | None = None
    if facts.driver_api and facts.capability is not None:
        observed = _facts(facts.driver_api, facts.capability)
    code = "ok"
    if not facts.driver_api and facts.missing is not None:
        code = f"cuda_runtime_missing:{facts.missing}"  # nothing to ask the driver with
    elif not facts.driver_api or (facts.capability is None and facts.driver_api >= MIN_DRIVER_API):
        code = "cuda_no_driver"
    elif facts.driver_api < MIN_DRIVER_API:
        code = "cuda_driver_too_old"
    elif facts.capability is not None and facts.capability < MIN_CAPABILITY:
        code = "cuda_compute_capability_too_low"
    elif facts.missing is not None:
        code = f"cuda_runtime_missing:{facts.missing}"
    elif facts.capability is not None and not runs_on(facts.capability):
        code = f"cuda_runtime_missing:{NO_CODE}" + "{}{}".format(*facts.capability)
    return Probe(status="ok" if code == "ok" else "refused", code=code, required=REQUIRED, observed=observed)


def skipped(missing: str | None) -> Probe:
    """Return the verdict of ``--device cpu``: no floor, only the runtime itself has to be installed."""
    code = "ok" if missing is None else f"cuda_runtime_missing:{missing}"
    return Probe(status="ok" if missing is None else "refused", code=code, required=REQUIRED, observed=None)


def runs_on(capability: tuple[int, int]) -> bool:
    """Tell whether the wheel has machine code for a device: same major version, minor not above the device's."""
    return any(major == capability[0] and minor <= capability[1] for major, minor in BUILT_FOR)


FIXES: Final = {
    "cuda_no_driver": "no NVIDIA driver or device was found (libcuda.so.1); install a driver of series 580 or later",
    "cuda_driver_too_old": "the NVIDIA driver is older than CUDA 13.0; install series 580 or later",
    "cuda_compute_capability_too_low": "the GPU is older than compute capability 7.5",
    "cuda_runtime_missing": "a library is missing; pip install 'synapse-workers[cuda,cuda-libraries]'",
    NO_CODE: "onnxruntime-gpu has no machine code for this GPU's architecture; use a GPU of compute capability "
    + ", ".join("{}.{}".format(*built) for built in BUILT_FOR)
    + " or a newer minor version of one of these, or an onnxruntime-gpu that was built for this one",
}


def refusal(probe: Probe) -> EngineError:
    """Return LOAD's typed refusal: upstream's word first, so that it stays searchable (8.2)."""
    word, _, missing = probe.code.partition(":")
    fix = FIXES[NO_CODE if missing.startswith(NO_CODE) else word]
    seen = f"; observed {probe.observed}" if probe.observed else ""
    return EngineError(ErrorCode.BACKEND_MISSING, f"{probe.code}: {fix}{seen}; this lane never runs on the CPU instead")
