"""What a native exception means. Text decides only where onnxruntime has no type (llama-cuda.md 8.2). Pure."""

from __future__ import annotations

import re
from typing import Final, NoReturn

from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.engine import DeviceLost

STICKY: Final = frozenset({700, *range(714, 720)})
"""cudaError_t: illegal address and launch faults; every later call in this process would fail too."""
OUT_OF_MEMORY: Final = 2
_STATUS: Final = re.compile(r"CUDA (?:failure|error) (\d+)")
_ALLOCATION: Final = ("Failed to allocate memory", "bad_alloc", "out of memory")


def refuse(exc: Exception, *, creating: bool = False) -> NoReturn:
    """Raise ours for *exc*: oom, a lost device, backend_missing (*creating* a session) or inference_failed."""
    text = str(exc)
    status = {int(number) for number in _STATUS.findall(text)}
    line = text.strip().replace("\n", " ")[:600]
    if status & STICKY:
        raise DeviceLost(ErrorCode.INFERENCE_FAILED, f"the CUDA context is lost: {line}") from exc
    if OUT_OF_MEMORY in status or any(words in text for words in _ALLOCATION):
        raise EngineError(ErrorCode.OOM, line) from exc
    raise EngineError(ErrorCode.BACKEND_MISSING if creating else ErrorCode.INFERENCE_FAILED, line) from exc
