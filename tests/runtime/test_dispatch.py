"""Every check at the edge, by a call and without a socket."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import (
    Admitted,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    AnyRequest,
    EmbedBatch,
    Err,
    Evicted,
    Generate,
    Item,
    Load,
    Loaded,
    Ping,
    Pong,
    Pooling,
    Rerank,
    RerankSequences,
    Scores,
    Segment,
    Text,
    Unload,
    Unloaded,
    Vectors,
    encode,
)
from engines.runtime.dispatch import Answer, Dispatcher
from engines.runtime.engine import DeviceLost, ModelStatus
from engines.runtime.progress import silent
from tests.support.clock import ManualClock
from tests.support.toy_engine import ToyEngine

DIGEST = "sha256:" + "0" * 64


def ids(*values: int) -> memoryview:
    return memoryview(np.array(values, "<i4")).cast("B")


def floats(answer: Answer) -> list[float]:
    assert answer.payload is not None
    return np.frombuffer(answer.payload, "<f4").tolist()


def embed(counts: list[int], *, ref: str = "toy:0", packed_width: Any = msgspec.UNSET) -> EmbedBatch:
    items = [Item(str(index), count) for index, count in enumerate(counts)]
    return EmbedBatch("r", ref, Pooling.CLS, False, items, packed_width)


def rerank(query: int, counts: list[int]) -> Rerank:
    return Rerank("r", "toy:0", query, [Segment(count) for count in counts])


def sequences(counts: list[int]) -> RerankSequences:
    return RerankSequences("r", "toy:0", [Segment(count) for count in counts])


class Desk:
    """A dispatcher with one loaded toy model."""

    def __init__(self, engine: ToyEngine | None = None, *, max_frame: int = 2**20) -> None:
        self.engine = ToyEngine() if engine is None else engine
        self.clock = ManualClock()
        self.dispatcher = Dispatcher(self.engine, self.engine.identity(), max_frame=max_frame, clock=self.clock)
        assert isinstance(self.ask(load()).reply, Loaded)

    def ask(self, request: AnyRequest, payload: memoryview | None = None) -> Answer:
        return self.dispatcher.handle(request, payload, silent())

    def refusal(self, request: AnyRequest, payload: memoryview | None = None) -> Err:
        answer = self.ask(request, payload)
        assert isinstance(answer.reply, Err), answer.reply
        assert answer.payload is None
        assert answer.reply.req_id == request.req_id
        assert isinstance(self.ask(Ping("after")).reply, Pong)
        return answer.reply


def load(**changes: Any) -> Load:
    return msgspec.structs.replace(Load("r", "path", DIGEST, "gguf"), **changes)


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- what works ------------------------------------------------------------------------------------------------------


def test_embed(desk: Desk) -> None:
    answer = desk.ask(embed([2, 1, 3]), ids(1, 2, 3, 4, 5, 6))
    assert answer.reply == Vectors("r", dims=4, n=3)
    assert floats(answer)[::4] == [3.0, 3.0, 15.0]
    assert desk.engine.calls == [("embed", {"pooling": Pooling.CLS, "normalize": False, "packed_width": None})]


def test_rerank_separates_query_and_candidates(desk: Desk) -> None:
    answer = desk.ask(rerank(2, [1, 2]), ids(1, 1, 5, 6, 7))
    assert answer.reply == Scores("r")
    assert floats(answer) == [2005.0, 2013.0]


def test_rerank_sequences(desk: Desk) -> None:
    assert floats(desk.ask(sequences([2, 1]), ids(1, 2, 3))) == [3.0, 3.0]


def test_generate(desk: Desk) -> None:
    reply = desk.ask(Generate("r", "toy:0", 3), ids(1, 2)).reply
    assert isinstance(reply, Text)
    assert (reply.text, reply.n_prompt, reply.n_gen, reply.generated_token_ids) == ("xxx", 2, 3, [1, 1, 1])


def test_shapes_and_packed_widths() -> None:
    desk = Desk(ToyEngine(packed=(256,)))
    assert isinstance(desk.ask(AneAdmitShape("r", "toy:0", 128)).reply, Admitted)
    assert isinstance(desk.ask(AneAdmitPacked("r", "toy:0", 256)).reply, Admitted)
    assert isinstance(desk.ask(AneEvictShape("r", "toy:0", 128)).reply, Evicted)
    assert isinstance(desk.ask(AneEvictPacked("r", "toy:0", 256)).reply, Evicted)
    desk.ask(embed([1], packed_width=256), ids(1))
    assert desk.engine.calls[-1][1]["packed_width"] == 256


# --- counts and bytes ------------------------------------------------------------------------------------------------

BAD = {
    "no items": (embed([]), ids()),
    "no candidates": (rerank(1, []), ids(1)),
    "no sequences": (sequences([]), ids()),
    "257 items": (embed([1] * 257), ids(*range(257))),
    "257 candidates": (rerank(1, [1] * 257), ids(*range(258))),
    "257 sequences": (sequences([1] * 257), ids(*range(257))),
    "an item without tokens": (embed([1, 0]), ids(1)),
    "a candidate without tokens": (rerank(1, [0, 1]), ids(1, 2)),
    "a sequence without tokens": (sequences([0]), ids()),
    "a query without tokens": (rerank(0, [1]), ids(1)),
    "a prompt without tokens": (Generate("r", "toy:0", 1), ids()),
    "a grammar": (Generate("r", "toy:0", 1, "root ::= [a-z]"), ids(1)),
    "a blank grammar": (Generate("r", "toy:0", 1, " \n"), ids(1)),
    "too few ids": (embed([3]), ids(1, 2)),
    "too many ids": (embed([1]), ids(1, 2)),
    "too few ids for the query": (rerank(5, [1]), ids(1, 2)),
    "huge counts": (embed([2**32 - 1] * 256), ids(1)),
    "a huge query": (rerank(2**32 - 1, [1]), ids(1)),
    "half an id": (embed([1]), memoryview(b"\1\0\0\0\1\0")),
    "half an id in a prompt": (Generate("r", "toy:0", 1), memoryview(b"\1\0\0")),
    "a negative id": (embed([2]), ids(1, -1)),
    "a negative id in a query": (rerank(1, [1]), ids(-(2**31), 1)),
    "a negative id in a prompt": (Generate("r", "toy:0", 1), ids(-5)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_counts_and_bytes_are_invalid_requests(desk: Desk, name: str) -> None:
    request, payload = BAD[name]
    assert desk.refusal(request, payload).code is ErrorCode.INVALID_REQUEST
    assert desk.engine.calls == []


def test_the_message_tells_which_id_is_negative(desk: Desk) -> None:
    assert "token 2 has the negative id -7" in desk.refusal(embed([4]), ids(0, 1, -7, -8)).msg


def test_a_reply_that_would_not_fit_is_refused_before_computing() -> None:
    desk = Desk(ToyEngine(dims=100), max_frame=4096)
    desk.ask(embed([1] * 10), ids(*range(10)))
    desk.engine.calls.clear()
    error = desk.refusal(embed([1] * 11), ids(*range(11)))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "4400 bytes" in error.msg
    assert desk.engine.calls == []


def test_a_text_that_would_not_fit_is_refused() -> None:
    assert Desk(max_frame=500).refusal(Generate("r", "toy:0", 600), ids(1)).code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("request_", "payload"),
    [
        (embed([1], ref="toy:9"), ids(1)),
        (Rerank("r", "nope", 1, [Segment(1)]), ids(1, 2)),
        (RerankSequences("r", "", [Segment(1)]), ids(1)),
        (Generate("r", "toy:1", 1), ids(1)),
        (Unload("r", "toy:1"), None),
        (AneAdmitShape("r", "toy:1", 128), None),
        (AneEvictShape("r", "toy:1", 128), None),
    ],
)
def test_an_unknown_ref_is_model_not_loaded(desk: Desk, request_: AnyRequest, payload: memoryview | None) -> None:
    assert desk.refusal(request_, payload).code is ErrorCode.MODEL_NOT_LOADED


# --- what isn't served -----------------------------------------------------------------------------------------------


def test_a_type_beyond_serves_is_unsupported(desk: Desk) -> None:
    desk.engine.serves = frozenset()  # type: ignore[misc]
    for request, payload in [
        (embed([1]), ids(1)),
        (rerank(1, [1]), ids(1, 2)),
        (sequences([1]), ids(1)),
        (Generate("r", "toy:0", 1), ids(1)),
        (AneAdmitShape("r", "toy:0", 1), None),
        (AneEvictShape("r", "toy:0", 1), None),
    ]:
        error = desk.refusal(request, payload)
        assert error.code is ErrorCode.UNSUPPORTED_REQUEST
        assert error.msg == f"{request.__struct_config__.tag} is not supported by this worker"


def test_packed_frames_to_a_worker_without_packed_are_unsupported(desk: Desk) -> None:
    assert desk.refusal(AneAdmitPacked("r", "toy:0", 256)).code is ErrorCode.UNSUPPORTED_REQUEST
    assert desk.refusal(AneEvictPacked("r", "toy:0", 256)).code is ErrorCode.UNSUPPORTED_REQUEST


@pytest.mark.parametrize("packed", [None, (), (384,)])
def test_a_width_that_was_not_advertised(packed: tuple[int, ...] | None) -> None:
    desk = Desk(ToyEngine(packed=packed))
    assert desk.refusal(embed([1], packed_width=256), ids(1)).code is ErrorCode.UNSUPPORTED_PACKED_WIDTH
    if packed is not None:
        assert desk.refusal(AneAdmitPacked("r", "toy:0", 256)).code is ErrorCode.UNSUPPORTED_PACKED_WIDTH
        assert desk.refusal(AneEvictPacked("r", "toy:0", 256)).code is ErrorCode.UNSUPPORTED_PACKED_WIDTH


# --- models ----------------------------------------------------------------------------------------------------------


def test_refs_count_up_and_are_never_reused(desk: Desk) -> None:
    refs = []
    for _ in range(3):
        reply = desk.ask(load()).reply
        assert isinstance(reply, Loaded)
        refs.append(reply.model_ref)
        assert isinstance(desk.ask(Unload("r", reply.model_ref)).reply, Unloaded)
    assert refs == ["toy:1", "toy:2", "toy:3"]
    assert [model.closed for model in desk.engine.models] == [0, 1, 1, 1]


def test_a_second_model_where_one_is_the_limit() -> None:
    desk = Desk(ToyEngine(max_models=1))
    assert desk.refusal(load()).code is ErrorCode.CONFIG_INVALID
    assert len(desk.engine.models) == 1
    desk.ask(Unload("r", "toy:0"))
    assert isinstance(desk.ask(load()).reply, Loaded)


def test_cold_load_is_measured_around_the_engines_load(desk: Desk) -> None:
    def slow(request: Load, progress: object) -> None:
        desk.clock.advance(1.25)

    desk.engine.on_load = slow
    reply = desk.ask(load()).reply
    assert isinstance(reply, Loaded)
    assert reply.cold_load_ms == 1250


def test_buckets_are_told_only_where_there_are_some(desk: Desk) -> None:
    assert b"buckets" not in encode(desk.ask(load()).reply)
    desk.engine.buckets = (128, 256)
    reply = desk.ask(load()).reply
    assert isinstance(reply, Loaded)
    assert reply.buckets == [128, 256]


def test_close_closes_every_model_once(desk: Desk) -> None:
    desk.ask(load())
    desk.dispatcher.close()
    desk.dispatcher.close()
    assert [model.closed for model in desk.engine.models] == [1, 1]


# --- PONG ------------------------------------------------------------------------------------------------------------


def test_resident_memory_grows_with_what_is_touched() -> None:
    # A fresh process: in this one the kernel may take pages back while the block is written.
    script = (
        "from engines.runtime.dispatch import resident_bytes\n"
        "import mmap\n"
        "block = mmap.mmap(-1, 64 * 2**20)\n"
        "before = resident_bytes()\n"
        "block.write(bytes(64 * 2**20))\n"
        "print(resident_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    grown = int(done.stdout) / 2**20
    assert 60 < grown < 160  # the block, and perhaps still the bytes that filled it


def test_pong_omits_what_is_unknown(desk: Desk) -> None:
    assert set(msgspec.to_builtins(desk.ask(Ping("r")).reply)) == {"type", "req_id", "rss_mb", "models_loaded"}


def test_pong_takes_the_worst_share_and_maps_residents_by_ref(desk: Desk) -> None:
    desk.ask(load())
    statuses = iter([ModelStatus(0.97, (128, 256), (256, 128)), ModelStatus(0.91, (128,), (), (384,))])
    for model in desk.engine.models:
        status = next(statuses)
        model.status = lambda status=status: status  # type: ignore[method-assign]
    reply = desk.ask(Ping("r")).reply
    assert isinstance(reply, Pong)
    assert reply.placement_share == 0.91
    assert reply.buckets == [128, 256]
    assert reply.ane_resident_shapes == {"toy:0": [128, 256]}
    assert reply.ane_resident_packed == {"toy:1": [384]}


@pytest.mark.parametrize("share", [float("nan"), 1.5, -0.1])
def test_an_impossible_share_is_our_bug(desk: Desk, share: float) -> None:
    desk.engine.status = ModelStatus(placement_share=share)
    with pytest.raises(AssertionError):
        desk.ask(Ping("r"))


# --- what models do --------------------------------------------------------------------------------------------------


def hooked(result: Any) -> Desk:
    desk = Desk()

    def hook(**details: Any) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    desk.engine.hook = hook
    return desk


def test_nonfinite_scores() -> None:
    out = np.array([0.5, np.nan], np.float32)
    assert hooked(out).refusal(rerank(1, [1, 1]), ids(1, 2, 3)).code is ErrorCode.NONFINITE_OUTPUT
    assert hooked(out).refusal(sequences([1, 1]), ids(1, 2)).code is ErrorCode.NONFINITE_OUTPUT


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 4), np.float64),
        np.zeros((2, 4), np.float16),
        np.zeros((3, 4), np.float32),
        np.zeros((2, 5), np.float32),
        np.zeros(8, np.float32),
        np.zeros((4, 2), np.float32).T,
        [[0.0] * 4] * 2,
    ],
)
def test_a_wrong_dtype_shape_or_layout_is_our_bug(out: Any) -> None:
    with pytest.raises(AssertionError):
        hooked(out).ask(embed([1, 1]), ids(1, 2))


@pytest.mark.parametrize("code", list(ErrorCode))
def test_an_engine_error_becomes_err_with_its_code(code: ErrorCode) -> None:
    error = hooked(EngineError(code, "why")).refusal(embed([1]), ids(1))
    assert (error.code, error.msg) == (code, "why")


def test_memory_errors_are_oom() -> None:
    assert hooked(MemoryError()).refusal(embed([1]), ids(1)).code is ErrorCode.OOM
    desk = Desk()

    def no_memory(request: Load, progress: object) -> None:
        raise MemoryError

    desk.engine.on_load = no_memory
    assert desk.refusal(load()).code is ErrorCode.OOM


@pytest.mark.parametrize("bug", [RuntimeError("boom"), ValueError(), KeyError("x"), OSError(5, "io"), TimeoutError()])
def test_anything_else_is_a_bug_and_gets_out(bug: Exception) -> None:
    with pytest.raises(type(bug)):
        hooked(bug).ask(embed([1]), ids(1))


def test_a_lost_device_is_remembered() -> None:
    desk = hooked(DeviceLost(ErrorCode.INFERENCE_FAILED, "CUDA error 700"))
    assert not desk.dispatcher.device_lost
    assert desk.refusal(embed([1]), ids(1)).code is ErrorCode.INFERENCE_FAILED
    assert desk.dispatcher.device_lost


@pytest.mark.parametrize("max_frame", [200, 1024, 2**20])
@pytest.mark.parametrize("msg", ["\0" * 10_000, "é" * 10_000, "\udcff surrogate", "x" * 100_000])
@pytest.mark.report("huggingface/sentence-transformers#3920")
def test_an_error_message_is_cut_to_the_frame_and_valid(msg: str, max_frame: int) -> None:
    desk = Desk()
    desk.dispatcher.max_frame = max_frame

    def hook(**details: Any) -> Any:
        raise EngineError(ErrorCode.INFERENCE_FAILED, msg)

    desk.engine.hook = hook
    answer = desk.ask(embed([1]), ids(1))
    data = encode(answer.reply)
    assert len(data) <= max_frame
    assert len(data) <= 4096
    assert msgspec.json.decode(data)["code"] == "inference_failed"
