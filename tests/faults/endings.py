"""R11 the host's sudden death, R13 its orderly one."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.arena import kill
from tests.faults.ledger import Row
from tests.support.lanes import alive

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


class HostProgram:
    """A host in a process and group of its own."""

    def __init__(self, mode: str, root: Path) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.host_program", mode, str(root)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> dict[str, Any]:
        """Return the next line it says."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            assert self.process.stderr is not None
            raise AssertionError(f"the host program ended with {self.process.wait()}: {self.process.stderr.read()}")
        return dict(json.loads(text))


@contextlib.contextmanager
def host_program(mode: str) -> Iterator[HostProgram]:
    """Run a host program; whatever it leaves is killed."""
    root = Path(tempfile.mkdtemp(prefix="syn-h-"))
    program = HostProgram(mode, root)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()
        shutil.rmtree(root, ignore_errors=True)


def r11(count: int) -> Any:
    """SIGKILL of the host: every worker is gone within a second, also one in a C call and one behind a wrapper."""
    row = Row("R11", f"{count} SIGKILLed hosts", limit=1.0)

    def body() -> None:
        survivors: dict[str, int] = {}
        slowest: dict[str, float] = {}
        for _ in range(count):
            with host_program("orphans") as program:
                pids = program.line()["pids"]
                row.injected += 1
                start = time.monotonic()
                program.process.kill()
                left = {name: pid for name, pid in pids.items() if alive(pid)}
                row.check(len(pids) >= 9, "not every kind of worker was there")
                while left and time.monotonic() - start < 3:
                    for name in [name for name, pid in left.items() if not alive(pid)]:
                        slowest[name] = max(slowest.get(name, 0.0), time.monotonic() - start)
                        del left[name]
                    time.sleep(0.002)
                row.took(time.monotonic() - start)
                for name, pid in left.items():
                    survivors[name] = pid
                    kill(pid)
                row.leaked += len(left)
                row.survived += not left
        row.check(not survivors, f"workers outlive their host: {sorted(survivors)}")
        row.notes["gone_after_ms"] = {name: round(value * 1000, 1) for name, value in slowest.items()}

    return row, body


def r13(count: int) -> Any:
    """SIGTERM: the running request is answered, queued ones are typed, exit 0; a second SIGTERM forces."""
    row = Row("R13", f"{count} SIGTERM drains, half of them forced", limit=3.0)

    def body() -> None:
        for n in range(count):
            forced = n % 2 == 1
            with host_program("drain") as program:
                ready = program.line()
                program.process.send_signal(signal.SIGTERM)
                row.check(program.line() == {"stopping": 1}, "the first SIGTERM")
                row.injected += 1
                if forced:
                    program.process.send_signal(signal.SIGTERM)
                    row.check(program.line() == {"stopping": 2}, "the second SIGTERM")
                else:
                    time.sleep(0.05)
                    row.check(program.process.poll() is None, "it did not wait for the running request")
                    (program.root / "go").touch()
                told = program.line()
                running, *queued = told["outcomes"]
                ending = running if running == "ok" else running["code"]
                right = ending == ("engine_crashed" if forced else "ok")
                row.check(right, f"the running request ends with {running}")
                typed = all(outcome != "ok" and outcome["code"] == "queue_full" for outcome in queued)
                row.check(typed and len(queued) == 5, f"the queued requests end with {queued}")
                status = program.process.wait(LIMIT_S)
                row.check(status == 0, f"exit status {status}")
                row.check(not alive(ready["pid"]), "the worker lives on")
                row.lost += told["lost"]
                row.mismatched += told["mismatched"]
                row.took(told["took"])
                row.survived += right and typed and status == 0

    return row, body
