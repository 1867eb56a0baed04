"""The real onnx-cpu worker with one fault, put behind a host by the matrix.

    python -m tests.support.bent_worker MODE --socket PATH --nonce HEX16 ...

MODE: ``shuffle`` (the rows of a batch change places), ``nan:ID,ID,…`` (the row of exactly these ids holds a NaN),
``device`` (says at the handshake that it runs on a GPU).
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from engines.cuda.engine import CudaEngine
from engines.runtime import main as runtime_main


def command(mode: str) -> tuple[str, ...]:
    """Return the ``worker.command`` of a mode; run in the repository's root."""
    return (sys.executable, "-m", "tests.support.bent_worker", mode)


class BentEngine(CudaEngine):
    """Right answers, bent on their way out."""

    mode = sys.argv[1] if len(sys.argv) > 1 else ""

    def identity(self):  # type: ignore[no-untyped-def]
        said = super().identity()
        if self.mode != "device":
            return said
        return msgspec.structs.replace(said, build_flags={**said.build_flags, "device": "cuda", "backend": "cuda"})

    def load(self, request, *, progress):  # type: ignore[no-untyped-def]
        model: Any = super().load(request, progress=progress)
        straight = model.forward

        def forward(batch, progress):  # type: ignore[no-untyped-def]
            import numpy as np

            out = straight(batch, progress)
            if self.mode == "shuffle":
                return np.ascontiguousarray(np.roll(out, 1, axis=0))
            if self.mode.startswith("nan:"):
                unlucky = [int(id) for id in self.mode[4:].split(",")]
                for number, row in enumerate(batch.rows()):
                    if row.tolist() == unlucky:
                        out[number] = np.nan
            return out

        model.forward = forward
        return model


if __name__ == "__main__":
    sys.exit(runtime_main.run(BentEngine, sys.argv[2:], program="synapse-worker-cuda", default_device="cpu"))
