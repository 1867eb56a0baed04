"""``python -m engines.ane``: the Core ML worker, or with ``build``, ``prepare`` and ``plan`` its package tools."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker, the builder or the preparer; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("build", "prepare", "plan"):
        from engines.ane.build.convert import main as tools

        return tools(arguments)
    from engines.ane.engine import AneEngine
    from engines.runtime.main import run

    return run(AneEngine, arguments, program="synapse-worker-ane", default_device="ane")


if __name__ == "__main__":
    sys.exit(main())
