"""LOAD's ``runtime_config``: string to string; unknown keys are ignored, bad values are ``config_invalid``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from engines.ane.backend import UNITS
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling


@dataclass(frozen=True, slots=True)
class Settings:
    """What LOAD may choose."""

    units: str
    allow_cold: bool
    """Load a compiled bundle that this OS build has not specialised yet (may take minutes)."""
    placement: bool
    certified_ms: Mapping[str, float]
    """Certified time of one row or pass by function; above twice that an admission is refused."""
    operation: str | None
    profile: str | None


def parse(values: Mapping[str, str]) -> Settings:
    """Check every known key. EngineError config_invalid, or backend_missing for another ``backend``."""

    def refuse(key: str, why: str) -> NoReturn:
        raise EngineError(ErrorCode.CONFIG_INVALID, f"runtime_config.{key}: {values[key][:80]!r} {why}")

    def one_of(key: str, *allowed: str) -> str:
        value = values.get(key, allowed[0])
        if value not in allowed:
            refuse(key, f"is not one of {', '.join(allowed)}")
        return value

    backend = values.get("backend", "coreml")
    if backend != "coreml":
        raise EngineError(ErrorCode.BACKEND_MISSING, f"runtime_config.backend: this worker has coreml, not {backend!r}")
    one_of("pooling", *(pooling.value for pooling in Pooling))
    one_of("normalize", "true", "false")
    try:
        certified = json.loads(values.get("certified_ms", "{}"))
    except (ValueError, RecursionError):
        refuse("certified_ms", "is not JSON")
    if not isinstance(certified, dict) or not all(type(ms) in (int, float) and ms > 0 for ms in certified.values()):
        refuse("certified_ms", "is not a JSON object of function name to milliseconds")
    return Settings(
        units=one_of("compute_units", *UNITS),
        allow_cold=one_of("prepare", "require", "allow_cold") == "allow_cold",
        placement=one_of("placement", "on", "off") == "on",
        certified_ms=certified,
        operation=values.get("operation"),
        profile=values.get("profile"),
    )
