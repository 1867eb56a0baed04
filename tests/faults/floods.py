"""R12: 10 MiB on both pipes without a newline while the worker replies."""

from __future__ import annotations

import asyncio
import json

from synapse_host.errors import EngineCrashed
from tests.faults.arena import Arena, lane_row, until
from tests.faults.ledger import Stopwatch

PATTERN = "".join(f"{n:06d}." for n in range(4001))
"""28,007 bytes: where a piece of the stream lies shows in it."""


def _tail(size: int, count: int) -> bytes:
    """Return the last *count* bytes of *size* bytes of pattern."""
    start = size - count
    data = (PATTERN * (count // len(PATTERN) + 2)).encode()
    offset = start % len(PATTERN)
    return data[offset : offset + count]


@lane_row("R12", "{mebibytes} MiB on each pipe without a newline, while replying", limit=1.0)
async def r12(ground: Arena, mebibytes: int) -> None:
    """No stall, the ring stays at its cap, and its content is exactly the end of what was written."""
    size = mebibytes * 2**20 + 12_345
    row = ground.row
    done = ground.file("done")
    pour = {"bytes": size, "text": PATTERN}
    script = ground.file("script.json")
    go = {"wait_for": str(ground.file("go"))}
    background = [
        {"thread": [go, {"stdout": pour}, {"touch": f"{done}1"}]},
        *(go, {"stderr": pour}, {"touch": f"{done}2"}),
    ]
    script.write_text(
        json.dumps({"ready": [{"thread": background}], "rules": [{"first_id": 50, "do": [{"signal": "SIGKILL"}]}]})
    )
    lane = ground.lanes(str(script))
    finished = [ground.file("done1"), ground.file("done2")]
    await ground.history.embed(lane)
    ring = lane._workers.session._journal
    ground.file("go").touch()
    replies = 0
    most = 0
    while not all(path.exists() for path in finished) or not replies:
        watch = Stopwatch()
        await ground.history.embed(lane)
        row.took(*watch.read())
        replies += 1
        most = max(most, sum(len(data) for _, data in ring.since(0)[0]))
    row.injected = row.survived = 2
    row.notes |= {"replies_meanwhile": replies, "ring_bytes": most}
    row.check(most <= 8192, f"the ring grew to {most}")
    await until(lambda: ring.written >= 2 * size, "the last bytes")
    by_stream: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    for stream, data in ring.since(0)[0]:
        by_stream[stream] += data
    row.check(sum(map(len, by_stream.values())) == 8192, "the ring isn't full")
    for stream, data in by_stream.items():
        row.check(data == _tail(size, len(data)), f"the last {len(data)} bytes of {stream} are not exact")
    outcome = (await asyncio.gather(ground.history.embed(lane, 50), return_exceptions=True))[0]
    right = isinstance(outcome, EngineCrashed) and len(outcome.details["log_tail"]) >= 8192
    row.check(right, f"the tail is not in the answer: {outcome!r:.200}")
