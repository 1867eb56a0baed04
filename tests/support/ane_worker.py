"""A real Core ML worker process whose last call goes to the numpy evaluator instead of Apple's framework.

    python -m tests.support.ane_worker --socket PATH --nonce HEX16 --manifest F [--packed W,W]

Its engine name is ``ane-reference``; a host takes it only with ``Supervisor(expected_engine=...)``.
"""

from __future__ import annotations

import sys
from typing import ClassVar

from engines.ane.backend import Backend
from engines.ane.engine import AneEngine
from engines.runtime.engine import WorkerOptions
from engines.runtime.main import run
from tests.support.mil_reference import ENGINE, ReferenceBackend


class ReferenceEngine(AneEngine):
    """The production engine with another backend, injected."""

    name: ClassVar[str] = ENGINE

    def __init__(self, options: WorkerOptions, backend: Backend | None = None) -> None:
        super().__init__(options, backend or ReferenceBackend())


if __name__ == "__main__":
    sys.exit(run(ReferenceEngine, program="ane-reference-worker", default_device="ane"))
