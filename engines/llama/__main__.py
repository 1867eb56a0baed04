"""``python -m engines.llama``: the llama worker, or with ``build`` and ``tokenizer`` its file builder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

BUILDER_VERBS = ("build", "tokenizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker or the builder; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in BUILDER_VERBS:
        from engines.llama.build.convert import main as build

        return build(arguments)
    from engines.llama.engine import LlamaEngine
    from engines.runtime.main import run

    return run(LlamaEngine, arguments, program="synapse-worker-llama", default_device="cpu")


if __name__ == "__main__":
    sys.exit(main())
