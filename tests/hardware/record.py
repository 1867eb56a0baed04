"""What a hardware run found beside its certifications: facts, figures, and how every test ended."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from synapse_host.certification import run as orders
from synapse_host.placement import hardware, probe
from tests.hardware import lanes


class Record:
    """One run's ``hardware.json``, filled test by test and written at the end whatever happened.

    *chip*: the accelerator, where it isn't named by the processor.
    """

    def __init__(self, engine: str, software: Iterable[str], *, chip: str = "", **facts: Any) -> None:
        self._profile = hardware.detect()
        self._engine = engine
        self.chip = chip or self._profile.cpu_model
        self.data: dict[str, Any] = {
            "engine": engine,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "chip": self.chip,
            "os": f"{self._profile.os} {self._profile.os_version}",
            "os_build": self._profile.os_build,
            "memory_gib": round(self._profile.ram_total / 2**30),
            "software": {"python": platform.python_version(), **probe.versions(software)},
            **facts,
            "results": {},
            "outcomes": {},
        }

    def expect(self, request: pytest.FixtureRequest) -> None:
        """List the tests of the module: one that never ran is no test that passed."""
        items = request.session.items
        self.data["outcomes"] = {item.name: "not run" for item in items if item.path == request.path}

    def note(self, name: str, **figures: Any) -> None:
        """Keep figures of a test."""
        self.data["results"].setdefault(name, {}).update(figures)

    def ended(self, request: pytest.FixtureRequest) -> None:
        """Keep how a test ended."""
        told = dict(request.node.user_properties)
        self.data["outcomes"][request.node.name] = told.get("outcome", "unknown")

    def write(self, out: Path | None = None) -> Path:
        """Write the file into the folder of the engine and this kind of machine; return it."""
        profile = self._profile
        name = orders.folder_of(self._engine, chip=self.chip, os=profile.os, os_version=profile.os_version)
        path = (out or lanes.EVIDENCE) / re.sub(r"[^\w.-]", "-", name) / "hardware.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        outcomes = self.data["outcomes"].values()
        passed = bool(outcomes) and set(outcomes) == {"passed"}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.data | {"passed": passed}, indent=1, sort_keys=True, default=str) + "\n")
        part.replace(path)  # a process that dies while it writes leaves what was there before
        return path
