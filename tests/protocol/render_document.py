"""Writes the generated part of ``docs/protocol.md`` from the transition table: run it after changing the table."""

from __future__ import annotations

import re
from pathlib import Path

from engines.protocol.rules import TRANSITIONS, State

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def diagram() -> str:
    """Return the transition table as a Mermaid state diagram."""
    arrows = [
        f"    {state.name} --> {following.name}: {role.value} {kind.value}"
        for (state, role, kind), following in TRANSITIONS.items()
    ]
    start = f"    [*] --> {State.HELLO.name}"
    return "\n".join(["```mermaid", "stateDiagram-v2", start, *arrows, f"    {State.CLOSED.name} --> [*]", "```"])


def render(text: str) -> str:
    """Return *text* with its generated part replaced."""
    pattern = r"(<!-- generated: diagram -->\n).*?(<!-- end -->)"
    text, count = re.subn(pattern, lambda found: f"{found[1]}{diagram()}\n{found[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"docs/protocol.md has {count} places for the diagram")
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text("utf-8")), "utf-8")
