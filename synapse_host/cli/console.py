"""Where a command's words go: results on stdout, remarks on stderr, colour and bars only where a person looks."""

from __future__ import annotations

import json as jsonlib
import os
import re
import secrets
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from synapse_host.errors import Interrupted, SynapseError

Stages: TypeAlias = Callable[[str, int, int], None]
"""``report(stage, done, total)``; each stage starts the bar anew."""
STEERING: Final = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    # C0 without tab and line feed, DEL and C1; then what makes text run backwards on a terminal.
    for code in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_NARROWEST: Final = 20
_LONGEST: Final = 90
_TAIL_LINES: Final = 8
_DUMP: Final = re.compile(
    r"Fatal Python error|Current thread|Thread 0x|\s*File \".*\", line \d+|Extension modules:|<no Python frame>"
    r"|\s*[~^]+\s*$"
)


def printable(text: str) -> str:
    """Return *text* with every character escaped that steers a terminal: words of workers, models and files hold any.

    ``ESC ]0;…`` would set its title, ``ESC [2J`` clear it, and a right-to-left override turn a line round.
    """
    return text.translate(STEERING)


class _Bug(SynapseError):
    """An exception that nobody foresaw."""

    code = "internal_error"


class Console:
    """One command's output. ``json`` and ``quiet`` as on the command line.

    What a person sees is :func:`printable`: all of stderr, and stdout where it is a terminal. Colours are the
    exception: a mark that nobody else can know tells them from other escapes.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self._mark = f"\x1b{secrets.token_hex(8)}["
        self.json = json
        self.quiet = quiet
        plain = bool(os.environ.get("NO_COLOR")) or json or os.environ.get("TERM") == "dumb"
        self.colour = not plain and sys.stdout.isatty()
        self.interactive = sys.stdout.isatty() and not json
        """True when a person reads stdout, so that long rows of numbers may be cut."""
        self.bars = not plain and not quiet and sys.stderr.isatty()

    def style(self, text: str, *names: str) -> str:
        """Return *text* in colour where stdout is a terminal."""
        if not self.colour:
            return text
        return f"{self._mark}{';'.join(_CODES[name] for name in names)}m{text}{self._mark}0m"

    def line(self, text: str = "") -> None:
        """Print a line of the result; not under ``--json``. Off a terminal it is data and stays as it is."""
        if self.json:
            return
        if self.interactive:
            text = "\x1b[".join(printable(part) for part in text.split(self._mark))
        print(text)

    def hang(self, lead: str, text: str, indent: int) -> None:
        """Print *lead*, *indent* columns wide, and *text*; a terminal too narrow for it goes on below the text."""
        room = self.width() - indent
        wrapped = textwrap.wrap(text, room, break_on_hyphens=False) if text and room >= _NARROWEST else [text]
        self.line(lead + "\n".ljust(indent + 1).join(wrapped))

    def ranked(self, place: int, score: float, text: str) -> None:
        """Print one line of a ranking: place, score and the beginning of a text."""
        lead, words = f"{place:>3}  {score:.4f}  ", " ".join(text.split())
        self.hang(lead, words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…", len(lead))

    def width(self) -> int:
        """Return the terminal's columns; 0 where nobody looks, and nothing is to be wrapped."""
        return shutil.get_terminal_size().columns if self.interactive else 0

    def document(self, document: dict[str, Any]) -> None:
        """Print the JSON document, under ``--json`` only."""
        if self.json:
            self._print_json(document, allow_nan=False)

    def note(self, text: str) -> None:
        """Say something on stderr that is not the result."""
        if not self.quiet and not self.json:
            self._tell(text)

    def _tell(self, text: str) -> None:
        print(f"synapse: {printable(text)}", file=sys.stderr)

    def _print_json(self, document: dict[str, Any], **options: Any) -> None:
        """Print one line of JSON that stdout can take: escaped where its encoding, or half a surrogate, asks for it."""
        text = jsonlib.dumps(document, ensure_ascii=False, **options)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = jsonlib.dumps(document, **options)
        # Outside strings a document has none of these; inside, this is the same character.
        print(text.translate({code: f"\\u{code:04x}" for code in STEERING}))

    # rich is imported where something is shown: it costs start-up time.

    @contextmanager
    def bar(self, label: str, total: int, *, unit: str) -> Iterator[Callable[[int], None]]:
        """Show a progress bar on stderr while the block runs and yield what advances it; silent off a terminal."""
        with self.stages(label, unit=unit) as report:
            done = 0

            def advance(amount: int) -> None:
                nonlocal done
                done += amount
                report("", done, total)

            yield advance

    @contextmanager
    def stages(self, label: str, *, unit: str | None = None) -> Iterator[Stages]:
        """Show the progress of a job that reports its stages, in bytes or in *unit*; silent off a terminal."""
        if not self.bars:
            yield lambda stage, done, total: None
            return
        from rich import progress as rich

        counted = [rich.MofNCompleteColumn(), rich.TextColumn(unit)] if unit else [rich.DownloadColumn()]
        name = rich.TextColumn("{task.description:<24}", markup=False)
        columns = (name, rich.BarColumn(bar_width=24), *counted, rich.TimeRemainingColumn())
        with rich.Progress(*columns, console=_stderr(), transient=True) as shown:
            task = shown.add_task(printable(label), total=None)

            def report(stage: str, done: int, total: int) -> None:
                words = printable(f"{label}: {stage}" if stage else label)
                shown.update(task, description=words, completed=done, total=total or None)

            yield report

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """Show one changing line on stderr while the block runs: ``show(text)``; silent off a terminal."""
        if not self.bars:
            yield lambda text: None
            return
        from rich.text import Text

        with _stderr().status("") as shown:
            # What is shown holds names from outside: no markup, and nothing that steers the terminal.
            yield lambda text: shown.update(Text(printable(text)))

    def fail(self, error: SynapseError) -> int:
        """Report a typed error and return its exit code."""
        if self.json:
            self._print_json({"error": error.to_dict("command")}, default=str)
        else:
            self._tell(explain(error))
        return error.exit_code

    def interrupted(self) -> int:
        """Report that a signal ended the command and return its exit code."""
        if self.json:
            return self.fail(Interrupted("interrupted"))
        self.note("interrupted")
        return Interrupted.exit_code

    def bug(self, exc: BaseException) -> int:
        """Report an exception that nobody foresaw: one line, exit 1."""
        words = " ".join(str(exc).split())
        text = f"internal error: {type(exc).__name__}: {words} (SYNAPSE_DEBUG=1 shows where)"
        return self.fail(_Bug(text))


def _stderr() -> Any:
    from rich.console import Console as RichConsole

    return RichConsole(stderr=True)


def explain(error: SynapseError) -> str:
    """Return the text after ``synapse: ``: what happened, the last words of a dead worker, and what to do next."""
    lines = [error.said("command")]
    if error.code == "engine_crashed":
        lines += _last_words(str(error.details.get("log_tail") or ""))
        if "llama-cpp-python was built for another CPU" in error.message:
            from synapse_host.doctor.engines import REBUILD

            lines.append(f"Rebuild it: {REBUILD}")
    return "\n         ".join(lines)


def _last_words(log: str) -> list[str]:
    """Return the tail of a worker's log, without Python's crash dump where anything else was said."""
    tail = [line.removeprefix("[stderr] ").removeprefix("[stdout] ") for line in log.rstrip().splitlines()]
    said = [line for line in tail if line.strip() and not _DUMP.match(line)]
    return [f"| {line[:300]}" for line in (said or tail)[-_TAIL_LINES:]]
