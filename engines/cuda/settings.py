"""LOAD's ``runtime_config`` of the owned worker: strings in, checked values out (llama-cuda.md 6.2, 8.1). Pure.

Unknown keys are ignored, bad values are ``config_invalid``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from engines.machine import usable_cores
from engines.protocol.errors import EngineError, ErrorCode

PRECISION_VARIABLE: Final = "SYNAPSE_CUDA_PRECISION"
"""f16 or f32: HELLO names the numerics, so they are chosen before LOAD. f32 on the GPU is the oracle; the CPU has no
other."""


class Settings(Struct, frozen=True):
    """Checked LOAD settings. ``call_tokens`` 0: by device and model size; ``gpu_mem_limit_mb`` 0: no limit."""

    threads: Annotated[int, Meta(ge=1, le=1024)] = msgspec.field(default_factory=usable_cores)
    cuda_graphs: bool = True
    gpu_mem_limit_mb: Annotated[int, Meta(ge=0, le=2**30)] = 0
    warm: bool = True
    call_tokens: Annotated[int, Meta(ge=0, le=2**20)] = 0


def parse(config: Mapping[str, str], *, device: str, precision: str) -> Settings:
    """Return the settings of LOAD on *device* (``cpu``, ``cuda`` or ``cuda:N``) with HELLO's *precision*."""
    kind = device.partition(":")[0]
    backend = config.get("backend", kind).strip()
    if backend != kind or kind not in ("cpu", "cuda"):
        raise EngineError(ErrorCode.BACKEND_MISSING, f"backend_unavailable: no {backend} in this worker for {device}")
    if config.get("precision", precision) != precision:
        raise EngineError(
            ErrorCode.CONFIG_INVALID,
            f"precision {config['precision']!r}: this worker said {precision} at the handshake; "
            f"set {PRECISION_VARIABLE} in the engine's env of the matrix",
        )
    try:
        return msgspec.convert(dict(config), Settings, strict=False)
    except msgspec.ValidationError as exc:
        raise EngineError(ErrorCode.CONFIG_INVALID, f"runtime_config: {exc}") from exc
