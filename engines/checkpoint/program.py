"""What the programs that make files have in common: JSON lines on stdout, a failure as one line on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from engines.bundle.manifest import BundleError
from engines.protocol.errors import EngineError


def line(**fields: Any) -> None:
    """Print one JSON line at once."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def report(stage: str) -> Callable[[int, int], None]:
    """Return a progress callback that prints ``{"stage", "done", "total"}``."""
    return lambda done, total: line(stage=stage, done=done, total=total)


def run(program: str, make: Callable[[], dict[str, Any]], *, missing: str) -> int:
    """Run *make* and print its result line; return the exit status, 0 or 1.

    *missing*: what to do about a Python package that isn't there. An exception that isn't a refusal is a bug and keeps
    its traceback.
    """
    try:
        line(stage="result", **make())
    except ModuleNotFoundError as exc:
        why = f"the Python package {exc.name!r} is missing: {missing}"
    except (BundleError, EngineError, OSError, ValueError) as exc:
        why = " ".join(str(exc).split())
    else:
        return 0
    sys.stderr.write(f"{program}: {why}\n")
    return 1
