"""How an error reads on a terminal: what happened, the last words of a dead worker, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synapse_host.errors import SynapseError

_TAIL_LINES = 8


def explain(error: SynapseError) -> str:
    """Return the text after ``synapse: ``; further lines are indented."""
    details = error.details
    lines = [error.message]
    if error.code == "engine_crashed":
        lines += _last_words(details)
        lines += _advice(details)
    return "\n         ".join(lines)


def _last_words(details: dict[str, Any]) -> list[str]:
    tail = str(details.get("log_tail") or "").strip().splitlines()
    return [f"| {line[:300]}" for line in tail[-_TAIL_LINES:]]


def _advice(details: dict[str, Any]) -> list[str]:
    if "SIGILL" in str(details.get("signal") or details.get("exit_status") or details.get("exit") or ""):
        return [
            "It met a CPU instruction that this machine lacks: llama-cpp-python was built for another CPU, rebuild it:",
            "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python",
        ]
    return []
