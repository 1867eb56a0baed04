"""Eight clients ask a served host whose workers are killed every second: each gets its own right answer or an error."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from typing import Any

import pytest

from tests.serve.conftest import Serve

pytestmark = [pytest.mark.process, pytest.mark.fault]

CODES = {"engine_crashed", "queue_full"}
ALL = ("toy", "judge", "writer")
KINDS: list[tuple[str, Any]] = [
    ("/v1/embeddings", lambda n: {"input": [[2, 4 + n % 6, 4 + n // 6, 3]], "encoding_format": "base64"}),
    ("/v1/embeddings", lambda n: {"input": f"{'abcdef'[n % 6]} {'abcdef'[n // 6 % 6]}"}),
    ("/v1/rerank", lambda n: {"query": "abcdef"[n % 6], "documents": ["abcdef"[n // 6 % 6], "query"]}),
    ("/v1/completions", lambda n: {"prompt": f"{'abcdef'[n % 6]} {'abcdef'[n // 6 % 6]}", "stream": True}),
]
POOL = 36


def gist(text: str) -> Any:
    """What of an answer is the caller's own: numbers or text, without the id of this one answer."""
    if text.startswith("data:"):
        events = [json.loads(block[6:]) for block in text.split("\n\n") if block.startswith("data: {")]
        if "error" in events[-1]:
            return events[-1]
        assert text.endswith("data: [DONE]\n\n")
        return "".join(event["choices"][0]["text"] for event in events)
    answer = json.loads(text)
    return answer.get("data") or answer.get("results") or answer


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.soak)])
async def test_nobody_gets_another_s_answer(serve: Serve, seconds: int) -> None:
    async with serve(models=ALL, cool_down=0.2) as up:
        loop = asyncio.get_running_loop()
        expected = {
            (kind, n): gist((await up.call(KINDS[kind][0], **KINDS[kind][1](n))).text)
            for kind in range(len(KINDS))
            for n in range(POOL)
        }
        assert all(len({json.dumps(expected[kind, n]) for n in range(POOL)}) == POOL for kind in range(len(KINDS)))
        end = loop.time() + seconds
        right, failed, kills = [0] * 8, [0] * 8, 0

        async def client(number: int) -> None:
            kind, chance = number % len(KINDS), random.Random(number)
            route, body = KINDS[kind]
            while loop.time() < end:
                n = chance.randrange(POOL)
                answer = await up.call(route, **body(n))
                found = gist(answer.text)
                if isinstance(found, dict) and "error" in found:
                    assert found["error"]["code"] in CODES, found
                    failed[number] += 1
                    await asyncio.sleep(0.02)
                else:
                    assert answer.status_code == 200 and found == expected[kind, n]
                    right[number] += 1

        async def killer() -> None:
            nonlocal kills
            served: dict[str, int] = {}
            while loop.time() < end:
                await asyncio.sleep(1)
                for lane_id, lane in up.host.health()["lanes"].items():
                    answered = sum(map(sum, (one.counts for one in up.host.counters[lane_id].durations.values())))
                    # On a busy machine a worker takes longer than a second to come: each serves something first.
                    if lane["worker_pid"] is not None and answered > served.get(lane_id, 0):
                        os.kill(lane["worker_pid"], signal.SIGKILL)
                        kills, served[lane_id] = kills + 1, answered

        await asyncio.gather(killer(), *map(client, range(8)))
        print(f"{sum(right)} right, {sum(failed)} failed, {kills} kills")
        assert all(right) and kills >= seconds // 3 and sum(failed) > 0
