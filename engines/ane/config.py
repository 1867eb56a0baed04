"""LOAD's ``runtime_config``: string to string; unknown keys are ignored, bad values are ``config_invalid``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias, cast

from engines.ane.backend import UNITS
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Pooling

Prepare: TypeAlias = Literal["require", "allow_cold"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What LOAD may choose."""

    units: str = "cpu_and_ne"
    functions: tuple[str, ...] | None = None
    """Only these functions of the bundle; None for all."""
    prepare: Prepare = "require"
    """``allow_cold``: load a compiled bundle that this OS build has not specialised yet (may take minutes)."""
    placement: bool = True
    certified_ms: Mapping[str, float] | None = None
    """Certified time of one row or pass by function; above twice that an admission is refused."""
    operation: str | None = None
    profile: str | None = None


def parse(values: Mapping[str, str]) -> Settings:
    """Check every known key. EngineError config_invalid, or backend_missing for another ``backend``."""

    def refuse(key: str, why: str) -> NoReturn:
        raise EngineError(ErrorCode.CONFIG_INVALID, f"runtime_config.{key}: {values[key][:80]!r} {why}")

    def one_of(key: str, allowed: tuple[str, ...], default: str) -> str:
        value = values.get(key, default)
        if value not in allowed:
            refuse(key, f"is not one of {', '.join(allowed)}")
        return value

    def listed(key: str) -> object:
        if key not in values:
            return None
        try:
            return json.loads(values[key])
        except (ValueError, RecursionError):
            refuse(key, "is not JSON")

    backend = values.get("backend", "coreml")
    if backend != "coreml":
        raise EngineError(ErrorCode.BACKEND_MISSING, f"runtime_config.backend: this worker has coreml, not {backend!r}")
    one_of("pooling", tuple(pooling.value for pooling in Pooling), "mean")
    one_of("normalize", ("true", "false"), "true")
    functions = listed("functions")
    if functions is not None and (
        not isinstance(functions, list) or not functions or not all(isinstance(name, str) for name in functions)
    ):
        refuse("functions", "is not a JSON list of function names")
    certified = listed("certified_ms")
    if certified is not None and (
        not isinstance(certified, dict) or not all(type(ms) in (int, float) and ms > 0 for ms in certified.values())
    ):
        refuse("certified_ms", "is not a JSON object of function name to milliseconds")
    return Settings(
        units=one_of("compute_units", UNITS, "cpu_and_ne"),
        functions=None if functions is None else tuple(cast("list[str]", functions)),
        prepare=cast("Prepare", one_of("prepare", ("require", "allow_cold"), "require")),
        placement=one_of("placement", ("on", "off"), "on") == "on",
        certified_ms=cast("dict[str, float] | None", certified),
        operation=values.get("operation"),
        profile=values.get("profile"),
    )
