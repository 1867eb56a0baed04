"""Rival processes: started in their own environment, asked one thing at a time, or reported as not installed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bench.plan import ROOT

if TYPE_CHECKING:
    from bench.plan import Plan

PROGRAM = Path(__file__).with_name("rival.py")
ENVIRONMENT = ROOT / ".venv-rivals"
APART = {"infinity": ROOT / ".venv-infinity"}
"""Rivals whose pinned dependencies fit beside no other: each has an environment of its own."""
ANSWER_S = 900.0
SETTLE_S = 0.05
"""Between two turns: thread pools that spin after their work have stopped by then."""


class Missing(Exception):
    """The rival can't be had here; the text says why."""


class Rival:
    """A running rival."""

    def __init__(self, kind: str, plan: Plan, **options: Any) -> None:
        """Start it and wait until it is ready; Missing says why it isn't."""
        python = interpreter(kind)
        if python is None:
            raise Missing("not installed (make bench-rivals)")
        document = json.dumps({"folder": str(plan.folder), "threads": plan.threads, **options})
        environment = {**os.environ, "OMP_NUM_THREADS": str(plan.threads), "TOKENIZERS_PARALLELISM": "true"}
        self._errors = (plan.folder / f"{kind}.log").open("wb")
        self._process = subprocess.Popen(
            [str(python), str(PROGRAM), kind, document],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
        )  # fmt: skip
        first = self._line()
        if "error" in first:
            self.close()
            raise Missing(_short(first["error"]))
        self.what = first["what"]
        self.first: list[float] = []

    def ask(self, op: str, **arguments: Any) -> float:
        """Do one thing; return the seconds that the rival took by its own clock."""
        time.sleep(SETTLE_S)
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        stdin.flush()
        answer = self._line()
        if "error" in answer:
            raise Missing(_short(answer["error"]))
        self.first = answer["first"]
        return float(answer["seconds"])

    def _line(self) -> dict[str, Any]:
        stdout: IO[bytes] | None = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], ANSWER_S)
        line = stdout.readline() if ready else b""
        if not line:
            code = self._process.poll()
            self.close()
            return {"error": "no answer in time" if code is None else f"ended with {code}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def interpreter(kind: str) -> Path | None:
    """Return the Python that has *kind*, or None."""
    if kind == "llama-generate":  # the very library that our worker uses, without us
        return Path(sys.executable)
    python = APART.get(kind, ENVIRONMENT) / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    return python if python.exists() else None


def _short(text: str) -> str:
    return "not installed: " + text if "No module named" in text else f"does not run here: {text[:160]}"
