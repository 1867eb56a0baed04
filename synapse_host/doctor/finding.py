"""What doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["info", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found. ``fix`` is a line to type or do, empty where nothing needs doing."""

    id: str
    severity: Severity
    what: str
    fix: str = ""
