"""Regular expressions of a tokenizer.json, accepted only where matching takes time in proportion to the text.

The tokenizers library runs them with a backtracking engine inside one C call that nothing can interrupt, so a pattern
such as ``(a+)+b`` would hold a thread for minutes. The patterns of real models (GPT-2, cl100k, o200k, Llama 3, Qwen,
DeepSeek, CLIP, BLOOM, Tekken) have a plain shape, and that shape is what is accepted here:

* alternatives, each a row of atoms: a literal, an escape, a character class, a group of literals and classes;
* once an atom repeats without limit, what follows in its alternative may be empty, so the match can't fail any more;
* or one thing that is required follows (``\\s*[\\r\\n]+``, ``\\s+(?!\\S)``). Such an alternative may read a run of
  characters in vain. Another alternative has to take that whole run then (``\\s+``), or every character of the run
  would start the same search again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_LENGTH: Final = 4096
"""Characters of a pattern; the longest known one (a list of letters of all scripts) has 1,400."""
MAX_REPEATS: Final = 32
"""The most that ``{m,n}`` may say."""
MAX_CHOICES: Final = 2
"""Atoms of open length before the one that repeats without limit: each multiplies what a failing match tries."""

_CLASS: Final = r"\[(?:[^\[\]\\]|\\.|\[(?:[^\[\]\\]|\\.)*\])+\]"
_ESCAPE: Final = r"\\(?:[pP]\{\^?\w+\}|[sSdDwWnrtvf]|x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]{1,6}\}|u[0-9A-Fa-f]{4}|[^\w\s])"
_LITERAL: Final = r"[^\\\[\](){}*+?|^$]"
_ATOM: Final = re.compile(rf"{_CLASS}|{_ESCAPE}|{_LITERAL}|\((?:\?i?:)?(?:{_CLASS}|{_ESCAPE}|{_LITERAL}|\|)+\)")
_QUANTIFIER: Final = re.compile(r"([*+?])\+?|\{(\d{1,3})(?:(,)(\d{0,3}))?\}")
_NOT_BEFORE_TEXT: Final = r"(?!\S)"


@dataclass(frozen=True, slots=True)
class _Atom:
    """What may stand *least* to *most* times; *most* None: without limit."""

    text: str
    least: int
    most: int | None


def check(pattern: str) -> None:
    """Raise ValueError, which says why, for a pattern that may take long or that is of an unknown kind."""
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"a pattern of {len(pattern)} characters, at most {MAX_LENGTH}")
    alternatives = _parse(pattern)
    runs = {atom.text for atoms in alternatives if (atom := _run(atoms)) is not None}
    for atoms in alternatives:
        _check_alternative(atoms, runs, pattern)


def _parse(pattern: str) -> list[list[_Atom]]:
    alternatives: list[list[_Atom]] = [[]]
    at = 0
    while at < len(pattern):
        if pattern[at] == "|":
            alternatives.append([])
            at += 1
        elif pattern.startswith(_NOT_BEFORE_TEXT, at):
            alternatives[-1].append(_Atom(_NOT_BEFORE_TEXT, 1, 1))
            at += len(_NOT_BEFORE_TEXT)
        else:
            atom, at = _atom(pattern, at)
            alternatives[-1].append(atom)
    if not all(alternatives):
        raise ValueError(f"the pattern {pattern[:80]!r} has an empty alternative")
    return alternatives


def _atom(pattern: str, at: int) -> tuple[_Atom, int]:
    """Return the atom at a place, with its quantifier, and the place behind it."""
    found = _ATOM.match(pattern, at)
    if found is None:
        raise ValueError(f"the pattern {pattern[:80]!r} is of no known kind at character {at}")
    text, at = found.group(), found.end()
    quantifier = _QUANTIFIER.match(pattern, at)
    if quantifier is None:
        return _Atom(text, 1, 1), at
    sign, least, comma, most = quantifier.groups()
    if sign:
        atom = _Atom(text, 1 if sign == "+" else 0, 1 if sign == "?" else None)
    else:
        atom = _Atom(text, int(least), int(least) if not comma else int(most) if most else None)
    if max(atom.least, atom.most or 0) > MAX_REPEATS:
        raise ValueError(f"the pattern {pattern[:80]!r} repeats more than {MAX_REPEATS} times at character {at}")
    if text.startswith("(") and atom.most != 1:
        raise ValueError(f"the pattern {pattern[:80]!r} repeats a group at character {at}")
    return atom, quantifier.end()


def _run(atoms: list[_Atom]) -> _Atom | None:
    """Return the atom of which an alternative takes a whole run, however it goes on; None where there is none."""
    for number, atom in enumerate(atoms):
        if atom.most is None:
            return atom if atom.least <= 1 and all(rest.least == 0 for rest in atoms[number + 1 :]) else None
        if atom.least:
            return None
    return None


def _check_alternative(atoms: list[_Atom], runs: set[str], pattern: str) -> None:
    if all(atom.least == 0 for atom in atoms):
        raise ValueError(f"the pattern {pattern[:80]!r} may match nothing")
    choices = 0
    endless: _Atom | None = None
    required = False
    for atom in atoms:
        if endless is None:
            endless = atom if atom.most is None else None
            choices += atom.most is not None and atom.most != atom.least
        elif atom.least:
            if required or endless.text not in runs:
                raise ValueError(f"the pattern {pattern[:80]!r} may read the same text over and over")
            required = True
    if choices > MAX_CHOICES:
        raise ValueError(f"the pattern {pattern[:80]!r} has more than {MAX_CHOICES} optional parts in a row")
