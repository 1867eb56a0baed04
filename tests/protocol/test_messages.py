"""Control frames: exact JSON, exact types, the limits, and the tables that describe an exchange."""

from __future__ import annotations

import json

import msgspec
import pytest

from engines.protocol import messages as m
from engines.protocol.errors import EngineError, ErrorCode, LocalProtocolError, ProtocolError, RemoteProtocolError

ITEM = m.Item(id="0", n_tokens=2)
FRAMES: list[tuple[m.Message, str]] = [
    (
        m.Load(req_id="l", artifact_path="/m", artifact_digest="d", format="gguf", runtime_config={"a": "1"}),
        '{"type":"LOAD","req_id":"l","artifact_path":"/m","artifact_digest":"d","format":"gguf",'
        '"runtime_config":{"a":"1"}}',
    ),
    (
        m.EmbedBatch(req_id="e", model_ref="x", pooling=m.Pooling.MEAN, normalize=False, items=[ITEM]),
        '{"type":"EMBED_BATCH","req_id":"e","model_ref":"x","pooling":"mean","normalize":false,'
        '"items":[{"id":"0","n_tokens":2}]}',
    ),
    (
        m.EmbedBatch(req_id="e", model_ref="x", pooling=m.Pooling.LAST, normalize=True, items=[], packed_width=256),
        '{"type":"EMBED_BATCH","req_id":"e","model_ref":"x","pooling":"last","normalize":true,"items":[],'
        '"packed_width":256}',
    ),
    (
        m.Rerank(req_id="r", model_ref="x", query_n_tokens=1, candidates=[m.Segment(n_tokens=3)]),
        '{"type":"RERANK","req_id":"r","model_ref":"x","query_n_tokens":1,"candidates":[{"n_tokens":3}]}',
    ),
    (
        m.RerankSequences(req_id="r", model_ref="x", sequences=[m.Segment(n_tokens=3)]),
        '{"type":"RERANK_SEQUENCES","req_id":"r","model_ref":"x","sequences":[{"n_tokens":3}]}',
    ),
    (
        m.Generate(req_id="g", model_ref="x", max_tokens=8),
        '{"type":"GENERATE","req_id":"g","model_ref":"x","max_tokens":8}',
    ),
    (
        m.Generate(req_id="g", model_ref="x", max_tokens=8, grammar=""),
        '{"type":"GENERATE","req_id":"g","model_ref":"x","max_tokens":8,"grammar":""}',
    ),
    (m.Unload(req_id="u", model_ref="x"), '{"type":"UNLOAD","req_id":"u","model_ref":"x"}'),
    (m.Ping(req_id="p"), '{"type":"PING","req_id":"p"}'),
    (
        m.AneAdmitShape(req_id="a", model_ref="x", shape=128),
        '{"type":"ANE_ADMIT_SHAPE","req_id":"a","model_ref":"x","shape":128}',
    ),
    (
        m.AneEvictShape(req_id="a", model_ref="x", shape=128),
        '{"type":"ANE_EVICT_SHAPE","req_id":"a","model_ref":"x","shape":128}',
    ),
    (
        m.AneAdmitPacked(req_id="a", model_ref="x", width=256),
        '{"type":"ANE_ADMIT_PACKED","req_id":"a","model_ref":"x","width":256}',
    ),
    (
        m.AneEvictPacked(req_id="a", model_ref="x", width=256),
        '{"type":"ANE_EVICT_PACKED","req_id":"a","model_ref":"x","width":256}',
    ),
    (m.Shutdown(), '{"type":"SHUTDOWN"}'),
    (
        m.Progress(req_id="e", completed=m.U64_MAX, phase=m.Phase.INFERENCE),
        '{"type":"PROGRESS","req_id":"e","completed":18446744073709551615,"phase":"inference"}',
    ),
    (
        m.Loaded(req_id="l", model_ref="x", dims=384, cold_load_ms=812),
        '{"type":"LOADED","req_id":"l","model_ref":"x","dims":384,"cold_load_ms":812}',
    ),
    (
        m.Loaded(req_id="l", model_ref="x", dims=384, cold_load_ms=812, buckets=[128, 256]),
        '{"type":"LOADED","req_id":"l","model_ref":"x","dims":384,"cold_load_ms":812,"buckets":[128,256]}',
    ),
    (m.Vectors(req_id="e", dims=384, n=2), '{"type":"VECTORS","req_id":"e","dims":384,"n":2}'),
    (m.Scores(req_id="r"), '{"type":"SCORES","req_id":"r"}'),
    (
        m.Text(req_id="g", text="é", n_prompt=1, n_gen=0, finish_reason=m.FinishReason.STOP, generated_token_ids=[]),
        '{"type":"TEXT","req_id":"g","text":"é","n_prompt":1,"n_gen":0,"finish_reason":"stop"}',
    ),
    (
        m.Text(req_id="g", text="", n_prompt=1, n_gen=1, finish_reason=m.FinishReason.LENGTH, generated_token_ids=[2]),
        '{"type":"TEXT","req_id":"g","text":"","n_prompt":1,"n_gen":1,"finish_reason":"length",'
        '"generated_token_ids":[2]}',
    ),
    (m.Unloaded(req_id="u"), '{"type":"UNLOADED","req_id":"u"}'),
    (
        m.Admitted(
            req_id="a",
            inventory=m.Inventory(executables=[m.Executable(id="exe-0", layers=[0, 1])], cpu_stages=["pooling"]),
        ),
        '{"type":"ADMITTED","req_id":"a","inventory":{"executables":[{"id":"exe-0","layers":[0,1]}],'
        '"cpu_stages":["pooling"]}}',
    ),
    (m.Evicted(req_id="a"), '{"type":"EVICTED","req_id":"a"}'),
    (m.Pong(req_id="p", rss_mb=12, models_loaded=1), '{"type":"PONG","req_id":"p","rss_mb":12,"models_loaded":1}'),
    (
        m.Pong(
            req_id="p",
            rss_mb=0,
            models_loaded=2,
            placement_share=0.5,
            buckets=[128],
            ane_resident_shapes={"ane:0": [128]},
            ane_resident_packed={"ane:0": [256]},
        ),
        '{"type":"PONG","req_id":"p","rss_mb":0,"models_loaded":2,"placement_share":0.5,"buckets":[128],'
        '"ane_resident_shapes":{"ane:0":[128]},"ane_resident_packed":{"ane:0":[256]}}',
    ),
    (m.Err(req_id="e", code=ErrorCode.OOM, msg="no"), '{"type":"ERR","req_id":"e","code":"oom","msg":"no"}'),
    (m.Err(code=ErrorCode.OOM, msg="no"), '{"type":"ERR","code":"oom","msg":"no"}'),
]
FROM_HOST = (*m.REPLY_TO, m.Shutdown)


