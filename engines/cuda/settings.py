"""LOAD's ``runtime_config`` of the owned worker: strings in, checked values out (llama-cuda.md 6.2, 8.1). Pure.

Unknown keys are ignored, bad values are ``config_invalid``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from engines.machine import usable_cores
from engines.protocol.errors import EngineError, ErrorCode

CPU_CALL_TOKENS: Final = 256
"""Tokens a call on the CPU: small calls stay in the caches (models.md 7.5), and several run side by side."""
CPU_CALL_TOKENS_INT8: Final = 128
"""int8 has four more passes over a layer's values, so the caches matter more: 6 % on pairs of 128 tokens."""
CUDA_CALL_TOKENS: Final = 32768
CUDA_CALL_TOKENS_SMALL: Final = 65536
"""For models of at most 512 hidden units, such as MiniLM (8.3.2)."""

CUDA_SCORE_BYTES: Final = 2**30
"""Attention scores of a call where a graph writes them out (8.3.2); without it a float32 call asks for 88 GiB."""
PRECISION_VARIABLE: Final = "SYNAPSE_CUDA_PRECISION"
"""f16 or f32: HELLO names the numerics, so they are chosen before LOAD. f32 on the GPU is the oracle; the CPU has no
other."""


class Settings(Struct, frozen=True):
    """Checked LOAD settings. ``call_tokens`` 0: by device and model size; ``attention`` auto: by device and family."""

    threads: int
    cuda_graphs: bool = True
    gpu_mem_limit_mb: int = 0
    bucket_policy: str = "v2"
    warm: bool = True
    call_tokens: int = 0
    attention: Literal["auto", "plain", "fused"] = "auto"


def parse(config: Mapping[str, str], *, device: str, precision: str) -> Settings:
    """Return the settings of LOAD on *device* (``cpu``, ``cuda`` or ``cuda:N``) with HELLO's *precision*."""
    kind = device.partition(":")[0]
    backend = config.get("backend", kind).strip()
    if backend != kind:
        raise EngineError(
            ErrorCode.BACKEND_MISSING, f"backend_unavailable: this worker runs on {kind}, not {backend!r}"
        )
    if config.get("precision", precision) != precision:
        raise EngineError(
            ErrorCode.CONFIG_INVALID,
            f"precision {config['precision']!r}: this worker said {precision} at the handshake; "
            "set SYNAPSE_CUDA_PRECISION in the engine's env of the matrix",
        )
    attention = config.get("attention", "auto")
    if attention not in ("auto", "plain", "fused") or (attention == "fused" and kind == "cpu"):
        raise EngineError(ErrorCode.CONFIG_INVALID, f"attention {attention!r} must be auto, plain or (cuda) fused")
    policy = config.get("bucket_policy", "v2")
    if policy not in ("v1", "v2"):
        raise EngineError(ErrorCode.CONFIG_INVALID, f"bucket_policy {policy!r} must be v1 or v2")
    return Settings(
        threads=_number(config, "threads", usable_cores(), low=1, high=1024),
        cuda_graphs=_flag(config, "cuda_graphs", True),
        gpu_mem_limit_mb=_number(config, "gpu_mem_limit_mb", 0, low=0, high=2**30),
        bucket_policy=policy,
        warm=_flag(config, "warm", True),
        call_tokens=_number(config, "call_tokens", 0, low=0, high=2**20),
        attention=attention,  # type: ignore[arg-type]  # checked above
    )


def _number(config: Mapping[str, str], key: str, default: int, *, low: int, high: int) -> int:
    text = config.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or not low <= int(text) <= high:
        raise EngineError(ErrorCode.CONFIG_INVALID, f"{key} {text!r} must be a whole number from {low} to {high}")
    return int(text)


def _flag(config: Mapping[str, str], key: str, default: bool) -> bool:
    text = config.get(key)
    if text is None:
        return default
    if text not in ("1", "true", "0", "false"):
        raise EngineError(ErrorCode.CONFIG_INVALID, f"{key} {text!r} must be 1, true, 0 or false")
    return text in ("1", "true")
