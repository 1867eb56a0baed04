"""Measure the wire, the workers' lives and real models against what else is installed here, in the same rounds: medians
with their spread, ratios, targets. Needs a checkout; `make bench-rivals` installs rivals in an environment of their
own, and one that is absent is reported as not installed. Run it on a quiet machine.

Examples:
  synapse bench --quick
  synapse bench --out reports
  synapse bench --only wire --json
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from synapse_host.cli.parser import Parser, count
from synapse_host.errors import EXIT_FAILED, DeadlineExceeded, InvalidRequest
from synapse_host.placement import interpreter, places

if TYPE_CHECKING:
    import argparse

    from synapse_host.cli.console import Console

SUITE: Final = Path("bench") / "__main__.py"
END_S: Final = 10.0
"""Seconds that the suite gets to stop its hosts, workers and rivals and to remove its folder."""


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.flag("--quick", help="under 3 minutes: fewer rounds, smaller batches")
    parser.option("--only", "GROUP,…", "of wire, lifecycle, scale, models, ray (default: all but ray)")
    parser.option("--out", "DIR", "write bench.json and bench.html here", type=Path)
    parser.option("--threads", "N", "threads of every contestant (default: usable cores)", type=count)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the verb."""
    from synapse_host.placement.matrix import load

    if args.matrix is not None:
        load(args.matrix)  # The suite has its own; a typo is refused all the same, before minutes of work.
    root = checkout()
    folders = {"--out": args.out, "--models-dir": args.models_dir}
    values = {name: places.expanded(given).absolute() for name, given in folders.items() if given}
    values |= {"--only": args.only, "--threads": args.threads}
    flags = {"--quick": args.quick, "--json": console.json, "--quiet": console.quiet or console.json, "--guarded": True}
    command = list(interpreter.module("bench"))  # it runs in the checkout's own folder
    command += [word for name, value in values.items() if value for word in (name, str(value))]
    command += [name for name, wanted in flags.items() if wanted]
    try:
        code = run_suite(command, root, args.deadline)
    except subprocess.TimeoutExpired as exc:
        raise DeadlineExceeded(f"the benchmarks were not done within {args.deadline:g} s") from exc
    if code == EXIT_FAILED and console.json:
        raise RuntimeError("the benchmark suite failed; its own words are on stderr")
    return code


def run_suite(command: list[str], root: Path, seconds: float | None) -> int:
    """Run the suite to its end and return its exit code; it is gone when this returns or raises.

    The suite ends in order at an interrupt, and after *seconds* with TimeoutExpired.
    """
    # A group of its own: a terminal's Ctrl-C would reach it twice, from there and from us, and cut its end short.
    group = 0 if os.name == "posix" else None
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, process_group=group) as suite:  # noqa: S603
        try:
            return suite.wait(seconds)
        finally:
            _end(suite)


def _end(suite: subprocess.Popen[bytes]) -> None:
    """End the suite: by the end of its stdin, which it meets too if we are killed, and by force if that takes long."""
    assert suite.stdin is not None
    suite.stdin.close()
    try:
        with suppress(subprocess.TimeoutExpired):
            suite.wait(END_S)
    finally:
        suite.kill()
        suite.wait()


def checkout() -> Path:
    """Return the checkout that this installation belongs to, or else the current folder; InvalidRequest elsewhere."""
    import synapse_host

    for root in (Path(synapse_host.__file__).resolve().parents[1], Path.cwd()):
        if (root / SUITE).is_file() and (root / "engines").is_dir():
            return root
    raise InvalidRequest(
        f"the benchmark suite is part of a checkout and this is none (no {SUITE.as_posix()} beside the installed "
        "package or in the current folder). Clone the project and run `make bench` there"
    )
