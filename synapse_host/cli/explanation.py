"""How an error reads on a terminal: what happened, the last words of a dead worker, and what to do next."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from synapse_host.errors import SynapseError

_TAIL_LINES: Final = 8
_DUMP: Final = re.compile(
    r"Fatal Python error|Current thread|Thread 0x|\s*File \".*\", line \d+|Extension modules:|<no Python frame>"
    r"|\s*[~^]+\s*$"
)
REBUILD: Final = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"


def explain(error: SynapseError) -> str:
    """Return the text after ``synapse: ``; further lines are indented."""
    details = error.details
    lines = [error.message]
    if error.code == "engine_crashed":
        lines += _last_words(details)
        lines += [f"Rebuild it: {REBUILD}"] if "llama-cpp-python was built for another CPU" in error.message else []
    return "\n         ".join(lines)


def _last_words(details: dict[str, Any]) -> list[str]:
    """Return the tail of the worker's log, without Python's crash dump where anything else was said."""
    tail = [line.removeprefix("[stderr] ").removeprefix("[stdout] ") for line in _tail(details)]
    said = [line for line in tail if line.strip() and not _DUMP.match(line)]
    return [f"| {line[:300]}" for line in (said or tail)[-_TAIL_LINES:]]


def _tail(details: dict[str, Any]) -> list[str]:
    return str(details.get("log_tail") or "").rstrip().splitlines()
