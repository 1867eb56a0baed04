"""Every check at the edge, by a call and without a socket."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from engines.protocol import messages as m
from engines.protocol.errors import EngineError, ErrorCode
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


def embed(counts: list[int], *, ref: str = "toy:0", packed_width: Any = msgspec.UNSET) -> m.EmbedBatch:
    items = [m.Item(str(index), count) for index, count in enumerate(counts)]
    return m.EmbedBatch("r", ref, m.Pooling.CLS, False, items, packed_width)


def rerank(query: int, counts: list[int]) -> m.Rerank:
    return m.Rerank("r", "toy:0", query, [m.Segment(count) for count in counts])


def sequences(counts: list[int]) -> m.RerankSequences:
    return m.RerankSequences("r", "toy:0", [m.Segment(count) for count in counts])


class Desk:
    """A dispatcher with one loaded toy model."""

    def __init__(self, engine: ToyEngine | None = None, *, max_frame: int = 2**20) -> None:
        self.engine = ToyEngine() if engine is None else engine
        self.clock = ManualClock()
        self.dispatcher = Dispatcher(self.engine, self.engine.identity(), clock=self.clock)
        self.dispatcher.max_frame = max_frame
        assert isinstance(self.ask(load()).reply, m.Loaded)

    def ask(self, request: m.AnyRequest, payload: memoryview | None = None) -> Answer:
        return self.dispatcher.handle(request, payload, silent())

    def refusal(self, request: m.AnyRequest, payload: memoryview | None = None) -> m.Err:
        answer = self.ask(request, payload)
        assert isinstance(answer.reply, m.Err), answer.reply
        assert answer.payload is None
        assert answer.reply.req_id == request.req_id
        assert isinstance(self.ask(m.Ping("after")).reply, m.Pong)
        return answer.reply


def load(**changes: Any) -> m.Load:
    return msgspec.structs.replace(m.Load("r", "path", DIGEST, "gguf"), **changes)


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "payload", "reply", "numbers", "call"),
    [
        (
            *(embed([2, 1, 3]), ids(1, 2, 3, 4, 5, 6), m.Vectors("r", dims=4, n=3), [3.0, 3.0, 15.0]),
            ("embed", {"pooling": m.Pooling.CLS, "normalize": False, "packed_width": None}),
        ),
        (
            *(embed([1], packed_width=256), ids(1), m.Vectors("r", dims=4, n=1), [1.0]),
            ("embed", {"pooling": m.Pooling.CLS, "normalize": False, "packed_width": 256}),
        ),
        (rerank(2, [1, 2]), ids(1, 1, 5, 6, 7), m.Scores("r"), [2005.0, 2013.0], None),
        (sequences([2, 1]), ids(1, 2, 3), m.Scores("r"), [3.0, 3.0], None),
        (
            *(m.Generate("r", "toy:0", 3), ids(1, 2)),
            *(m.Text("r", "xxx", 2, 3, m.FinishReason.LENGTH, [1, 1, 1]), None, None),
        ),
        (m.AneAdmitShape("r", "toy:0", 128), None, m.Admitted, None, None),
        (m.AneAdmitPacked("r", "toy:0", 256), None, m.Admitted, None, None),
        (m.AneEvictShape("r", "toy:0", 128), None, m.Evicted("r"), None, None),
        (m.AneEvictPacked("r", "toy:0", 256), None, m.Evicted("r"), None, None),
    ],
)
def test_every_request_is_answered(request_: Any, payload: Any, reply: Any, numbers: Any, call: Any) -> None:
    desk = Desk(ToyEngine(packed=(256,)))
    answer = desk.ask(request_, payload)
    assert answer.reply == reply or type(answer.reply) is reply
    if numbers is None:
        assert answer.payload is None
    else:
        assert floats(answer)[:: 4 if isinstance(answer.reply, m.Vectors) else 1] == numbers
    assert call is None or desk.engine.calls == [call]


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
    "a prompt without tokens": (m.Generate("r", "toy:0", 1), ids()),
    "a grammar": (m.Generate("r", "toy:0", 1, "root ::= [a-z]"), ids(1)),
    "a blank grammar": (m.Generate("r", "toy:0", 1, " \n"), ids(1)),
    "too few ids": (embed([3]), ids(1, 2)),
    "too many ids": (embed([1]), ids(1, 2)),
    "too few ids for the query": (rerank(5, [1]), ids(1, 2)),
    "huge counts": (embed([2**32 - 1] * 256), ids(1)),
    "a huge query": (rerank(2**32 - 1, [1]), ids(1)),
    "half an id": (embed([1]), memoryview(b"\1\0\0\0\1\0")),
    "half an id in a prompt": (m.Generate("r", "toy:0", 1), memoryview(b"\1\0\0")),
    "a negative id": (embed([2]), ids(1, -1)),
    "a negative id in a query": (rerank(1, [1]), ids(-(2**31), 1)),
    "a negative id in a prompt": (m.Generate("r", "toy:0", 1), ids(-5)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_counts_and_bytes_are_invalid_requests(desk: Desk, name: str) -> None:
    request, payload = BAD[name]
    assert desk.refusal(request, payload).code is ErrorCode.INVALID_REQUEST
    assert desk.engine.calls == []


def test_a_reply_that_would_not_fit_is_refused_before_computing() -> None:
    assert Desk(max_frame=500).refusal(m.Generate("r", "toy:0", 600), ids(1)).code is ErrorCode.INVALID_REQUEST
    desk = Desk(ToyEngine(dims=100), max_frame=4096)
    desk.ask(embed([1] * 10), ids(*range(10)))
    desk.engine.calls.clear()
    error = desk.refusal(embed([1] * 11), ids(*range(11)))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "4400 bytes" in error.msg
    assert desk.engine.calls == []


@pytest.mark.parametrize(
    ("request_", "payload"),
    [
        (embed([1], ref="toy:9"), ids(1)),
        (m.Rerank("r", "nope", 1, [m.Segment(1)]), ids(1, 2)),
        (m.RerankSequences("r", "", [m.Segment(1)]), ids(1)),
        (m.Generate("r", "toy:1", 1), ids(1)),
        (m.Unload("r", "toy:1"), None),
        (m.AneAdmitShape("r", "toy:1", 128), None),
        (m.AneEvictShape("r", "toy:1", 128), None),
    ],
)
def test_an_unknown_ref_is_model_not_loaded(desk: Desk, request_: m.AnyRequest, payload: memoryview | None) -> None:
    assert desk.refusal(request_, payload).code is ErrorCode.MODEL_NOT_LOADED


# --- what isn't served -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [None, (), (384,)])
def test_what_a_worker_does_not_serve_or_advertise(packed: tuple[int, ...] | None) -> None:
    desk = Desk(ToyEngine(packed=packed))
    width = ErrorCode.UNSUPPORTED_PACKED_WIDTH
    assert desk.refusal(embed([1], packed_width=256), ids(1)).code is width
    for request in (m.AneAdmitPacked("r", "toy:0", 256), m.AneEvictPacked("r", "toy:0", 256)):
        assert desk.refusal(request).code is (ErrorCode.UNSUPPORTED_REQUEST if packed is None else width)
    desk.engine.serves = frozenset()  # type: ignore[misc]
    for other, payload in [
        (embed([1]), ids(1)),
        (rerank(1, [1]), ids(1, 2)),
        (sequences([1]), ids(1)),
        (m.Generate("r", "toy:0", 1), ids(1)),
        (m.AneAdmitShape("r", "toy:0", 1), None),
        (m.AneEvictShape("r", "toy:0", 1), None),
    ]:
        error = desk.refusal(other, payload)
        assert error.code is ErrorCode.UNSUPPORTED_REQUEST
        assert error.msg == f"{other.__struct_config__.tag} is not supported by this worker"


# --- models ----------------------------------------------------------------------------------------------------------


def test_the_models_of_a_worker(desk: Desk) -> None:
    """Refs count up and are never reused, LOAD is timed around the engine, each model is closed once."""
    desk.engine.on_load = lambda request, progress: desk.clock.advance(1.25)
    assert b"buckets" not in m.encode(desk.ask(load()).reply)
    desk.engine.buckets = (128, 256)
    for n in (2, 3):
        reply = desk.ask(load()).reply
        assert reply == m.Loaded("r", f"toy:{n}", dims=4, cold_load_ms=1250, buckets=[128, 256])
        assert desk.ask(m.Unload("r", f"toy:{n}")).reply == m.Unloaded("r")
    assert [model.closed for model in desk.engine.models] == [0, 0, 1, 1]
    desk.engine.max_models = 2  # type: ignore[misc]
    assert desk.refusal(load()).code is ErrorCode.CONFIG_INVALID and len(desk.engine.models) == 4
    desk.dispatcher.close()
    desk.dispatcher.close()
    assert [model.closed for model in desk.engine.models] == [1, 1, 1, 1]
    assert isinstance(desk.ask(load()).reply, m.Loaded)


# --- PONG ------------------------------------------------------------------------------------------------------------


def test_resident_memory_is_what_the_system_says(desk: Desk) -> None:
    reply = desk.ask(m.Ping("r")).reply
    assert isinstance(reply, m.Pong)
    assert abs(reply.rss_mb - psutil.Process().memory_info().rss / 2**20) < 8


def test_pong_omits_what_is_unknown_takes_the_worst_share_and_maps_residents_by_ref(desk: Desk) -> None:
    assert set(msgspec.to_builtins(desk.ask(m.Ping("r")).reply)) == {"type", "req_id", "rss_mb", "models_loaded"}
    desk.ask(load())
    statuses = iter([ModelStatus(0.97, (128, 256), (256, 128)), ModelStatus(0.91, (128,), (), (384,))])
    for model in desk.engine.models:
        status = next(statuses)
        model.status = lambda status=status: status  # type: ignore[method-assign]
    reply = desk.ask(m.Ping("r")).reply
    assert isinstance(reply, m.Pong)
    assert reply.placement_share == 0.91
    assert reply.buckets == [128, 256]
    assert reply.ane_resident_shapes == {"toy:0": [128, 256]}
    assert reply.ane_resident_packed == {"toy:1": [384]}


@pytest.mark.parametrize("share", [float("nan"), 1.5, -0.1])
def test_an_impossible_share_is_our_bug(desk: Desk, share: float) -> None:
    desk.engine.status = ModelStatus(placement_share=share)
    with pytest.raises(AssertionError):
        desk.ask(m.Ping("r"))


# --- what models do --------------------------------------------------------------------------------------------------


def hooked(result: Any, **options: Any) -> Desk:
    """A dispatcher whose model answers *result*, or raises it."""
    desk = Desk(**options)

    def hook(**details: Any) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    desk.engine.hook = hook
    return desk


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


@pytest.mark.parametrize(
    ("result", "code", "msg", "lost"),
    [
        *((EngineError(code, "why"), code, "why", False) for code in ErrorCode),
        (DeviceLost(ErrorCode.INFERENCE_FAILED, "CUDA error 700"), ErrorCode.INFERENCE_FAILED, "CUDA error 700", True),
        (MemoryError(), ErrorCode.OOM, "out of memory", False),
        (MemoryError("no room"), ErrorCode.OOM, "no room", False),
        (
            *(np.array([0.5, np.nan], np.float32), ErrorCode.NONFINITE_OUTPUT),
            *("row 1 of 2 holds NaN or infinity", False),
        ),
    ],
)
def test_what_a_model_answers_instead(result: Any, code: ErrorCode, msg: str, lost: bool) -> None:
    desk = hooked(result)
    for request, payload in ((rerank(1, [1, 1]), ids(1, 2, 3)), (sequences([1, 1]), ids(1, 2))):
        error = desk.refusal(request, payload)
        assert (error.code, error.msg) == (code, msg)
    assert desk.dispatcher.device_lost is lost


@pytest.mark.parametrize("bug", [RuntimeError("boom"), ValueError(), KeyError("x"), OSError(5, "io"), TimeoutError()])
def test_anything_else_is_a_bug_and_gets_out(bug: Exception) -> None:
    with pytest.raises(type(bug)):
        hooked(bug).ask(embed([1]), ids(1))


@pytest.mark.parametrize("max_frame", [200, 1024, 2**20])
@pytest.mark.parametrize("msg", ["\0" * 10_000, "é" * 10_000, "\udcff surrogate", "x" * 100_000])
@pytest.mark.report("huggingface/sentence-transformers#3920")
def test_an_error_message_is_cut_to_the_frame_and_valid(msg: str, max_frame: int) -> None:
    desk = hooked(EngineError(ErrorCode.INFERENCE_FAILED, msg), max_frame=max_frame)
    data = m.encode(desk.ask(embed([1]), ids(1)).reply)
    assert len(data) <= min(max_frame, 4096)
    assert msgspec.json.decode(data)["code"] == "inference_failed"


@pytest.mark.parametrize(("max_frame", "limit"), [(200, 200), (2**20, 4096)])
def test_a_message_that_just_fits_is_whole(max_frame: int, limit: int) -> None:
    room = limit - len(m.encode(m.Err(req_id="r", code=ErrorCode.OOM, msg="")))
    for extra in (0, 1):
        desk = hooked(EngineError(ErrorCode.OOM, "x" * (room + extra)), max_frame=max_frame)
        assert len(desk.refusal(embed([1]), ids(1)).msg) == (room if not extra else (room + 1) // 2)
