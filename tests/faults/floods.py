"""R12: 10 MiB on both pipes without a newline while the worker replies."""

from __future__ import annotations

import json

from synapse_host.errors import EngineCrashed
from tests.faults.arena import Arena, campaign_row, outcome_of, until
from tests.faults.ledger import Stopwatch

PATTERN = "".join(f"{n:06d}." for n in range(4001))
"""28,007 bytes: where a piece of the stream lies shows in it."""


@campaign_row("R12", "{mebibytes} MiB on each pipe without a newline, while replying", limit=1.0)
async def r12(ground: Arena, mebibytes: int) -> None:
    """No stall, the ring stays at its cap, and its content is exactly the end of what was written."""
    row = ground.row
    size = mebibytes * 2**20 + 12_345
    end = (PATTERN * 2)[: size % len(PATTERN) + len(PATTERN)].encode()
    pour = {"bytes": size, "text": PATTERN}
    go = ground.file("go")
    finished = [ground.file("done1"), ground.file("done2")]
    wait, *done = {"wait_for": str(go)}, *({"touch": str(path)} for path in finished)
    script = {
        "ready": [{"thread": [wait, {end: pour}, told]} for end, told in zip(("stdout", "stderr"), done, strict=True)],
        "rules": [{"first_id": 50, "do": [{"signal": "SIGKILL"}]}],
    }
    path = ground.file("script.json")
    path.write_text(json.dumps(script))  # too long for a command line
    lane = ground.lanes(str(path))
    await ground.history.embed(lane)
    ring = lane._workers.session._journal
    go.touch()
    most = 0
    with row.fault("two floods") as check:
        while not all(path.exists() for path in finished) or not row.times:
            watch = Stopwatch()
            await ground.history.embed(lane)
            row.took(*watch.read())
            most = max(most, sum(len(data) for _, data in ring.since(0)[0]))
        await until(lambda: ring.written >= 2 * size, "the last bytes")
        by_stream: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        for stream, data in ring.since(0)[0]:
            by_stream[stream] += data
        check(most <= 8192 == sum(map(len, by_stream.values())), f"the ring isn't full, or grew to {most}")
        for stream, data in by_stream.items():
            check(end.endswith(data), f"the last {len(data)} bytes of {stream} are not exact")
        outcome = await outcome_of(ground.history.embed(lane, 50))
        right = isinstance(outcome, EngineCrashed) and len(outcome.details["log_tail"]) >= 8192
        check(right, f"the tail is not in the answer: {outcome!r:.200}")
    row.notes |= {"replies_meanwhile": len(row.times), "ring_bytes": most}
