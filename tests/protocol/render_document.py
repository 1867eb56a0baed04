"""Writes the generated parts of ``docs/protocol.md`` from the transition table: run it after changing the table."""

from __future__ import annotations

import re
from pathlib import Path

from engines.protocol.rules import TRANSITIONS, State

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def states() -> str:
    """Return the transition table as a Markdown table."""
    rows = [
        f"| {state.name} | {role.value} | {kind.value} | {following.name} |"
        for (state, role, kind), following in TRANSITIONS.items()
    ]
    return "\n".join(["| state | sender | frame | next state |", "| --- | --- | --- | --- |", *rows])


def diagram() -> str:
    """Return the transition table as a Mermaid state diagram."""
    arrows = [
        f"    {state.name} --> {following.name}: {role.value} {kind.value}"
        for (state, role, kind), following in TRANSITIONS.items()
    ]
    start = f"    [*] --> {State.HELLO.name}"
    return "\n".join(["```mermaid", "stateDiagram-v2", start, *arrows, f"    {State.CLOSED.name} --> [*]", "```"])


def render(text: str) -> str:
    """Return *text* with its generated parts replaced."""
    for name, body in (("states", states()), ("diagram", diagram())):
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"docs/protocol.md has {count} places for {name}")
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text("utf-8")), "utf-8")
