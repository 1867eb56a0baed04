"""A real worker of ``engines.runtime`` whose engine costs nothing: what a call through it takes is the wire.

    python bench/echo_worker.py [--dims N] --socket … (the host's flags)

A row of N ids into a model of N dims comes back as its own bytes. Otherwise the answer is a preallocated array, so a
reply of any size costs its engine nothing either.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # Started as a file: this folder is no place to import from, the checkout is.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engines.protocol.messages import LLAMA_ENGINE, Load
from engines.runtime import main as runtime_main
from engines.runtime.engine import SEGMENT_SERVING, Engine, EngineIdentity, Model, Probe, WorkerOptions

if TYPE_CHECKING:
    from engines.runtime.progress import ProgressReporter


class EchoModel(Model):
    """Answers with what it was sent, or with zeros."""

    def __init__(self, dims: int) -> None:
        import numpy as np

        self.dims = dims
        self._zeros = np.zeros((0, dims), np.float32)

    def embed(self, batch: Any, *, pooling: Any, normalize: bool, packed_width: Any, progress: ProgressReporter) -> Any:
        """Return float32 (rows, dims)."""
        import numpy as np

        rows = len(batch)
        if rows == 1 and len(batch.input_ids) == self.dims:
            return batch.input_ids.view(np.float32).reshape(1, -1)
        if len(self._zeros) < rows:
            self._zeros = np.zeros((rows, self.dims), np.float32)
        return self._zeros[:rows]

    def close(self) -> None:
        """Nothing to release."""


class EchoEngine(Engine):
    """Poses as the llama worker."""

    name = LLAMA_ENGINE
    serves = SEGMENT_SERVING
    ref_prefix = "echo"

    def __init__(self, dims: int) -> None:
        self._dims = dims

    def identity(self) -> EngineIdentity:
        """Return the identity."""
        return EngineIdentity(engine=LLAMA_ENGINE, version="echo")

    def probe_floor(self) -> Probe:
        """Run anywhere."""
        return Probe(status="ok", code="ok", required={}, observed={})

    def load(self, request: Load, *, progress: ProgressReporter) -> Model:
        """Load nothing."""
        return EchoModel(self._dims)


def command(dims: int) -> tuple[str, ...]:
    """Return the worker command of a model with *dims*."""
    return (sys.executable, str(Path(__file__).resolve()), str(dims))


def main(argv: list[str]) -> int:
    """Run the worker."""
    dims = int(argv[0])

    def factory(options: WorkerOptions) -> Engine:
        return EchoEngine(dims)

    return runtime_main.run(factory, argv[1:], program="echo-worker")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
