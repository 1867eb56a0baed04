"""Argument parsing: argparse whose errors are typed and whose help reads like a page."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from synapse_host.errors import InvalidRequest


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
    """One verb's parser. ``examples`` is printed under the options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, formatter_class=_Page, allow_abbrev=False)
        self.verb = prog.rpartition(" ")[2]

    def examples(self, text: str) -> None:
        """Set the examples shown at the end of ``--help``."""
        self.epilog = EXAMPLES + "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())

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


def common_options(parser: Parser, *, running: bool = False) -> None:
    """Add the options every verb takes (interfaces.md, Commands). *running*: a verb about ``synapse serve``'s host."""
    group = parser.add_argument_group("everywhere")
    group.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else")
    group.add_argument("--quiet", action="store_true", help="no progress bars and no remarks")
    group.add_argument(
        "--matrix",
        type=Path,
        metavar="FILE",
        default=Path(env) if (env := os.environ.get("SYNAPSE_MATRIX")) else None,
        help="hw_matrix.yaml to use (default: the packaged one; env SYNAPSE_MATRIX)",
    )
    group.add_argument("--models-dir", type=Path, metavar="DIR", help="where bundles live (default: the user cache)")
    where = (
        "directory of the running host (default: the user's runtime directory)"
        if running
        else "where to look for the server, or to run a host of its own (default: the user's, a private one)"
    )
    group.add_argument("--runtime-dir", type=Path, metavar="DIR", help=where)
    group.add_argument("--deadline", type=seconds, metavar="SECONDS", help="give up waiting after this long")


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= 2**32 - 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def port(text: str) -> int:
    """Parse the number of a TCP port."""
    if not text.isascii() or not text.isdigit() or not 0 <= int(text[:9]) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest known word, or nothing."""
    match = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
