"""Argument parsing: argparse whose errors are typed and whose help is the docstring of the verb's module."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from synapse_host.errors import InvalidRequest

Number = TypeVar("Number", int, float)


class UsageError(InvalidRequest):
    """The command line makes no sense."""


EXAMPLES = "examples:\n"
WIDEST = 110
MARK = "\0"
"""Before a word that argparse would take for an option; no argument of a process can hold this character."""


class _Page(argparse.HelpFormatter):
    """Help as wide as the terminal, at most a readable line; sentences that end a line end a paragraph."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(shutil.get_terminal_size().columns - 2, WIDEST))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLES):
            return text
        paragraphs = re.split(r"(?<=[.:])\n", text)
        return "\n".join(textwrap.fill(" ".join(each.split()), width, break_on_hyphens=False) for each in paragraphs)


class Parser(argparse.ArgumentParser):
    """One verb's parser. *page*: what its help says, and behind ``Examples:`` lines that are printed as they are."""

    def __init__(self, prog: str, page: str | None) -> None:
        super().__init__(prog=prog, formatter_class=_Page, allow_abbrev=False)
        self.verb = prog.rpartition(" ")[2]
        self.describe(page or "")

    def describe(self, page: str) -> None:
        """Set what the help says."""
        text, _, examples = page.partition("\nExamples:\n")
        self.description = text.strip()
        self.epilog = EXAMPLES + "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())

    def option(self, name: str, metavar: str, help: str, **more: Any) -> None:
        """Add an argument that takes a value."""
        self.add_argument(name, metavar=metavar, help=help, **more)

    def flag(self, *names: str, help: str) -> None:
        """Add an option that is given or not."""
        self.add_argument(*names, action="store_true", help=help)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line with options and texts in any order; behind ``--`` every word is a text.

        argparse forgets where the ``--`` was when it comes to the texts, so words with a dash are marked until then.
        """
        end = list(words).index("--") if "--" in words else len(words)
        texts = [MARK + word if word.startswith("-") else word for word in words[end + 1 :]]
        args = self.parse_intermixed_args([*words[:end], *(["--", *texts] if texts else [])])
        return argparse.Namespace(**{name: _unmarked(value) for name, value in vars(args).items()})

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that ``--json`` can print the error as a document."""
        raise UsageError(f"{message.replace(MARK, '')}. See: {self.prog} --help")


def _unmarked(value: Any) -> Any:
    match value:
        case str():
            return value.removeprefix(MARK)
        case Path():
            return Path(str(value).removeprefix(MARK))
        case list():
            return [_unmarked(each) for each in value]
    return value


def number(kind: Callable[[str], Number], least: float, most: float, what: str) -> Callable[[str], Number]:
    """Return what parses a number from *least* to *most*; anything else is refused as not *what*."""

    def parse(text: str) -> Number:
        digits = text.isascii() and text.isdigit()
        with suppress(ValueError):
            if (digits or kind is not int) and least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


seconds = number(float, 1e-9, 999_999_999, "a positive number of seconds")
count = number(int, 1, 2**32 - 1, "a positive whole number")
port = number(int, 0, 65535, "a port (0 to 65535)")
share = number(float, 0, 1, "a number from 0 to 1")


def common_options(parser: Parser) -> None:
    """Add the options every verb takes (interfaces.md, Commands)."""
    group = parser.add_argument_group("everywhere")
    group.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else")
    group.add_argument("--quiet", action="store_true", help="no progress bars and no remarks")
    matrix = "hw_matrix.yaml to use (default: the packaged one; env SYNAPSE_MATRIX)"
    chosen = Path(env) if (env := os.environ.get("SYNAPSE_MATRIX")) else None
    group.add_argument("--matrix", type=Path, metavar="FILE", default=chosen, help=matrix)
    group.add_argument("--models-dir", type=Path, metavar="DIR", help="where bundles live (default: the user cache)")
    where = "directory of the running host, or of the command's own (default: the user's; a private one)"
    group.add_argument("--runtime-dir", type=Path, metavar="DIR", help=where)
    group.add_argument("--deadline", type=seconds, metavar="SECONDS", help="give up waiting after this long")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest known word, or nothing."""
    match = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
