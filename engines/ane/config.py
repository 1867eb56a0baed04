"""LOAD's ``runtime_config``: string to string; unknown keys are ignored, bad values are ``config_invalid``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from engines.protocol.errors import EngineError, ErrorCode


class Settings(Struct, frozen=True):
    """What LOAD may choose."""

    compute_units: Literal["cpu_and_ne", "cpu_only"] = "cpu_and_ne"
    """Never ALL: with it a large model is placed on the GPU entirely, and loads quickly precisely because nothing is on
    the Neural Engine (ane.md 1.3)."""
    prepare: Literal["require", "allow_cold"] = "require"
    """Whether to load a compiled bundle that this OS build has not specialised yet (may take minutes)."""
    placement: Literal["on", "off"] = "on"
    certified_ms: dict[str, Annotated[float, Meta(gt=0)]] = {}
    """Certified time of one row or pass by function; above twice that an admission is refused."""
    operation: str | None = None
    profile: str | None = None


def parse(values: Mapping[str, str]) -> Settings:
    """Check every known key. EngineError config_invalid, or backend_missing for another ``backend``."""
    backend = values.get("backend", "coreml")
    if backend != "coreml":
        raise EngineError(ErrorCode.BACKEND_MISSING, f"runtime_config.backend: this worker has coreml, not {backend!r}")
    try:
        certified = msgspec.json.decode(values.get("certified_ms", "{}"))
        return msgspec.convert({**values, "certified_ms": certified}, Settings)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise EngineError(ErrorCode.CONFIG_INVALID, f"runtime_config: {exc}") from exc
