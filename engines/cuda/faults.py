"""What a native exception means. Text decides only where onnxruntime has no type (llama-cuda.md 8.2). Pure."""

from __future__ import annotations

import re
from typing import Final, NoReturn

from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.engine import DeviceLost

STICKY: Final = {
    "cudaErrorECCUncorrectable": 214,
    "cudaErrorNvlinkUncorrectable": 220,
    "cudaErrorContained": 226,
    "cudaErrorIllegalAddress": 700,
    "cudaErrorLaunchTimeout": 702,
    "cudaErrorAssert": 710,
    "cudaErrorHardwareStackError": 714,
    "cudaErrorIllegalInstruction": 715,
    "cudaErrorMisalignedAddress": 716,
    "cudaErrorInvalidAddressSpace": 717,
    "cudaErrorInvalidPc": 718,
    "cudaErrorLaunchFailure": 719,
    "cudaErrorTensorMemoryLeak": 721,
    "cudaErrorMpsClientTerminated": 810,
    "cudaErrorExternalDevice": 911,
    "cudaErrorUnknown": 999,
}
"""cudaError_t after which NVIDIA's reference has the process terminated; every later call would fail too.

Also uncorrectable memory and link errors and 999, after which nothing the device says can be believed. onnxruntime
writes some of them by name and some by number.
"""
OUT_OF_MEMORY: Final = 2
_STATUS: Final = re.compile(r"CUDA (?:failure|error) (\d+)")
_NAME: Final = re.compile(r"\bcudaError[A-Za-z]+")
_ALLOCATION: Final = (
    "Failed to allocate memory",  # the arena, when cudaMalloc refuses
    "is smaller than requested bytes",  # the arena, at gpu_mem_limit
    "CUBLAS_STATUS_ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
    "bad_alloc",
    "out of memory",
)
KEPT: Final[list[DeviceLost]] = []
"""Errors of a lost device, for the process's life: their tracebacks hold whatever the failed call was using.

Once launches were recorded, the destructor of an onnxruntime session aborts the process on a lost device. The worker
has to answer first and leave by ``os._exit``, so nothing may be destroyed meanwhile.
"""


def refuse(exc: Exception, *, creating: bool = False) -> NoReturn:
    """Raise ours for *exc*: oom, a lost device, backend_missing (*creating* a session) or inference_failed."""
    text = str(exc)
    status = {int(number) for number in _STATUS.findall(text)}
    line = text.strip().replace("\n", " ")[:600]
    if status & set(STICKY.values()) or STICKY.keys() & set(_NAME.findall(text)):
        lost = DeviceLost(ErrorCode.INFERENCE_FAILED, f"the CUDA context is lost: {line}")
        KEPT.append(lost)
        raise lost from exc
    if OUT_OF_MEMORY in status or any(words in text for words in _ALLOCATION):
        raise EngineError(ErrorCode.OOM, line) from exc
    raise EngineError(ErrorCode.BACKEND_MISSING if creating else ErrorCode.INFERENCE_FAILED, line) from exc
