"""The page in a real browser: what it shows, what it lets a person try, and that no text of a worker becomes markup."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from tests.serve.conftest import Serve, Served

async_api = pytest.importorskip("playwright.async_api", reason="needs the extra 'browser' (playwright)")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: chromium"),
    pytest.mark.timeout(300, method="thread"),
]

MARKUP = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
KEY = "sixteen-and-more-characters"


@pytest.fixture
def browse(serve: Serve) -> Callable[..., AbstractAsyncContextManager[tuple[Served, Any]]]:
    """Show the page of a served host; whatever the browser complains of, or asks of others, fails the test."""

    @asynccontextmanager
    async def shown(*arguments: Any, **options: Any) -> AsyncIterator[tuple[Served, Any]]:
        async with serve(*arguments, **options) as up, async_api.async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = await browser.new_page()
            wrong: list[str] = []
            asked: list[str] = []
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            await page.goto(up.url)
            yield up, page
            await browser.close()
            assert wrong == [] and all(up.url in url or url.startswith("data:") for url in asked)

    return shown


async def test_lanes_a_crash_and_its_log(browse: Any) -> None:
    async with browse({"rules": [{"on": "EMBED_BATCH", "do": [{"stderr": MARKUP}, {"signal": "SIGKILL"}]}]}) as (
        up,
        page,
    ):
        lane = page.locator("article[data-lane=embed]")
        await lane.get_by_text("idle", exact=True).wait_for()
        answer = await up.call("/v1/embeddings", input="a")
        assert answer.status_code == 503
        await lane.get_by_text("Last fault: SIGKILL during embed (generation 1)").wait_for()
        await lane.get_by_text("Last fault").click()
        assert MARKUP in await lane.locator("pre").text_content()
        await page.wait_for_timeout(2500)
        assert await lane.locator("details").last.get_attribute("open") is not None, "what is open stays so"
        text = await lane.text_content()
        for words in ("toy", "scripted (cpu)", "Strikes", "requests", "latency", "Memory"):
            assert words in text
        assert await page.title() == "synapse" and await page.locator("article img").count() == 0


async def test_what_a_person_tries(browse: Any) -> None:
    async with browse(models=("toy", "judge", "writer")) as (_, page):
        run = page.get_by_role("button", name="Run")
        answer = page.locator("#answer")
        await page.locator("select option").first.wait_for(state="attached")
        await page.locator("textarea").fill("a b\na b\nc")
        await run.click()
        await answer.get_by_text("3 × 8, cosine similarity").wait_for()
        first = (await answer.locator("tr").first.inner_text()).split()
        assert first[:4] == ["a", "b", "1.00", "1.00"]
        await page.get_by_role("button", name="Rerank").click()
        await page.locator("[name=query]").fill("query")
        await page.locator("textarea").fill("a\nb <b>bold</b>")
        await run.click()
        await answer.locator("tr").nth(1).wait_for()
        assert "b <b>bold</b>" in await answer.inner_text()
        await page.get_by_role("button", name="Chat").click()
        await run.click()
        await answer.get_by_text("has no chat template").wait_for()
        await page.locator("article[data-lane=rerank]").get_by_text("latency").wait_for()


async def test_light_and_dark(browse: Any) -> None:
    async with browse() as (_, page):
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


async def test_with_a_key_it_asks_for_it(browse: Any) -> None:
    async with browse(served={"key": KEY.encode()}) as (_, page):
        await page.get_by_label("API key").fill(KEY)
        assert await page.locator("article").count() == 0
        await page.get_by_role("button", name="Use").click()
        await page.locator("article[data-lane=embed]").wait_for()


async def test_its_policy_lets_no_other_script_run(serve: Serve) -> None:
    async with serve() as up:
        for path in ("/", "/page.js", "/page.css"):
            answer = await up.web.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
            text = answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text and "https://" not in text
