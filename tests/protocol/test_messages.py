"""What every message has in common, read off the legal wire vectors, and the tables that describe an exchange.

The exact bytes of each message and single refusals are the vectors' (test_vectors.py).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engines.protocol import messages as m
from engines.protocol.decoding import DECODE_ERRORS, decode_ack, decode_from_host, decode_from_worker, decode_hello
from engines.protocol.errors import EngineError, ErrorCode
from tests.protocol.test_vectors import VECTORS

LEGAL: dict[str, dict[str, Any]] = {
    json.dumps(step["json"]): step
    for _, vector in VECTORS
    for step in vector["steps"]
    if step["sender"] == step["receiver"] == "ok" and "type" in step.get("json", ())
}
DECODE = {"host": decode_from_host, "worker": decode_from_worker}


@pytest.mark.parametrize("kind", sorted({step["json"]["type"] for step in LEGAL.values()}))
def test_fields_are_exact_and_each_end_has_its_own_messages(kind: str) -> None:
    """An unknown field, a null, and the other end's decoder are refused; an optional field is left out, never null."""
    for step in LEGAL.values():
        fields, sender = step["json"], step["from"]
        if fields["type"] != kind:
            continue
        message = DECODE[sender](json.dumps(fields).encode())
        other = DECODE["worker" if sender == "host" else "host"]
        with pytest.raises(msgspec.ValidationError):
            other(json.dumps(fields).encode())
        names = [*fields, *type(message).__struct_fields__]
        for wrong in ({"surprise": 1}, *({name: None} for name in names)):
            with pytest.raises(msgspec.ValidationError):
                DECODE[sender](json.dumps(fields | wrong).encode())


def test_hello_ignores_what_it_does_not_know() -> None:
    hello = m.Hello(v=3, nonce="n", engine=m.EngineInfo(engine="e", version="1", build_flags={}), pid=1, max_frame=5)
    text = m.encode(hello).decode()
    assert text == '{"v":3,"nonce":"n","engine":{"engine":"e","version":"1"},"pid":1,"max_frame":5}'
    fields = json.loads(text)
    fields["engine"]["commit"] = "abc"
    assert decode_hello(json.dumps(fields | {"protocol_version": 2}).encode()) == hello


@pytest.mark.parametrize("depth", [1, 31, 32, 3000, 12_000])
def test_only_hello_follows_what_it_does_not_know_and_not_far(depth: int) -> None:
    """Every Python gives up at another depth; what is accepted must not depend on that."""
    value = b"[" * depth + b'"[{"' + b"]" * depth
    hello = b'{"x":%b,"v":3,"nonce":"n","engine":{"engine":"e","version":"1"},"pid":1,"max_frame":5}' % value
    if depth < m.MAX_NESTING:
        assert decode_hello(hello).pid == 1
    else:
        with pytest.raises(msgspec.ValidationError, match="HELLO nests deeper than 32 levels"):
            decode_hello(hello)
    for text, step in LEGAL.items():
        body = text.encode()
        for data in (b'{"x":%b,' % value + body[1:], body[:-1] + b',"x":%b}' % value):
            with pytest.raises(DECODE_ERRORS):
                DECODE[step["from"]](data)


@pytest.mark.parametrize("text", ["é" * 33, "\\u00e9" * 33])
@pytest.mark.parametrize(
    "body",
    [
        '{"type":"ERR","req_id":"%s","code":"oom","msg":""}',
        '{"type":"PING","req_id":"%s"}',
        '{"type":"EMBED_BATCH","req_id":"e","model_ref":"x","pooling":"mean","normalize":true,'
        '"items":[{"id":"%s","n_tokens":1}]}',
    ],
)
def test_ids_are_measured_in_bytes_however_they_are_spelt(body: str, text: str) -> None:
    decode = decode_from_worker if "ERR" in body else decode_from_host
    with pytest.raises(msgspec.ValidationError, match="1 to 64 bytes"):
        decode((body % text).encode())
    decode((body % text[: len(text) // 33 * 32]).encode())


@pytest.mark.parametrize(
    "body",
    [
        '{"type":"PONG","req_id":"p","rss_mb":%d,"models_loaded":0}',
        '{"type":"PONG","req_id":"p","rss_mb":0,"models_loaded":%d}',
        '{"type":"LOADED","req_id":"l","model_ref":"x","dims":1,"cold_load_ms":%d}',
        '{"type":"VECTORS","req_id":"e","dims":1,"n":%d}',
        '{"type":"PROGRESS","req_id":"e","completed":%d,"phase":"setup"}',
    ],
)
def test_a_u64_is_one(body: str) -> None:
    for value in (0, 2**64 - 1):
        decode_from_worker((body % value).encode())
    for value in (-1, 2**64):
        with pytest.raises(msgspec.ValidationError):
            decode_from_worker((body % value).encode())


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
    for decode in (decode_from_host, decode_from_worker, decode_hello, decode_ack):
        with pytest.raises(DECODE_ERRORS):
            decode(data)


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


def test_counts_and_names_of_a_request() -> None:
    two = [m.Segment(n_tokens=2), m.Segment(n_tokens=3)]
    items = [m.Item(id="0", n_tokens=2)] * 3
    for request, name, tokens, rows in (
        (m.Rerank(req_id="r", model_ref="x", query_n_tokens=4, candidates=two), "RERANK", 9, 2),
        (m.RerankSequences(req_id="r", model_ref="x", sequences=two), "RERANK_SEQUENCES", 5, 2),
        (m.EmbedBatch("e", "x", m.Pooling.CLS, True, items), "EMBED_BATCH", 6, 3),
        (m.Ping(req_id="p"), "PING", None, 0),
    ):
        assert (m.type_name(request), m.n_tokens(request), m.n_rows(request)) == (name, tokens, rows)
    assert m.type_name(m.Hello) == "HELLO" and m.type_name(m.HelloAck) == "HELLO_ACK"


def test_an_error_can_always_be_sent() -> None:
    error = EngineError(ErrorCode.ARTIFACT_INVALID, "can't open /models/\udcff.gguf")
    assert str(error) == "artifact_invalid: can't open /models/\\udcff.gguf"
    assert b"udcff" in m.encode(m.Err(code=error.code, msg=error.msg))
