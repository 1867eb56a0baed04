"""The stub libraries (built once a run), the toy bundles, and the two ways to rehearse with them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.bundle.manifest import FILE_NAME, Bundle
from engines.checkpoint.read import Checkpoint
from tests.cuda.cases import CASES, Case
from tests.rehearsal import libraries
from tests.support.owned_bundle import write_bundle

LIMIT_S = 120

Rehearse = Callable[..., dict[str, Any]]
Environment = Callable[..., dict[str, str]]
Bundles = Callable[[str], Bundle]


def case(name: str) -> Case:
    """Return a toy model by name; BERT's has room for all four recorded widths."""
    found = next(c for c in CASES if c.name == name)
    return replace(found, options={**found.options, "max_positions": 128}) if name.startswith("bert") else found


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stub libraries."""
    if reason := libraries.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cudashim")
    libraries.build(folder)
    return folder


@pytest.fixture(scope="session")
def environment(stubs: Path) -> Environment:
    """Return the environment of a child on the stubs."""

    def make(precision: str = "f16", **settings: str) -> dict[str, str]:
        return libraries.environment(stubs, SYNAPSE_CUDA_PRECISION=precision, **settings)

    return make


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Return a toy's bundle, written once a run."""
    made: dict[str, Bundle] = {}

    def get(name: str, toy: Case | None = None) -> Bundle:
        if name not in made:
            folder = tmp_path_factory.mktemp("toy")
            checkpoint = Checkpoint.open((toy or case(name)).checkpoint(folder / "checkpoint"))
            made[name] = write_bundle(checkpoint, folder / "bundle")
        return made[name]

    return get


@pytest.fixture(scope="session")
def rehearse(environment: Environment) -> Rehearse:
    """Run :mod:`tests.rehearsal.probe` on a bundle and return its document; a crash fails the test."""

    def run(
        bundle: Bundle, steps: list[list[Any]], *, precision: str = "f16", settings: dict[str, str] | None = None,
        **config: str,
    ) -> dict[str, Any]:  # fmt: skip
        arguments = [str(bundle.root / FILE_NAME), json.dumps(steps), json.dumps(config)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.rehearsal.probe", *arguments],
            env=environment(precision, **(settings or {})), capture_output=True, text=True, errors="replace",
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and done.stdout, f"the probe ended with {done.returncode}: {done.stderr[-1500:]}"
        document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return document

    return run
