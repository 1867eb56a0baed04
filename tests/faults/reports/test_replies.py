"""Replies, order and cancellation: reports 24 to 28."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random

import numpy as np
import pytest

from engines.protocol.messages import Load, Pooling
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import WorkerOptions
from engines.runtime.progress import silent
from synapse_host import Host
from synapse_host.errors import DeadlineExceeded, QueueFull
from tests.faults.reports.trial import run_limited, toy_host
from tests.support import scripted, toy_models
from tests.support.lanes import EMBED, FAST, POISON, crash, embed, on, poison, serve, soon, until
from tests.support.toy_gguf import build_toy

pytestmark = [pytest.mark.process, pytest.mark.fault]


@pytest.mark.report("redis/redis-py#2624")
async def test_report_24_a_cancelled_command_leaves_its_reply(make, tmp_path):
    """redis/redis-py#2624 (also 2665): the next caller read a cancelled one's reply; ours is drained first."""
    go = tmp_path / "go"
    lane = make(poison({"wait_for": str(go)}))
    await lane.load()
    with pytest.raises(DeadlineExceeded):
        await serve(lane, POISON, deadline=soon(0.05))
    cancelled = asyncio.create_task(serve(lane, 21))
    following = [asyncio.create_task(serve(lane, n)) for n in range(30, 35)]
    await asyncio.sleep(0)
    cancelled.cancel()
    go.touch()
    await asyncio.gather(*following)

    async def impatient(n: int) -> None:
        with contextlib.suppress(DeadlineExceeded):
            await serve(lane, n, deadline=soon(0.0001 * (n % 40)))

    await asyncio.gather(*(impatient(n) for n in range(200)))
    await serve(lane)
    assert lane.health()["strikes"] == 0 and lane.health()["generation"] == 1


@pytest.mark.report("huggingface/sentence-transformers#2955")
async def test_report_25_two_callers_share_a_pool(make):
    """huggingface/sentence-transformers#2955: 100 came back as 98 and 102; replies belong to their req_id."""
    lane = make()

    async def caller(number: int) -> None:
        for batch in range(10):
            rows = [[1000 * number + 100 * batch + n, n + 1] for n in range(100)]
            reply, vectors = await lane.submit(embed(*rows), stage=EMBED)
            assert reply.n == 100
            assert vectors.reshape(100, 8).tolist() == [scripted.expected_vector(row) for row in rows]

    await asyncio.gather(*(caller(number) for number in range(1, 5)))
    # A worker that answers another request than it was asked is not believed.
    confused = make(poison({"reply": {"set": {"req_id": "other"}}}))
    assert (await crash(confused)).details["cause"] == "protocol"


@pytest.mark.report("ollama/ollama#6187")
def test_report_26_shuffled_batches(tmp_path):
    """ollama/ollama#6187: vectors of a batch came back in another order; ours go by row, over several exchanges too."""

    async def scenario():
        matrix, models = toy_host(tmp_path)
        rows = [[n % 50 + 1, n % 7 + 1, n + 1] for n in range(700)]
        order = random.Random(26).sample(range(700), 700)
        async with Host.open(matrix, models, FAST) as host:
            batch = await host.embed_ids("toy", rows)
            permuted = await host.embed_ids("toy", [rows[n] for n in order])
            singles = [(await host.embed_ids("toy", [rows[n]]))[0] for n in (0, 255, 256, 511, 512, 699)]
        assert batch.tolist() == [scripted.expected_vector(row) for row in rows]
        assert np.array_equal(permuted, batch[order])
        assert np.array_equal(np.stack(singles), batch[[0, 255, 256, 511, 512, 699]])

    run_limited(scenario)


def token_batch(rows: list[list[int]]) -> TokenBatch:
    flat = np.array([token for row in rows for token in row], np.int32)
    return TokenBatch(flat, np.cumsum([0, *map(len, rows)]).astype(np.int32))


@pytest.mark.report("ollama/ollama#6262")
@pytest.mark.llama
def test_report_27_vectors_that_change_with_the_batch(tmp_path):
    """ollama/ollama#6262: vectors degraded with the batch's size; a row sees its own tokens alone, at any size."""
    from engines.llama.engine import LlamaEngine

    toy = build_toy(tmp_path, "bert", toy_models.write_bert)
    engine = LlamaEngine(WorkerOptions(device="cpu"))
    load = Load("load", str(toy.path), toy.digest, "gguf", {"threads": "1"})
    model = engine.load(load, progress=silent())
    try:

        def vectors(rows: list[list[int]]) -> np.ndarray:
            return model.embed(
                token_batch(rows), pooling=Pooling.MEAN, normalize=True, packed_width=None, progress=silent()
            )

        row = toy_models.toy_rows(1, [9])[0]
        others = toy_models.toy_rows(2, [3 + n % 13 for n in range(63)])
        alone = vectors([row])[0]
        for size in (2, 3, 8, 33, 64):
            for place in (0, size // 2, size - 1):
                batch = others[: size - 1]
                batch.insert(place, row)
                assert float(vectors(batch)[place] @ alone) >= 0.9999, (size, place)
    finally:
        model.close()


@pytest.mark.report("huggingface/text-embeddings-inference#424")
async def test_report_28_a_full_queue(make, tmp_path):
    """huggingface/text-embeddings-inference#424: a full queue ended the server; here it is an answer to one caller."""
    go = tmp_path / "go"
    lane = make(
        {"rules": [on("EMBED_BATCH", {"wait_for": str(go)}, first_id=POISON)]},
        config=dataclasses.replace(FAST, queue_limit=4),
    )
    await lane.load()
    running = [asyncio.create_task(serve(lane, n)) for n in (POISON, 1, 2, 3, 4)]
    await until(lambda: lane.health()["waiting"] == 4)
    for _ in range(3):
        with pytest.raises(QueueFull) as caught:
            await serve(lane)
        assert caught.value.transient and caught.value.safe_to_retry and caught.value.retry_after_ms == 100
    go.touch()
    await asyncio.gather(*running)
    assert lane.health()["strikes"] == 0
