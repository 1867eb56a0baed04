"""The benchmark suite: one run, rivals in the same rounds, a table, a JSON document and a picture.

    synapse bench [--quick] [--only wire,lifecycle,scale,models,ray] [--out DIR]        or: python -m bench

Exit 0 when the run is complete, whether or not targets were reached: a figure is a finding, not a test. Ctrl-C ends it
in order, with 130; --guarded does so when stdin ends.
"""

from __future__ import annotations

import _thread
import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import lifecycle, machine, models, on_ray, picture, scale, wire
from bench.plan import Plan
from bench.rounds import Row
from synapse_host.errors import EXIT_INTERRUPTED

GROUPS = {
    "wire": wire.rows,
    "lifecycle": lifecycle.rows,
    "scale": scale.rows,
    "models": models.rows,
    "ray": on_ray.rows,
}
USUAL = ("wire", "lifecycle", "scale", "models")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite."""
    parser = argparse.ArgumentParser(prog="synapse bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: fewer rounds, smaller batches")
    parser.add_argument("--only", default=",".join(USUAL), metavar="GROUP,…", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench.json and bench.html here")
    parser.add_argument("--models-dir", type=Path, metavar="DIR")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of every contestant (default: usable cores)")
    parser.add_argument("--json", action="store_true", help="print the document on stdout")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--guarded", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    chosen = args.only.split(",")
    unknown = [name for name in chosen if name not in GROUPS]
    if unknown:
        parser.error(f"no group {unknown[0]!r}; the groups are {', '.join(GROUPS)}")
    logging.basicConfig(level=logging.CRITICAL)
    try:
        if args.guarded:
            # Whoever started a shell's background job has SIGINT ignored; here it comes from below alone.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=_end_with_stdin, daemon=True).start()
        return _report(args, chosen)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _end_with_stdin() -> None:
    """Interrupt this process when its parent closes the pipe, or dies however it may."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def _report(args: argparse.Namespace, chosen: Sequence[str]) -> int:
    """Run the chosen groups and hand their document over as *args* says."""
    say = (lambda text: None) if args.quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    document = run(chosen, quick=args.quick, models_dir=args.models_dir, threads=args.threads, say=say)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        (args.out / "bench.html").write_text(picture.page(document))
    if args.json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        print(text(document))
        if args.out is not None:
            print(f"\n{args.out / 'bench.json'}  {args.out / 'bench.html'}")
    return 0


def run(
    chosen: Sequence[str], *, quick: bool, models_dir: Path | None, threads: int | None, say: Any
) -> dict[str, Any]:
    """Measure the *chosen* groups and return the document."""
    begun, before = time.time(), machine.load()
    if before is not None and before > 0.5:
        say(f"load average {before}: other work on this machine spoils the figures")
    found: list[Row] = []
    with Plan.make(quick=quick, models_dir=models_dir, threads=threads) as plan:
        for name in chosen:
            say(f"{name} …")
            started = time.perf_counter()
            found += asyncio.run(GROUPS[name](plan))
            say(f"{name}: {time.perf_counter() - started:.0f} s")
        threads = plan.threads
    return {
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begun)),
        "quick": quick,
        "seconds": round(time.time() - begun, 1),
        "threads": threads,
        "load": {"before": before, "after": machine.load()},
        "machine": machine.describe(),
        "rows": [row.to_dict() for row in found],
    }


def text(document: dict[str, Any]) -> str:
    """Return the table for a terminal."""
    lines = []
    group = None
    for row in document["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines += ["", group]
        ours = f"{picture.number(row['ours'])} {row['unit']}" if row["ours"] is not None else "–"
        if row["ratio"] is not None:
            low, high = row["spread"]
            against = f"{row['ratio']:.2f} x [{low:.2f} .. {high:.2f}] {row['rival_name'].split(',')[0]}"
        else:
            against = "" if row["status"] == "measured" else f"{row['rival_name']}: {row['status']}"
        mark = {True: "reached", False: "NOT reached", None: ""}[row["reached"]]
        target = "" if row["target"] is None else f"target {row['target']:g} {mark}"
        lines.append(f"  {row['name']:<58} {ours:>15}  {against:<62} {target:<22} load {row['load']}")
    load = document["load"]
    lines += ["", f"{document['machine']['cpu']}, {document['machine']['cores']} cores, Python "
              f"{document['machine']['python']}; load {load['before']} before, {load['after']} after; "
              f"{document['seconds']:.0f} s"]  # fmt: skip
    return "\n".join(lines).lstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
