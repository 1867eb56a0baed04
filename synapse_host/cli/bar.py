"""Progress bars on a terminal. Imported only when one is shown, since rich costs start-up time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from synapse_host.cli.terminal import Stages, printable


@contextmanager
def terminal_bar(label: str, total: int, *, unit: str) -> Iterator[Callable[[int], None]]:
    """Show one bar on stderr and yield what advances it; it disappears when the block ends."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn(f"{{task.completed:,.0f}} {unit}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as progress:
        yield partial(progress.advance, progress.add_task(label, total=total))


@contextmanager
def terminal_stages(label: str, *, rows: bool) -> Iterator[Stages]:
    """Show one bar that each stage of a job starts anew; *done* and *total* are rows, or else bytes."""
    counted = [MofNCompleteColumn()] if rows else [DownloadColumn(), TimeRemainingColumn()]
    columns = (TextColumn("{task.description:<24}", markup=False), BarColumn(bar_width=24), *counted)
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)

        def report(stage: str, done: int, total: int) -> None:
            progress.update(task, description=f"{label}: {printable(stage)}", completed=done, total=total or None)

        yield report


@contextmanager
def terminal_status() -> Iterator[Callable[[str], None]]:
    """Show a spinner and a text on stderr that ``show(text)`` replaces; both disappear when the block ends."""
    with RichConsole(stderr=True).status("") as status:
        # What is shown holds names from outside: no markup, and nothing that steers the terminal.
        yield lambda text: status.update(Text(printable(text)))
