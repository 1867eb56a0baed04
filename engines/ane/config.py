"""LOAD's ``runtime_config``: string to string; unknown keys are ignored, bad values are ``config_invalid``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engines.ane.backend import UNITS
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling


@dataclass(frozen=True, slots=True)
class Settings:
    """What LOAD may choose."""

    units: str
    functions: tuple[str, ...] | None
    """Only these functions of the bundle; None for all."""
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

    def decoded(key: str, absent: Any) -> Any:
        try:
            return json.loads(values[key]) if key in values else absent
        except (ValueError, RecursionError):
            refuse(key, "is not JSON")

    backend = values.get("backend", "coreml")
    if backend != "coreml":
        raise EngineError(ErrorCode.BACKEND_MISSING, f"runtime_config.backend: this worker has coreml, not {backend!r}")
    one_of("pooling", *(pooling.value for pooling in Pooling))
    one_of("normalize", "true", "false")
    functions = decoded("functions", None)
    if "functions" in values and not (
        isinstance(functions, list) and functions and all(isinstance(name, str) for name in functions)
    ):
        refuse("functions", "is not a JSON list of function names")
    certified = decoded("certified_ms", {})
    if not isinstance(certified, dict) or not all(type(ms) in (int, float) and ms > 0 for ms in certified.values()):
        refuse("certified_ms", "is not a JSON object of function name to milliseconds")
    return Settings(
        units=one_of("compute_units", *UNITS),
        functions=None if functions is None else tuple(functions),
        allow_cold=one_of("prepare", "require", "allow_cold") == "allow_cold",
        placement=one_of("placement", "on", "off") == "on",
        certified_ms=certified,
        operation=values.get("operation"),
        profile=values.get("profile"),
    )