@pytest.mark.parametrize(("message", "text"), FRAMES, ids=lambda value: value if isinstance(value, str) else None)
def test_exact_json_there_and_back(message: m.Message, text: str) -> None:
    assert m.encode(message).decode() == text
    assert m.encode_checked(message).decode() == text
    decode = m.decode_from_host if isinstance(message, FROM_HOST) else m.decode_from_worker
    back = decode(text.encode())
    assert back == message and type(back) is type(message)
    assert decode(memoryview(bytearray(text.encode()))) == message


def test_every_message_is_covered() -> None:
    assert {type(message) for message, _ in FRAMES} == {*FROM_HOST, *m.REPLY_TO.values(), m.Err, m.Progress}


@pytest.mark.parametrize(("message", "text"), FRAMES, ids=lambda value: value if isinstance(value, str) else None)
def test_unknown_and_null_fields_are_refused_everywhere(message: m.Message, text: str) -> None:
    decode = m.decode_from_host if isinstance(message, FROM_HOST) else m.decode_from_worker
    fields = json.loads(text)
    with pytest.raises(msgspec.ValidationError):
        decode(json.dumps(fields | {"surprise": 1}).encode())
    for key in fields:
        with pytest.raises(msgspec.ValidationError):
            decode(json.dumps(fields | {key: None}).encode())
    for name in type(message).__struct_fields__:
        if name not in fields:
            with pytest.raises(msgspec.ValidationError):
                decode(json.dumps(fields | {name: None}).encode())


