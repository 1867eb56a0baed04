"""Remove one guard at a time and see that its report's test fails.

    python -m tests.faults.guards [--only NN ...] [--json FILE] [--jobs N]

The tree is copied, so nothing of the checkout is changed. First every test must pass on the untouched copy; then, guard
by guard, the copy is changed, the one test runs, and the change is undone. A test that still passes protects nothing:
the guard is listed as ``unnoticed`` and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.faults.reports.registry import CANNOT_APPLY, REPORTS, Guard, Report  # noqa: E402

LIMIT_S: Final = 120.0
"""A test without its guard may hang; that is a way to fail."""
SCENARIO_S: Final = "12"
TREE: Final = ("engines", "synapse_host", "tests", "pyproject.toml", "hw_matrix.yaml")


@dataclasses.dataclass(frozen=True)
class Removal:
    """What came of removing one guard."""

    number: int
    source: str
    test: str
    guard: str
    what: str
    outcome: str
    """``noticed`` (the test failed), ``hung`` (it failed by never ending), ``unnoticed``, or ``error`` (no verdict)."""
    seconds: float
    detail: str


class Copy:
    """One copy of the tree in which guards are removed and put back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp = int(time.time()) - 10_000_000
        skip = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache")
        for name in TREE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=skip)
            elif source.exists():
                shutil.copy2(source, folder / name)

    def write(self, file: Path, text: str) -> None:
        """Replace a file; its time is new, so that no compiled file of before is taken for it."""
        file.write_text(text, encoding="utf-8")
        self._stamp += 10
        os.utime(file, (self._stamp, self._stamp))

    def run(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Run pytest in the copy; (None, output) when it didn't end."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=short", *tests]
        environment = {
            **os.environ,
            "SYNAPSE_REPORT_LIMIT": SCENARIO_S,
            "PYTHONPATH": str(self.folder),
            "PYTHONWARNINGS": "",
        }
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = child.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            output.seek(0)
            return status, output.read().decode("utf-8", "replace")

    def without(self, report: Report, guard: Guard) -> Removal:
        """Remove *guard*, run the report's test, put the guard back."""
        started = time.monotonic()
        before = {edit.file: (self.folder / edit.file).read_text(encoding="utf-8") for edit in guard.edits}
        outcome, detail = "error", ""
        try:
            after = dict(before)
            for edit in guard.edits:
                found = after[edit.file].count(edit.old)
                if found != 1:
                    raise ValueError(f"{edit.file} has {found} times: {edit.old.strip().splitlines()[0]}")
                after[edit.file] = after[edit.file].replace(edit.old, edit.new)
            for name, text in after.items():
                compile(text, name, "exec")
                self.write(self.folder / name, text)
            status, output = self.run([report.test], LIMIT_S)
            outcome, detail = judge(status, output)
        except (ValueError, SyntaxError) as exc:
            detail = str(exc)
        finally:
            for name, text in before.items():
                self.write(self.folder / name, text)
        seconds = round(time.monotonic() - started, 2)
        return Removal(report.number, report.source, report.test, guard.where, guard.what, outcome, seconds, detail)


def judge(status: int | None, output: str) -> tuple[str, str]:
    """Return the outcome of a run without a guard, and its reason."""
    # A test's own failure says more than what it left behind.
    _, _, failures = output.rpartition("= FAILURES =")
    lines = [line for line in failures.splitlines() if line.startswith("E  ")]
    first = lines[0][1:].strip()[:160] if lines else ""
    if status is None:
        return "hung", f"no end within {LIMIT_S:g} s"
    if status == 0:
        passed = " passed" in output
        return ("unnoticed", "the test passed") if passed else ("error", "the test was skipped")
    if status < 0:
        return "noticed", f"the test's process died of signal {-status}"
    if status == 1:
        return "noticed", first
    return "error", (output.strip().splitlines() or ["no output"])[-1][:160]


def remove_all(reports: Sequence[Report], jobs: int) -> Iterator[Removal]:
    """Yield a removal for every guard of *reports*."""
    work = [(report, guard) for report in reports for guard in report.guards]
    with tempfile.TemporaryDirectory(prefix="guards-") as base:
        copies: Queue[Copy] = Queue()
        for number in range(jobs):
            folder = Path(base, str(number))
            folder.mkdir()
            copies.put(Copy(folder))
        first = copies.get()
        status, output = first.run([report.test for report in reports], 1200.0)
        copies.put(first)
        if status != 0:
            raise SystemExit("the tests don't pass with every guard in place:\n" + output[-4000:])

        def one(item: tuple[Report, Guard]) -> Removal:
            copy = copies.get()
            try:
                return copy.without(*item)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, work)


def summary(removals: Sequence[Removal]) -> dict[str, Any]:
    """Return the JSON report."""
    noticed = [removal for removal in removals if removal.outcome in ("noticed", "hung")]
    return {
        "guards": len(removals),
        "noticed": len(noticed),
        "rate": round(len(noticed) / len(removals), 4) if removals else None,
        "cannot_apply": [dataclasses.asdict(item) for item in CANNOT_APPLY],
        "removals": [dataclasses.asdict(removal) for removal in removals],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print a table; 1 when a guard's removal went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NN", type=int, nargs="+", help="numbers of reports")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="copies that run side by side (default 2)")
    arguments = parser.parse_args(argv)
    reports = [report for report in REPORTS if not arguments.only or report.number in arguments.only]
    if not reports:
        print("no such report has a guard", file=sys.stderr)
        return 2
    removals = []
    print(f"{'no.':>3}  {'outcome':9}  {'s':>6}  guard")
    for removal in remove_all(reports, max(1, arguments.jobs)):
        removals.append(removal)
        print(
            f"{removal.number:>3}  {removal.outcome:9}  {removal.seconds:6.1f}  {removal.guard}: {removal.what}",
            flush=True,
        )
        if removal.outcome in ("unnoticed", "error"):
            print(f"                        {removal.detail}", flush=True)
    found = summary(removals)
    print(f"{found['noticed']} of {found['guards']} removals noticed; {len(CANNOT_APPLY)} report(s) cannot apply")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if found["noticed"] == found["guards"] else 1


if __name__ == "__main__":
    sys.exit(main())
