"""Progress bars on a terminal. Imported only when one is shown, since rich costs start-up time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class TerminalBar:
    """A rich progress task behind the console's small interface."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: int = 1) -> None:
        """Count finished work."""
        self._progress.advance(self._task, amount)


@contextmanager
def terminal_bar(label: str, total: int | None, *, unit: str) -> Iterator[TerminalBar]:
    """Show one bar on stderr; it disappears when the block ends, what matters was printed by the block."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn(f"{{task.completed:,.0f}} {unit}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as progress:
        yield TerminalBar(progress, progress.add_task(label, total=total))


@contextmanager
def terminal_stages(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar that each stage of a job starts anew: ``report(stage, done, total)``, in bytes."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(bar_width=24), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)

        def report(stage: str, done: int, total: int) -> None:
            progress.update(task, description=f"{label}: {stage}", completed=done, total=total or None)

        yield report


@contextmanager
def terminal_rows(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar that each stage of a job starts anew: ``report(stage, done, total)``, in rows."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)

        def report(stage: str, done: int, total: int) -> None:
            progress.update(task, description=f"{label}: {stage}", completed=done, total=total or None)

        yield report


@contextmanager
def terminal_status() -> Iterator[Callable[[str], None]]:
    """Show a spinner and a text on stderr that ``show(text)`` replaces; both disappear when the block ends."""
    with RichConsole(stderr=True).status("") as status:
        # What is shown holds names from outside: no markup.
        yield lambda text: status.update(Text(text))