@pytest.mark.parametrize(("message", "text"), FRAMES, ids=lambda value: value if isinstance(value, str) else None)
def test_each_end_has_its_own_messages(message: m.Message, text: str) -> None:
    other = m.decode_from_worker if isinstance(message, FROM_HOST) else m.decode_from_host
    with pytest.raises(msgspec.ValidationError):
        other(text.encode())


def test_hello_ignores_what_it_does_not_know() -> None:
    hello = m.Hello(v=3, nonce="n", engine=m.EngineInfo(engine="e", version="1"), pid=1, max_frame=5)
    text = m.encode(hello).decode()
    assert text == '{"v":3,"nonce":"n","engine":{"engine":"e","version":"1"},"pid":1,"max_frame":5}'
    fields = json.loads(text)
    fields["engine"]["commit"] = "abc"
    assert m.decode_hello(json.dumps(fields | {"protocol_version": 2}).encode()) == hello


@pytest.mark.parametrize("depth", [1, 100, 3000, 12_000])
def test_only_hello_follows_what_it_does_not_know_and_not_far(depth: int) -> None:
    """Every Python gives up at another depth; what is accepted must not depend on that."""
    value = b"[" * depth + b'"[{"' + b"]" * depth
    hello = b'{"x":%b,"v":3,"nonce":"n","engine":{"engine":"e","version":"1"},"pid":1,"max_frame":5}' % value
    if depth < m.MAX_NESTING:
        assert m.decode_hello(hello).pid == 1
    else:
        with pytest.raises(msgspec.ValidationError, match="HELLO nests deeper than 32 levels"):
            m.decode_hello(hello)
    for message, _ in FRAMES:
        decode = m.decode_from_host if isinstance(message, FROM_HOST) else m.decode_from_worker
        body = m.encode(message)
        for data in (b'{"x":%b,' % value + body[1:], body[:-1] + b',"x":%b}' % value):
            with pytest.raises(m.DECODE_ERRORS):
                decode(data)


def test_empty_build_flags_are_absent_ones() -> None:
    assert m.EngineInfo(engine="e", version="1", build_flags={}) == m.EngineInfo(engine="e", version="1")
    kept = m.EngineInfo(engine="e", version="1", build_flags={"device": "cpu"})
    assert kept.build_flags == {"device": "cpu"}


