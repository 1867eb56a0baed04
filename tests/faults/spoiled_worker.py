"""A scripted worker process whose first generation spoils one frame: ``spoiled_worker.py SCRIPT --socket PATH ...``.

The script's ``plan`` is a :class:`tests.faults.spoil.Plan`; its ``struck`` names a file that gets the time of the
spoiled frame (the clock is the same in every process of a machine).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from engines.runtime import main as runtime_main
from engines.runtime.transport import SocketTransport, Transport
from tests.faults.spoil import Plan, SpoiledWire
from tests.support import scripted


def main(argv: list[str]) -> int:
    script = scripted.read_script(argv[0])
    plan = Plan(**script["plan"]) if script.get("plan") else None
    connect = runtime_main.connect

    def spoiled(socket_path: str | None, pipe_name: str | None, *, deadline: float) -> Transport:
        wire = SpoiledWire(connect(socket_path, pipe_name, deadline=deadline)._socket, plan)  # type: ignore[attr-defined]
        wire.on_strike = lambda: scripted._publish(script["struck"], repr(time.monotonic()))
        return SocketTransport(wire)  # type: ignore[arg-type]

    runtime_main.connect = spoiled
    return scripted.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
