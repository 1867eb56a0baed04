"""What the tests of public reports share: lanes over scripted workers that import the tree these tests stand in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from synapse_host.config import HostConfig
from synapse_host.supervision.supervisor import Supervisor
from tests.support.lanes import FAST, Lanes
from tests.support.small_bundle import write_bundle, write_matrix

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60.0
"""How long a scenario may take."""
TREE = {"PYTHONPATH": str(ROOT)}
"""Workers get a reduced environment; this makes them import the tree under test, also when that is a changed copy."""


class ReportLanes(Lanes):
    """The lane factory of tests/host, with workers of this tree."""

    limit = LIMIT_S

    def __call__(self, script: Any = None, *, config: HostConfig = FAST, **changes: Any) -> Supervisor:
        changes.setdefault("env", TREE)
        return super().__call__(script, config=config, **changes)


def run_limited(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario without lanes under the same limit."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(main())


def exists(pid: int) -> bool:
    """Whether the process is there at all, as a zombie too."""
    return psutil.pid_exists(pid)


def alive(pid: int) -> bool:
    """Whether the process runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(pid: int) -> None:
    """Kill what a missing guard left behind."""
    with contextlib.suppress(OSError):
        os.kill(pid, 9)


def toy_host(folder: Path, script: dict[str, Any] | None = None, **bundle: Any) -> tuple[Path, dict[str, Path]]:
    """Write a matrix over a scripted worker and one bundle ``toy``; return what Host.open takes."""
    path = write_matrix(folder, script)
    document = json.loads(path.read_text())
    document["engines"]["scripted"]["env"] = TREE
    path.write_text(json.dumps(document))
    return path, {"toy": write_bundle(folder / "toy", **bundle)}