@pytest.mark.parametrize(
    "message",
    [
        m.Ping(req_id=""),
        m.Ping(req_id="x" * 65),
        m.Ping(req_id="é" * 33),
        m.Ping(req_id="\udc80"),
        m.Ping(req_id=7),  # type: ignore[arg-type]
        m.Load(req_id="l", artifact_path="/m", artifact_digest="d", format="g", runtime_config={"a": 1}),  # type: ignore[dict-item]
        m.Load(req_id="l", artifact_path="/\udcff", artifact_digest="d", format="g"),
        m.Generate(req_id="g", model_ref="x", max_tokens=-1),
        m.Generate(req_id="g", model_ref="x", max_tokens=2**32),
        m.Generate(req_id="g", model_ref="x", max_tokens=object()),  # type: ignore[arg-type]
        m.AneAdmitShape(req_id="a", model_ref="x", shape=2**70),
        m.Pong(req_id="p", rss_mb=-1, models_loaded=0),
        m.Pong(req_id="p", rss_mb=2**64, models_loaded=0),
        m.Pong(req_id="p", rss_mb=1, models_loaded=0, placement_share=float("nan")),
        m.Pong(req_id="p", rss_mb=1, models_loaded=0, placement_share=float("inf")),
        m.Loaded(req_id="l", model_ref="x", dims=1, cold_load_ms=1.5),  # type: ignore[arg-type]
        m.Err(req_id="e", code="engine_crashed", msg=""),  # type: ignore[arg-type]
        m.Progress(req_id="e", completed=2**64, phase=m.Phase.SETUP),
        m.EmbedBatch(req_id="", model_ref="x", pooling=m.Pooling.CLS, normalize=True, items=[ITEM]),
        m.EmbedBatch(req_id="é" * 33, model_ref="x", pooling=m.Pooling.CLS, normalize=True, items=[ITEM]),
        m.EmbedBatch(req_id="e", model_ref="x", pooling="max", normalize=True, items=[ITEM]),  # type: ignore[arg-type]
        m.EmbedBatch(
            req_id="e", model_ref="x", pooling=m.Pooling.CLS, normalize=True, items=[m.Item(id="", n_tokens=1)]
        ),
        m.EmbedBatch(
            req_id="e", model_ref="x", pooling=m.Pooling.CLS, normalize=True, items=[m.Item(id="x" * 65, n_tokens=1)]
        ),
        m.EmbedBatch(
            req_id="e", model_ref="x", pooling=m.Pooling.CLS, normalize=True, items=[m.Item(id="日" * 22, n_tokens=1)]
        ),
        m.EmbedBatch(
            req_id="e", model_ref="x", pooling=m.Pooling.CLS, normalize=True, items=[m.Item(id="0", n_tokens=-1)]
        ),
        m.EmbedBatch(
            req_id="e",
            model_ref="x",
            pooling=m.Pooling.CLS,
            normalize=True,
            items=[m.Item(id=0, n_tokens=1)],  # type: ignore[arg-type]
        ),
        m.EmbedBatch(
            req_id="e", model_ref="x", pooling=m.Pooling.CLS, normalize=True, items=[ITEM], packed_width=2**32
        ),
        m.Rerank(req_id="r", model_ref="x", query_n_tokens=-1, candidates=[]),
        m.RerankSequences(req_id="r" * 65, model_ref="x", sequences=[]),
        m.Hello(v=300, nonce="n", engine=m.EngineInfo(engine="e", version="1"), pid=1, max_frame=5),
        m.Hello(v=3, nonce="n", engine=m.EngineInfo(engine="e", version="1"), pid=-1, max_frame=5),
        m.HelloAck(v=3, accept=True, max_frame=-1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_peer_would_refuse_is_not_encoded(message: m.Message) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.encode_checked(message)


def test_unusual_but_legal_batches_are_encoded() -> None:
    made = m.EmbedBatch(
        req_id="é" * 32,
        model_ref="[-b",  # looks like a negative number to the quick check
        pooling=m.Pooling.CLS,
        normalize=True,
        items=[m.Item(id="日" * 21, n_tokens=1)],
        packed_width=256,
    )
    assert m.decode_from_host(m.encode_checked(made)) == made


@pytest.mark.parametrize("text", ["\\u00e9" * 33, "é" * 33])
def test_item_ids_are_measured_in_bytes_however_they_are_spelt(text: str) -> None:
    body = (
        '{"type":"EMBED_BATCH","req_id":"e","model_ref":"x","pooling":"mean","normalize":true,'
        '"items":[{"id":"%s","n_tokens":1}]}'
    )
    with pytest.raises(msgspec.ValidationError, match="item id"):
        m.decode_from_host((body % text).encode())
    assert isinstance(m.decode_from_host((body % text[: len(text) // 33 * 32]).encode()), m.EmbedBatch)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b'{"type":"PING","req_id":"\xff"}',
        b'{"type":"PING","req_id":"\\ud800"}',
        b'{"type":"GENERATE","req_id":"a","model_ref":"b","max_tokens":' + b"9" * 10_000 + b"}",
        b'{"type":"PING","req_id":' + b"[" * 100_000,
        b'{"type":"PING","req_id":"a"}{}',
    ],
)
def test_a_strangers_bytes_raise_only_the_declared_errors(data: bytes) -> None:
    for decode in (m.decode_from_host, m.decode_from_worker, m.decode_hello, m.decode_ack):
        with pytest.raises(m.DECODE_ERRORS):
            decode(data)


def test_a_reply_to_nobody_is_measured_in_bytes_too() -> None:
    for text, fits in (("é" * 32, True), ("é" * 33, False)):
        data = m.encode(m.Err(req_id=text, code=ErrorCode.OOM, msg=""))
        if fits:
            assert m.decode_from_worker(data).req_id == text
        else:
            with pytest.raises(msgspec.ValidationError, match="req_id must have 1 to 64 bytes"):
                m.decode_from_worker(data)


PHASES = {
    "LOAD": ("setup",),
    "EMBED_BATCH": ("inference",),
    "RERANK": ("inference",),
    "RERANK_SEQUENCES": ("inference",),
    "GENERATE": ("inference",),
    "UNLOAD": ("control",),
    "PING": ("control",),
    "ANE_ADMIT_SHAPE": ("setup",),
    "ANE_EVICT_SHAPE": ("control",),
    "ANE_ADMIT_PACKED": ("setup",),
    "ANE_EVICT_PACKED": ("control",),
}


def test_phases_by_exchange_and_engine() -> None:
    """Protocol-v3 section 4, written out."""
    assert {m.type_name(kind) for kind in m.REPLY_TO} == set(PHASES)
    for kind in m.REPLY_TO:
        expected = PHASES[m.type_name(kind)]
        for engine in ("", m.LLAMA_ENGINE, m.ANE_ENGINE, "owned-vulkan"):
            assert tuple(phase.value for phase in m.phases(kind, engine)) == expected
        switching = ("setup", "inference") if expected == ("inference",) else expected
        assert tuple(phase.value for phase in m.phases(kind, m.CUDA_ENGINE)) == switching
    assert {kind for kind in m.REPLY_TO if PHASES[m.type_name(kind)] == ("inference",)} == m.SERVING


def test_counts_of_a_request() -> None:
    segments = [m.Segment(n_tokens=2), m.Segment(n_tokens=3)]
    rerank = m.Rerank(req_id="r", model_ref="x", query_n_tokens=4, candidates=segments)
    assert (m.n_tokens(rerank), m.n_rows(rerank)) == (9, 2)
    composed = m.RerankSequences(req_id="r", model_ref="x", sequences=segments)
    assert (m.n_tokens(composed), m.n_rows(composed)) == (5, 2)
    batch = m.EmbedBatch(req_id="e", model_ref="x", pooling=m.Pooling.CLS, normalize=True, items=[ITEM, ITEM, ITEM])
    assert (m.n_tokens(batch), m.n_rows(batch)) == (6, 3)
    assert (m.n_tokens(m.Ping(req_id="p")), m.n_rows(m.Ping(req_id="p"))) == (None, 0)


def test_type_names() -> None:
    assert m.type_name(m.Hello) == "HELLO" and m.type_name(m.HelloAck) == "HELLO_ACK"
    assert m.type_name(m.Ping(req_id="p")) == "PING" and m.type_name(m.RerankSequences) == "RERANK_SEQUENCES"


def test_error_tree() -> None:
    assert issubclass(LocalProtocolError, ProtocolError) and issubclass(RemoteProtocolError, ProtocolError)
    assert len(ErrorCode) == 22
    error = EngineError(ErrorCode.ARTIFACT_INVALID, "can't open /models/\udcff.gguf")
    assert error.msg == "can't open /models/\\udcff.gguf"  # an ERR must always be sendable
    assert str(error) == "artifact_invalid: " + error.msg
    assert m.encode_checked(m.Err(code=error.code, msg=error.msg))
