"""What an error says fits its reader: a program gets no options of the command, a command no Python.

Read off the sources: every message and every advice that an error of a room both can reach is made with.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import synapse_host
from synapse_host import errors
from synapse_host.errors import SynapseError

OF_A_COMMAND = re.compile(r"(^|[\s(])--[a-z]|synapse (?!certify|build|models install)[a-z]+\b(?!\.)")
"""An option, or a verb. Some prepare a machine, whoever asks; what they say has their own options."""
OF_A_PROGRAM = re.compile(r"host\.|=True|HostConfig|Policy\(|models=|_ids\b|Corpus\.")
SETUP = ("synapse certify", "synapse build", "synapse models install", "pip install")
ROOT = Path(synapse_host.__file__).parent
COMMANDS = ("cli", "doctor", "certification", "serve")
"""Rooms that only commands reach."""
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SynapseError)}


def words(node: ast.AST) -> str:
    """Return the literal words of an expression."""
    return "".join(str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant))


def said() -> Iterator[tuple[str, str, str]]:
    """Yield where, for whom and in which words: of each message (a program reads it), of each advice by its place."""
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in COMMANDS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
                yield where, "python", words(node.args[0])
            if isinstance(node, ast.Dict) and node.keys:
                places = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
                if set(places) <= {"python", "command", "operator"}:
                    for place, value in zip(places, node.values, strict=True):
                        yield where, str(place), words(value)


def test_advice_is_given_in_the_readers_own_terms() -> None:
    found = list(said())
    for place, foreign, fewest in (("python", OF_A_COMMAND, 100), ("command", OF_A_PROGRAM, 10)):
        whole = [(where, text) for where, whose, text in found if whose == place]
        assert len(whole) > fewest
        assert [one for one in whole if foreign.search(one[1]) and not any(verb in one[1] for verb in SETUP)] == []
