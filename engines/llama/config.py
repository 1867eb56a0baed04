"""LOAD.runtime_config of the llama worker: strings in, checked values out, before any file is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from engines.protocol.errors import EngineError, ErrorCode

FlashAttention: TypeAlias = Literal["auto", "enabled", "disabled"]
U32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Batch: TypeAlias = Annotated[int, Meta(ge=1, le=2**20)]  # more is a mistake rather than a wish
SHOWN: Final = 40


class LlamaConfig(Struct, frozen=True):
    """What LOAD may set; the keys are the field names, their values strings.

    Attributes:
        threads: cut to the usable cores.
        ctx_size: first size of the generation context, in tokens; it grows with the request.
        batch_size: most tokens of a prompt handed over in one native call.
        ubatch_size: prompt tokens computed at once.
        microllm_max_tokens: ceiling of GENERATE.max_tokens; by default the context is the limit.
        pooling_implementation: pooling is ours, in float32: llama.cpp's own is silently wrong for causal models and
            mixed lengths (U5, U6).
        encode_chunk_tokens: most tokens of rows computed in one native call; cut further for a narrow model and for a
            large vocabulary.
        contexts: 0 means auto: as many as threads for a model below :data:`~engines.llama.model.SMALL_MODEL`
            parameters, else one.
    """

    threads: Annotated[int, Meta(ge=1, le=512)]
    ctx_size: Annotated[int, Meta(ge=1, le=2**32 - 1)] = 512
    batch_size: Batch = 4096
    ubatch_size: Batch = 1024
    gpu_layers: U32 = 0
    flash_attention: FlashAttention = "auto"
    forward_pass: Literal["auto", "encode", "decode"] = "auto"  # noqa: S105 - a pass over the model
    microllm_max_tokens: U32 = 2**32 - 1
    pooling_implementation: Literal["manual"] = "manual"
    encode_chunk_tokens: Batch = 512
    contexts: Annotated[int, Meta(ge=1, le=64)] = 0


def parse(values: Mapping[str, str], *, backend: str, cores: int) -> LlamaConfig:
    """Return the checked configuration; unknown keys are ignored (protocol-v3, 3).

    Raises EngineError ``config_invalid`` for a bad value, ``backend_missing`` for another backend than *backend*.
    """
    given: dict[str, str | int] = {key: value.strip() for key, value in values.items()}
    for key in ("backend", "compiled_backend"):
        wanted = given.get(key, backend)
        if not wanted:
            raise EngineError(ErrorCode.CONFIG_INVALID, f"runtime_config {key} is blank, it must be a backend's name")
        if wanted != backend:
            raise EngineError(
                ErrorCode.BACKEND_MISSING,
                f"backend_unavailable: {key} is {wanted!r}, this worker runs on {backend!r}",
            )
    if given.get("contexts") == "auto":
        del given["contexts"]
    for field in msgspec.structs.fields(LlamaConfig):
        text = given.get(field.name)
        if text is not None and not isinstance(field.default, str) and not str(text).isdecimal():  # msgspec takes 1e2
            said = f"runtime_config {field.name} is {str(text)[:SHOWN]!r}, must be a whole number"
            raise EngineError(ErrorCode.CONFIG_INVALID, said)
    defaults = {"threads": math.ceil(cores / 2)}
    if backend != "cpu":
        defaults |= {"gpu_layers": 99, "encode_chunk_tokens": 4096}
    try:
        config = msgspec.convert(defaults | given, LlamaConfig, strict=False)
    except msgspec.ValidationError as exc:
        key = str(exc).rpartition("$.")[2].rstrip("`")
        shown = values[key][:SHOWN]
        raise EngineError(ErrorCode.CONFIG_INVALID, f"runtime_config {key} is {shown!r}: {exc}") from exc
    return msgspec.structs.replace(config, threads=min(config.threads, cores))
