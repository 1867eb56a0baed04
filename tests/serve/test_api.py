"""The routes of OpenAI's, Cohere's, Jina's and TEI's clients: what they answer, what they refuse, what they survive."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from synapse_host.errors import revive
from synapse_host.serve import service as service_module
from tests.serve.conftest import Serve, Served
from tests.support.lanes import until

pytestmark = pytest.mark.process

ALL = ("toy", "judge", "writer")
TEXTS = ["a b", "c", "query d e f"]


def floats(data: str) -> list[float]:
    raw = base64.b64decode(data)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    assert text.endswith("\n\n")
    found = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_vectors_are_the_host_s_to_the_bit(serve: Serve) -> None:
    async with serve() as up:
        expected = (await up.host.embed("toy", TEXTS)).tolist()
        ids = [[2, 4, 5, 3], [2, 6, 3]]
        by_ids = (await up.host.embed_ids("toy", ids)).tolist()
        answer = (await up.call("/v1/embeddings", model="toy", input=TEXTS, user="me")).json()
        assert [row["embedding"] for row in answer["data"]] == expected
        assert [row["index"] for row in answer["data"]] == [0, 1, 2] and answer["model"] == "toy"
        assert answer["usage"] == {"prompt_tokens": 13, "total_tokens": 13}, "special tokens count"
        packed = (await up.call("/v1/embeddings", input=TEXTS[0], encoding_format="base64", dimensions=8)).json()
        assert floats(packed["data"][0]["embedding"]) == expected[0]
        short = (await up.host.embed("toy", TEXTS, dimensions=3)).tolist()
        assert np.allclose(short, [np.array(row[:3]) / np.linalg.norm(row[:3]) for row in expected], atol=1e-6)
        for name in ("dimensions", "output_dimension"):
            answer = (await up.call("/v1/embeddings", input=TEXTS, **{name: 3})).json()
            assert [row["embedding"] for row in answer["data"]] == short
        assert (await up.call("/embed", inputs=TEXTS, dimensions=3)).json() == short
        by_short = (await up.call("/v1/embeddings", input=ids, dimensions=3)).json()["data"]
        assert [row["embedding"] for row in by_short] == (await up.host.embed_ids("toy", ids, dimensions=3)).tolist()
        rows = (await up.call("/v1/embeddings", model="toy", input=ids)).json()
        assert [row["embedding"] for row in rows["data"]] == by_ids and rows["usage"]["total_tokens"] == 7
        one = (await up.call("/v1/embeddings", model="toy", input=ids[1])).json()
        assert one["data"][0]["embedding"] == by_ids[1]
        assert (await up.call("/embed", inputs=TEXTS, truncate=True)).json() == expected
        assert (await up.call("/embed", inputs=TEXTS[1])).json() == [expected[1]]


async def test_scores_are_the_host_s_to_the_bit(serve: Serve) -> None:
    async with serve(models=("judge",)) as up:
        result = await up.host.rerank_result("judge", "query", TEXTS)
        expected = [(index, float(result.scores[index])) for index in result.order]
        for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
            answer = (await up.call(route, model="judge", query="query", documents=TEXTS)).json()
            assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == expected
            assert answer["usage"]["total_tokens"] == (1 + 3) * 3 + 7, "the worker puts the query to every document"
            assert not any("document" in one for one in answer["results"])
        objects = [{"text": text} for text in TEXTS]
        best = (await up.call("/v1/rerank", query="query", documents=objects, top_n=2, return_documents=True)).json()
        assert [(one["index"], one["relevance_score"]) for one in best["results"]] == expected[:2]
        assert best["results"][0]["document"] == objects[expected[0][0]]
        tei = (await up.call("/rerank", query="query", texts=TEXTS, return_text=True)).json()
        assert [(one["index"], one["score"], one["text"]) for one in tei] == [(i, s, TEXTS[i]) for i, s in expected]
        raw = (await up.call("/rerank", query="query", texts=TEXTS, raw_scores=True)).json()
        logits = await up.host.rerank("judge", "query", TEXTS, raw=True)
        assert {one["index"]: one["score"] for one in raw} == dict(enumerate(logits.tolist()))


async def test_generation_whole_and_as_events(serve: Serve) -> None:
    async with serve(models=("writer",)) as up:
        expected = await up.host.generate("writer", "a b", max_tokens=8)
        answer = (await up.call("/v1/completions", model="writer", prompt="a b", max_tokens=8, temperature=0)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
        assert answer["usage"] == {
            "prompt_tokens": expected.n_prompt,
            "completion_tokens": expected.n_gen,
            "total_tokens": expected.n_prompt + expected.n_gen,
        }
        ids = (await up.call("/v1/completions", prompt=[2, 4, 5, 3], max_tokens=8)).json()
        assert ids["choices"][0]["text"] == (await up.host.generate_ids("writer", [2, 4, 5, 3], 8)).text
        second = await up.host.generate("writer", "c", max_tokens=8)
        several = (await up.call("/v1/completions", prompt=["a b", "c"], max_tokens=8, timeout=50)).json()
        assert [(one["index"], one["text"]) for one in several["choices"]] == [(0, expected.text), (1, second.text)]
        assert several["usage"]["completion_tokens"] == expected.n_gen + second.n_gen
        several = (await up.call("/v1/completions", prompt=[[2, 4, 5, 3], [2, 4, 5, 3]], max_tokens=8)).json()
        assert [one["text"] for one in several["choices"]] == [ids["choices"][0]["text"]] * 2
        stop = expected.text[2:4]
        cut = (await up.call("/v1/completions", prompt="a b", max_tokens=8, stop=[stop])).json()["choices"][0]
        assert (cut["text"], cut["finish_reason"]) == (expected.text.partition(stop)[0], "stop")
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
        streamed = await up.call("/v1/completions", model="writer", prompt="a b", **options)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *parts, usage, done = events(streamed.text)
        assert "".join(part["choices"][0]["text"] for part in parts) == expected.text
        assert [part["choices"][0]["finish_reason"] for part in parts][-1] == expected.finish_reason
        assert usage["choices"] == [] and usage["usage"] == answer["usage"] and done == "[DONE]"


async def test_models_and_the_only_model_of_a_task(serve: Serve) -> None:
    async with serve(models=ALL) as up:
        listed = (await up.web.get("/v1/models")).json()
        assert {one["id"]: one["task"] for one in listed["data"]} == {
            "toy": "embed", "judge": "rerank", "writer": "generate",
        }  # fmt: skip
        assert (await up.web.get("/v1/models/toy")).json()["id"] == "toy"
        missing = await up.web.get("/v1/models/gone")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "unknown_model"


# --- refusals --------------------------------------------------------------------------------------------------------

EMBED: dict[str, Any] = {"input": "a"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
PROMPT: dict[str, Any] = {"prompt": "a"}
RERANK: dict[str, Any] = {"query": "a", "documents": ["b"]}
REFUSED = [
    ("/v1/embeddings", {}, 400, "input"),
    ("/v1/embeddings", {"input": []}, 400, "input"),
    ("/v1/embeddings", {"input": ["a", 1]}, 400, "input"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, 413, "input"),
    ("/v1/embeddings", {**EMBED, "model": "nope"}, 404, None),
    ("/v1/embeddings", {**EMBED, "model": "a" * 1025}, 400, "model"),
    ("/v1/embeddings", {"input": "a " * 100}, 422, None),
    ("/v1/embeddings", {**EMBED, "dimensions": 9}, 400, "dimensions"),
    ("/v1/embeddings", {**EMBED, "dimensions": 4, "output_dimension": 5}, 400, "output_dimension"),
    ("/embed", {"inputs": "a", "dimensions": 0}, 400, "dimensions"),
    ("/v1/embeddings", {**EMBED, "encoding_format": "int8"}, 400, "encoding_format"),
    ("/v1/embeddings", {**EMBED, "input_kind": "x"}, 400, "input_kind"),
    ("/embed", {"inputs": "a", "normalize": False}, 400, "normalize"),
    ("/embed", {"inputs": "a", "prompt_name": "query"}, 400, "prompt_name"),
    ("/embed", {"inputs": "a", "truncation_direction": "left"}, 400, "truncation_direction"),
    ("/v1/rerank", {"query": "a"}, 400, "documents"),
    ("/v1/rerank", {**RERANK, "texts": ["c"]}, 400, "documents"),
    ("/v1/rerank", {**RERANK, "max_tokens_per_doc": 10}, 400, "max_tokens_per_doc"),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a", "b " * 100]}, 422, None),
    ("/v1/completions", {"prompt": [[2, 3], []]}, 400, None),
    ("/v1/embeddings/", EMBED, 404, None),
    ("/v1/completions", {**PROMPT, "temperature": 0.7}, 400, "temperature"),
    ("/v1/completions", {**PROMPT, "logprobs": 0}, 400, "logprobs"),
    ("/v1/completions", {**PROMPT, "echo": True}, 400, "echo"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"1": 5}}, 400, "logit_bias"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "a", "name": "f"}]}, 400, "messages"),
    ("/v1/chat/completions", CHAT, 400, None),  # its bundle has no chat template
]


async def test_what_is_not_honoured_is_refused_by_name(serve: Serve) -> None:
    async with serve(models=ALL) as up:
        for route, body, status, param in REFUSED:
            answer = await up.call(route, **body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), (route, body, error)
            assert error["type"] == "invalid_request_error" and error["code"] and error["message"]
            assert param is None or f"{param}" in error["message"]
            if len(body.get("prompt", "a")) == 2 and not param:
                assert error["message"].startswith("prompt 1: ") and error["details"]["index"] == 1
        harmless = {"seed": 1, "user": "me", "n": 1, "top_p": 1, "presence_penalty": 0, "logit_bias": {}, "suffix": ""}
        assert (await up.call("/v1/completions", **PROMPT, **harmless)).status_code == 200
        assert up.host.health()["lanes"]["embed"]["strikes"] == 0


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("oom", 503, "true"),
        ("inference_failed", 500, "false"),
        ("operation_mismatch", 422, "false"),
        ("backend_missing", 503, "false"),
        ("queue_full", 429, "true"),
    ],
)
def test_each_error_has_its_status(code: str, status: int, retry: str) -> None:
    answer = service_module.failure(revive({"code": code, "message": "no", "retry_after_ms": 100}))
    assert json.loads(answer.body)["error"]["code"] == code
    assert (answer.status_code, answer.headers["x-should-retry"]) == (status, retry)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_an_error_in_the_middle_of_a_stream_is_an_event(serve: Serve) -> None:
    rules = [{"on": "GENERATE", "nth": [1, 3], "do": [{"err": {"code": "oom", "msg": "no room"}}]}]
    # The first slice has its 16 tokens and is not the end: another one follows.
    more = {"on": "GENERATE", "do": [{"reply": {"set": {"finish_reason": "length", **LONG}}}]}
    async with serve({"rules": [*rules, more]}, models=("writer",)) as up:
        answer = await up.call("/v1/completions", prompt="a", stream=True, max_tokens=4)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "oom"
        answer = await up.call("/v1/completions", prompt="a", stream=True, max_tokens=40)
        *_, last = events(answer.text)
        assert answer.status_code == 200 and last["error"]["code"] == "oom", "and no [DONE]"


LONG = {"text": "ab", "n_gen": 16, "generated_token_ids": [4] * 16}


# --- leaving, waiting, limits ----------------------------------------------------------------------------------------


def busy(go: Path, started: Path) -> dict[str, Any]:
    return {"rules": [{"on": "EMBED_BATCH", "nth": 1, "do": [{"touch": str(started)}, {"wait_for": str(go)}]}]}


async def test_a_deadline_of_the_header_and_of_the_body(serve: Serve, tmp_path: Path) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    async with serve(busy(go, started)) as up:
        late = await up.web.post("/v1/embeddings", json=EMBED, headers={"x-synapse-deadline": "0.2"})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        assert (await up.call("/v1/embeddings", input="b", timeout=0.1)).status_code == 504
        for wrong in ("soon", "-1", "nan"):
            refused = await up.web.post("/v1/embeddings", json=EMBED, headers={"x-synapse-deadline": wrong})
            assert refused.status_code == 400
        go.touch()
        assert (await up.call("/v1/embeddings", input="c")).status_code == 200


async def test_a_client_that_leaves_is_a_caller_that_left(serve: Serve, tmp_path: Path) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    async with serve(busy(go, started)) as up:
        counters = up.host.counters["embed"]
        leaving = asyncio.ensure_future(up.call("/v1/embeddings", input="a"))
        await until(started.exists)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: counters.requests.get(("embed", "cancelled")))
        go.touch()
        expected = (await up.host.embed("toy", ["b"])).tolist()
        answer = (await up.call("/v1/embeddings", input="b")).json()
        assert answer["data"][0]["embedding"] == expected[0], "and the reply that came too late is nobody's"
        lane = up.host.health()["lanes"]["embed"]
        assert (lane["strikes"], lane["generation"], counters.abandoned) == (0, 1, 1)


async def test_a_client_that_leaves_a_stream_ends_it(serve: Serve) -> None:
    slow = [{"sleep": 0.05}, {"reply": {"set": {"finish_reason": "length", **LONG}}}]
    async with serve({"rules": [{"on": "GENERATE", "do": slow}]}, models=("writer",)) as up:
        body = {"prompt": "a", "stream": True, "max_tokens": 48}
        async with up.web.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                assert line.startswith("data: ")
                break
        await until(lambda: up.host.health()["lanes"]["generate"]["state"] == "idle")
        asked = up.host.counters["generate"].requests
        await asyncio.sleep(0.3)
        assert up.host.counters["generate"].requests == asked, "no slice is asked for any more"


async def test_how_much_is_taken_in(serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    async with serve(busy(go, started)) as up:
        monkeypatch.setattr(service_module, "MAX_BODY", 1000)
        announced = await up.call("/v1/embeddings", input="x" * 2000)

        async def chunks() -> Any:
            for _ in range(20):
                yield b" " * 100

        chunked = await up.web.post("/v1/embeddings", content=chunks())
        monkeypatch.setattr(service_module, "MAX_BODY", 10_000_000)
        many = await up.call("/v1/embeddings", input=[1] * (service_module.MAX_ELEMENTS + 2))
        for answer in (announced, chunked, many):
            assert answer.status_code == 413 and answer.json()["error"]["details"]["limit"]
        monkeypatch.setattr(service_module, "MAX_REQUESTS", 1)
        first = asyncio.ensure_future(up.call("/v1/embeddings", input="a"))
        await until(started.exists)
        full = await up.call("/v1/embeddings", input="b")
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert (await up.get("/synapse/lanes"))["workers"], "operators are not shut out"
        go.touch()
        assert (await first).status_code == 200 == (await up.call("/v1/embeddings", input="b")).status_code


async def test_nothing_blocks_the_loop_for_long(serve: Serve) -> None:
    """The worst bodies at the limits, by the processor time of the loop's longest step: others use this machine too."""
    async with serve() as up:
        await up.call("/v1/embeddings", input="a")
        elements = service_module.MAX_ELEMENTS
        bodies = {
            "rows": b'{"input":[' + b",".join([b"[1]"] * elements) + b"]}",
            "ids": b'{"input":[' + b",".join([b"12345"] * elements) + b"]}",
            "text": b'{"input":"' + b"\\u00e9" * ((service_module.MAX_BODY - 20) // 6) + b'"}',
            "many": json.dumps({"input": ["a b c"] * 2048}).encode(),
        }
        steps: dict[str, float] = {}

        async def watch(name: str) -> None:
            while True:
                before = time.thread_time()
                await asyncio.sleep(0)
                steps[name] = max(steps.get(name, 0.0), time.thread_time() - before)

        for name, body in bodies.items():
            client = asyncio.to_thread(httpx.post, f"{up.url}/v1/embeddings", content=body, timeout=60, trust_env=False)
            watching = asyncio.ensure_future(watch(name))
            await client
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        print({name: f"{seconds * 1000:.0f} ms" for name, seconds in steps.items()})
        assert max(steps.values()) < 0.1


async def raw(up: Served, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = httpx.URL(up.url).host, httpx.URL(up.url).port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("slow", ["silent", "head", "body", "rest of a refused body"])
async def test_a_slow_client_is_let_go(serve: Serve, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    monkeypatch.setattr("synapse_host.serve.listening.HEAD_S", 0.3)
    monkeypatch.setattr(service_module, "BODY_S", 0.3)
    head = b"POST /embed HTTP/1.1\r\nHost: %s\r\nContent-Length: 1000000\r\n\r\n{"
    start = {
        "silent": b"",
        "head": b"GET /health HTTP/1.1\r\n",
        "body": head % b"localhost",
        "rest of a refused body": head % b"evil.example",
    }
    async with serve() as up:
        reader, writer = await raw(up, start[slow])

        async def dripping() -> None:
            while True:
                writer.write(b"" if slow == "silent" else b"X: y\r\n" if slow == "head" else b" ")
                await asyncio.sleep(0.05)

        drip = asyncio.ensure_future(dripping())
        said = b""
        try:
            async with asyncio.timeout(10):
                said = await reader.read(12)
                await reader.read()
        except ConnectionError:
            pass  # it is closed while the client still sends
        drip.cancel()
        await asyncio.gather(drip, return_exceptions=True)
        assert said.split(b" ")[1:2] == {"body": [b"408"], "rest of a refused body": [b"403"]}.get(slow, [])
        writer.close()
        assert (await up.web.get("/health")).status_code == 200


async def test_a_client_that_does_not_read_is_let_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synapse_host.serve.listening.SEND_S", 0.2)
    monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "max_size", 4096)  # type: ignore[attr-defined]
    async with serve() as up:
        body = json.dumps({"input": ["a"] * 2048}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        with deaf:
            await loop.sock_connect(deaf, ("127.0.0.1", httpx.URL(up.url).port))
            await loop.sock_sendall(deaf, head + body)
            await until(lambda: up.service.requests)
            await until(lambda: not up.service.requests)
            assert (await up.web.get("/health")).status_code == 200


async def test_too_many_connections_are_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synapse_host.serve.listening.MAX_CONNECTIONS", 16)
    async with serve() as up:
        many = [await raw(up, b"") for _ in range(40)]
        ended = await asyncio.gather(*(_ended(reader) for reader, _ in many))
        assert ended.count(False) == 16
        assert "lanes" in await up.get("/synapse/lanes"), "the operator's socket has its own count"
        for _, writer in many:
            writer.close()
        await asyncio.sleep(0.1)
        assert (await up.web.get("/health")).status_code == 200


async def _ended(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.3):
            return await reader.read(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def test_a_thousand_connections_at_once(serve: Serve) -> None:
    async with serve() as up:
        many = [await raw(up, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(1000)]
        for reader, writer in many:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
