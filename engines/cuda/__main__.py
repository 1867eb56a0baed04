"""``python -m engines.cuda``: the owned worker on an NVIDIA GPU, or with ``--device cpu`` the onnx-cpu lane."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return the exit status."""
    from engines.cuda.engine import CudaEngine
    from engines.runtime.main import run

    return run(CudaEngine, argv, program="synapse-worker-cuda", default_device="cuda")


if __name__ == "__main__":
    sys.exit(main())
