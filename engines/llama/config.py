"""LOAD.runtime_config of the llama worker: strings in, checked values out, before any file is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NoReturn, TypeAlias, TypeVar

from engines.protocol.errors import EngineError, ErrorCode

U32_MAX: Final = 2**32 - 1
MAX_BATCH: Final = 2**20
"""Tokens beyond which a batch or chunk size is a mistake rather than a wish."""
MAX_THREADS: Final = 512
MAX_CONTEXTS: Final = 64

FlashAttention: TypeAlias = Literal["auto", "enabled", "disabled"]
ForwardPass: TypeAlias = Literal["auto", "encode", "decode"]
Choice = TypeVar("Choice", bound=str)

POOLING_IMPLEMENTATIONS: Final = ("manual",)
"""Pooling is ours, in float32: llama.cpp's own is silently wrong for causal models and mixed lengths (U5, U6)."""
FLASH_ATTENTIONS: Final[tuple[FlashAttention, ...]] = ("auto", "enabled", "disabled")
FORWARD_PASSES: Final[tuple[ForwardPass, ...]] = ("auto", "encode", "decode")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What LOAD may set; the keys are the field names, their values strings.

    ``threads`` is cut to the usable cores. ``contexts`` 0 means auto: as many as threads for a model below
    :data:`~engines.llama.model.SMALL_MODEL` parameters, else one.
    """

    threads: int
    ctx_size: int = 512
    """First size of the generation context, in tokens; it grows with the request."""
    batch_size: int = 4096
    """Most tokens of a prompt handed over in one native call."""
    ubatch_size: int = 1024
    """Prompt tokens computed at once."""
    gpu_layers: int = 0
    flash_attention: FlashAttention = "auto"
    forward_pass: ForwardPass = "auto"  # noqa: S105 - a pass over the model
    microllm_max_tokens: int = 512
    """Ceiling of GENERATE.max_tokens."""
    encode_chunk_tokens: int = 512
    """Most tokens of rows computed in one native call; cut further where the vocabulary is large."""
    contexts: int = 0


def parse(values: Mapping[str, str], *, backend: str, cores: int) -> LlamaConfig:
    """Return the checked configuration; unknown keys are ignored (protocol-v3, 3).

    Raises EngineError ``config_invalid`` for a bad value, ``backend_missing`` for another backend than *backend*.
    """
    for key in ("backend", "compiled_backend"):
        wanted = values.get(key)
        if wanted is None:
            continue
        if not wanted.strip():
            _bad(key, wanted, "a backend's name")
        if wanted.strip() != backend:
            raise EngineError(
                ErrorCode.BACKEND_MISSING,
                f"backend_unavailable: {key} is {wanted.strip()!r}, this worker runs on {backend!r}",
            )
    _choice(values, "pooling_implementation", POOLING_IMPLEMENTATIONS)
    threads = _integer(values, "threads", math.ceil(cores / 2), 1, MAX_THREADS)
    contexts = values.get("contexts", "auto").strip()
    return LlamaConfig(
        threads=min(threads, cores),
        ctx_size=_integer(values, "ctx_size", 512, 1, U32_MAX),
        batch_size=_integer(values, "batch_size", 4096, 1, MAX_BATCH),
        ubatch_size=_integer(values, "ubatch_size", 1024, 1, MAX_BATCH),
        gpu_layers=_integer(values, "gpu_layers", 0 if backend == "cpu" else 99, 0, U32_MAX),
        flash_attention=_choice(values, "flash_attention", FLASH_ATTENTIONS),
        forward_pass=_choice(values, "forward_pass", FORWARD_PASSES),
        microllm_max_tokens=_integer(values, "microllm_max_tokens", 512, 0, U32_MAX),
        encode_chunk_tokens=_integer(values, "encode_chunk_tokens", 512 if backend == "cpu" else 4096, 1, MAX_BATCH),
        contexts=0 if contexts == "auto" else _integer(values, "contexts", 0, 1, MAX_CONTEXTS),
    )


def _integer(values: Mapping[str, str], key: str, default: int, low: int, high: int) -> int:
    text = values.get(key)
    if text is None:
        return default
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and low <= int(digits) <= high):
        _bad(key, text, f"a whole number from {low} to {high}")
    return int(digits)


def _choice(values: Mapping[str, str], key: str, choices: tuple[Choice, ...]) -> Choice:
    """Return one of *choices*; the first is the default."""
    text = values.get(key)
    if text is None:
        return choices[0]
    for choice in choices:
        if choice == text.strip():
            return choice
    _bad(key, text, "one of " + ", ".join(choices))


def _bad(key: str, value: str, wanted: str) -> NoReturn:
    shown = value if len(value) <= 40 else value[:40] + "..."
    raise EngineError(ErrorCode.CONFIG_INVALID, f"runtime_config {key} is {shown!r}, it must be {wanted}")
