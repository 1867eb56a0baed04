"""Generation in slices: whatever the cuts, the same text; and a caller who leaves costs the others one slice."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synapse_host.config import HostConfig
from synapse_host.errors import DeadlineExceeded, EngineCrashed, InvalidRequest, SequenceTooLong, SynapseError
from synapse_host.host import Host
from synapse_host.requests.generate import Spoken
from tests.support.lanes import on
from tests.support.small_bundle import write_bundle, write_matrix

STORY = "Es war einmal: 🌟🌞 ein König, 你好 — " * 3
BYTES = STORY.encode()
START = 256

CHARACTERS = st.sampled_from("ab é🌟你")
TEXTS = st.lists(CHARACTERS, max_size=30).map("".join)


# --- text out of slices ----------------------------------------------------------------------------------------------


@given(
    said=TEXTS.map(str.encode) | st.binary(max_size=20),
    cuts=st.lists(st.integers(1, 5), min_size=1),
    stop=st.lists(st.text(CHARACTERS, min_size=1, max_size=3), max_size=3),
)
def test_however_it_is_cut_the_text_is_that_of_one_long_generation(
    said: bytes, cuts: list[int], stop: list[str]
) -> None:
    spoken = Spoken(lambda id: bytes([id]), stop)
    start, pieces = 0, []
    while not spoken.stopped:
        end = start + cuts[len(pieces) % len(cuts)]
        piece = said[start:end]
        pieces.append(spoken.add(piece.decode("utf-8", "replace"), piece, last=end >= len(said)))
        if end >= len(said):
            break
        start = end
    whole = said.decode("utf-8", "replace")
    ends = sorted((whole.find(one) + len(one), whole.find(one)) for one in stop if one in whole)
    if not ends:
        assert ("".join(pieces), bytes(spoken.ids), spoken.stopped) == (whole, said, False)
        return
    assert ("".join(pieces), spoken.stopped) == (whole[: ends[0][1]], True)
    needed = next(n for n in range(len(said) + 1) if len(_certain(said[:n])) >= ends[0][0] or n == len(said))
    assert spoken.text == "".join(pieces) and bytes(spoken.ids) == said[:needed]


@pytest.mark.parametrize("stop", [5, ["a", 1], "", ["x" * 300], ["a"] * 17, b"a", None])
def test_what_is_no_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        Spoken(None, stop)


def _certain(said: bytes) -> str:

    return codecs.getincrementaldecoder("utf-8")("replace").decode(said)


# --- over a real worker ----------------------------------------------------------------------------------------------


@pytest.fixture
def tell(tmp_path: Path) -> Callable[..., Any]:
    """Return what opens a host whose worker tells STORY, its model loaded."""

    @asynccontextmanager
    async def opened(
        *rules: Any, slice: int = 16, bundle: Any = None, config: Any = None, **options: Any
    ) -> AsyncIterator[Host]:
        folder = write_bundle(
            tmp_path / "w", model_id="w", task="generate", of_bytes=True, **{"max_tokens": 4096, **(bundle or {})}
        )
        matrix = write_matrix(
            tmp_path, {"story": BYTES.hex(), "rules": list(rules), **options}, runtime_config=config or {}
        )
        found = HostConfig(slice=slice, shutdown_grace=5, queue_limit=2)
        async with Host.open(matrix, {"w": folder}, found) as host, asyncio.timeout(120):
            await host.load("w")
            yield host

    return opened


def requests(host: Host) -> int:
    return sum(host.counters["generate"].shared.counts)


@pytest.mark.process
@pytest.mark.parametrize("slice", [1, 16, 4096])
async def test_every_size_of_slice_says_the_same(tell: Any, slice: int) -> None:
    async with tell(slice=slice) as host:
        whole = await host.generate("w", "Erzähl!", max_tokens=None)
        assert (whole.text, whole.n_gen, whole.finish_reason) == (STORY, len(BYTES), "stop")
        assert bytes(whole.generated_token_ids) == BYTES and whole.n_prompt == len("Erzähl!".encode()) + 1
        short = await host.generate_ids("w", [START], 20)
        assert (short.text, short.n_gen, short.finish_reason) == (BYTES[:20].decode("utf-8", "replace"), 20, "length")
        cut = await host.generate("w", "x", max_tokens=None, stop=["König", "🌞"])
        end = STORY.index("🌞")
        assert (cut.text, cut.finish_reason) == (STORY[:end], "stop")
        assert cut.n_gen == len(STORY[: end + 1].encode())
        assert host.counters["generate"].requests == {("load", "ok"): 1, ("generate", "ok"): 3}


@pytest.mark.process
async def test_a_stream_says_it_in_pieces_of_whole_characters(tell: Any) -> None:
    async with tell() as host:
        pieces = [piece async for piece in host.generate_stream("w", "x", stop="no such")]
        assert "".join(piece.text for piece in pieces) == STORY and len(pieces) == len(BYTES) // 16 + 1
        assert not any("\ufffd" in piece.text for piece in pieces)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        assert [piece.n_gen for piece in pieces][:2] == [16, 32] and {piece.n_prompt for piece in pieces} == {2}
        async with aclosing(host.generate_stream("w", "x")) as stream:
            assert (await anext(stream)).n_gen == 16
        assert host.counters["generate"].requests["generate", "cancelled"] == 1


@pytest.mark.process
async def test_callers_take_turns_and_no_full_queue_ends_who_was_let_in(tell: Any) -> None:
    order: list[int] = []

    async def one(host: Host, number: int) -> None:
        async for _ in host.generate_stream("w", "x", max_tokens=64):
            order.append(number)

    async with tell() as host:
        # One runs and two may wait: every later slice of the three comes to a full queue.
        await asyncio.gather(*(one(host, number) for number in range(3)))
        assert order == [0, 1, 2] * 4


@pytest.mark.process
async def test_a_deadline_and_a_caller_who_leaves_end_with_the_slice(tell: Any) -> None:
    slow = on("GENERATE", {"sleep": 3}, nth=[3, 5])

    async with tell(slow) as host:
        with pytest.raises(DeadlineExceeded) as caught:
            await host.generate("w", "x", max_tokens=None, deadline=2)
        details = caught.value.details
        assert (details["text"], details["n_gen"]) == (_certain(BYTES[:32]), 32) and not caught.value.safe_to_retry
        sent = requests(host)
        leaving = asyncio.create_task(host.generate("w", "x", max_tokens=None))
        while requests(host) < sent + 2:
            await asyncio.sleep(0.01)
        leaving.cancel()
        assert (await host.generate_ids("w", [START], 3)).n_gen == 3
        assert requests(host) == sent + 3, "the one who left was served on"
        assert host.health()["lanes"]["generate"]["strikes"] == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("action", "kind", "code"),
    [
        ({"signal": "SIGKILL"}, EngineCrashed, "engine_crashed"),
        ({"err": {"code": "oom", "msg": "no room"}}, SynapseError, "oom"),
    ],
)
async def test_an_error_in_the_middle_carries_the_text_so_far(tell: Any, action: Any, kind: Any, code: str) -> None:
    async with tell(on("GENERATE", action, nth=3)) as host:
        seen = ""
        with pytest.raises(kind) as caught:
            async for piece in host.generate_stream("w", "x"):
                seen += piece.text
        error = caught.value
        assert (error.code, error.details["text"], error.details["n_gen"]) == (code, seen, 32)
        assert error.safe_to_retry and seen == _certain(BYTES[:32])
        if code == "engine_crashed":
            assert error.details["stage"] == "generate" and error.details["signal"] == "SIGKILL"
        with pytest.raises(SequenceTooLong) as early:
            await host.generate("w", "x" * 5000)
        assert "text" not in early.value.details


@pytest.mark.process
@pytest.mark.parametrize(
    ("bundle", "rules"),
    [
        ({"tokenizer": False}, []),
        ({}, [on("GENERATE", {"reply": {"drop": ["generated_token_ids"]}})]),
    ],
    ids=["no tokenizer", "a worker that names no ids"],
)
async def test_what_can_not_be_cut_is_asked_for_at_once(tell: Any, bundle: Any, rules: Any) -> None:
    async with tell(*rules, bundle=bundle) as host:
        found = await host.generate_ids("w", [START], None, stop="🌞")
        assert (found.text, found.finish_reason) == (STORY[: STORY.index("🌞")], "stop")
        assert (await host.generate_ids("w", [START], 40)).text == BYTES[:40].decode("utf-8", "replace")


@pytest.mark.process
async def test_the_context_is_the_limit_and_the_matrix_may_say_less(tell: Any) -> None:
    async with tell(bundle={"max_tokens": 40}) as host:
        found = await host.generate_ids("w", [START] * 30, None)
        assert (found.n_gen, found.finish_reason) == (10, "length")
        with pytest.raises(SequenceTooLong):
            await host.generate_ids("w", [START] * 30, 11)
        with pytest.raises(SequenceTooLong):
            await host.generate_ids("w", [START] * 40, None)
    async with tell(config={"microllm_max_tokens": "5"}) as host:
        assert (await host.generate_ids("w", [START], None)).n_gen == 5
        with pytest.raises(InvalidRequest, match="microllm_max_tokens"):
            await host.generate_ids("w", [START], 6)
