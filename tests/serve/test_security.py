"""Who may ask: keys, names, origins; and what is never written down."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.serve.conftest import Serve

pytestmark = pytest.mark.process

KEY = "sixteen-and-more-characters"
SHOWN = {"authorization": f"Bearer {KEY}"}
TEXT = {"input": "secret words"}


ASKED: dict[str, tuple[dict[str, Any], list[tuple[dict[str, str], int]]]] = {
    "no key": ({}, [
        ({}, 200),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]"}, 200),
        ({"host": "rebound.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "localhost:80", "origin": "http://localhost:81"}, 403),
        ({"host": "localhost:80", "origin": "http://localhost:80"}, 200),
    ]),
    "an origin": ({"origins": ["https://mine.example"]}, [
        ({"origin": "https://mine.example"}, 200),
        ({"origin": "https://mine.example.evil"}, 403),
    ]),
    "a key": ({"key": KEY.encode()}, [
        ({}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        (SHOWN, 200),
        ({"x-api-key": KEY}, 200),
        ({**SHOWN, "host": "models.example"}, 200),
        ({**SHOWN, "origin": "https://evil.example"}, 403),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(("served", "asked"), ASKED.values(), ids=ASKED)
async def test_who_is_answered(serve: Serve, served: dict[str, Any], asked: list[tuple[dict[str, str], int]]) -> None:
    async with serve(served=served) as up:
        for headers, status in asked:
            for answer in (
                await up.web.post("/v1/embeddings", json=TEXT, headers=headers),
                await up.web.get("/v1/models", headers=headers),
            ):
                assert answer.status_code == status, (headers, answer.text)
                assert ("www-authenticate" in answer.headers) == (status == 401)
                assert KEY not in answer.text
        assert "lanes" in await up.get("/synapse/lanes"), "the user's own commands show no key"


@pytest.mark.parametrize("key", [None, KEY.encode()])
async def test_over_tcp_lanes_are_changed_with_a_key_alone(serve: Serve, key: bytes | None) -> None:
    async with serve(served={"key": key}) as up:
        for route, body in (("load", {"model": "toy"}), ("probe", {"lane": "embed"}), ("unload", {"model": "toy"})):
            assert (await up.call(f"/synapse/{route}", **body)).status_code == 401
            shown = await up.web.post(f"/synapse/{route}", json=body, headers=SHOWN)
            assert shown.status_code == (401 if key is None else 200)
        for route in ("/", "/health", "/ready"):
            assert (await up.web.get(route)).status_code == 200, "these hold nothing and need no key"


async def test_a_browser_is_let_in_from_the_named_origin_alone(serve: Serve) -> None:
    async with serve(served={"key": KEY.encode(), "origins": ["https://mine.example"]}) as up:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        good = await up.web.options("/v1/embeddings", headers={"origin": "https://mine.example", **asks})
        assert good.status_code == 200 and good.headers["access-control-allow-origin"] == "https://mine.example"
        bad = await up.web.options("/v1/embeddings", headers={"origin": "https://evil.example", **asks})
        assert bad.status_code == 400 and "access-control-allow-origin" not in bad.headers
        answer = await up.web.get("/v1/models", headers={"origin": "https://mine.example", **SHOWN})
        assert answer.headers["access-control-allow-origin"] == "https://mine.example"


async def test_neither_key_nor_text_is_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serve(served={"key": KEY.encode()}) as up:
            await up.web.post("/v1/embeddings", json=TEXT, headers=SHOWN)
            await up.web.post("/v1/embeddings", json={"nonsense": "secret words"}, headers=SHOWN)
            monkeypatch.setattr(up.host, "embed_result", None)
            broken = await up.web.post("/v1/embeddings", json=TEXT, headers=SHOWN)
            assert broken.status_code == 500 and broken.json()["error"]["code"] == "internal_error"
            connection = broken.extensions["network_stream"]
            again = await up.web.post("/v1/embeddings", json=TEXT, headers=SHOWN)
            assert again.extensions["network_stream"] is connection, "the answer ended the connection"
    assert "a request failed: POST /v1/embeddings" in caplog.text
    assert KEY not in caplog.text and "secret" not in caplog.text
