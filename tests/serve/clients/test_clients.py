"""Programs of other people against a served host: each does its main call, and gets the host's numbers to the bit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.clients.conftest import Server

pytestmark = [
    pytest.mark.process,
    # What the clients' own libraries warn of and keep open is theirs.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaks_allowed("threads", "descriptors"),
]

TEXTS = ["a b c", "d e f"]
QUERY = "a b"
KEY = "not-needed"


@pytest.fixture
def vectors(server: Server) -> np.ndarray:
    return server.of_host(server.host.embed(server.models["embed"], TEXTS))


@pytest.fixture
def ranking(server: Server) -> list[tuple[int, float]]:
    result = server.of_host(server.host.rerank_result(server.models["rerank"], QUERY, TEXTS))
    return [(index, float(result.scores[index])) for index in result.order]


@pytest.fixture
def answer(server: Server) -> str:
    messages = [{"role": "user", "content": "a b"}]
    return server.of_host(server.host.generate(server.models["generate"], messages, chat=True, max_tokens=8)).text


def same(found: Any, expected: np.ndarray) -> bool:
    return np.array(found, np.float32).tobytes() == expected.tobytes()


def chat(server: Server, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a b"}]
    return {"model": server.models["generate"], "messages": messages, "max_tokens": 8, **more}


def test_openai(server: Server, vectors: np.ndarray, answer: str) -> None:
    openai = pytest.importorskip("openai", reason="needs the extra 'clients'")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        model = server.models["embed"]
        plain = client.embeddings.create(model=model, input=TEXTS)  # the client asks for base64 by itself
        floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        for found in (plain, floats):
            assert same([one.embedding for one in found.data], vectors)
        completion = client.chat.completions.create(**chat(server, temperature=0, seed=7, user="me"))
        assert completion.choices[0].message.content == answer and completion.usage.completion_tokens > 0
        stream = client.chat.completions.create(**chat(server, stream=True, stream_options={"include_usage": True}))
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
        assert chunks[-1].usage == completion.usage
        text = client.completions.create(model=server.models["generate"], prompt="a b", max_tokens=4)
        expected = server.of_host(server.host.generate(server.models["generate"], "a b", max_tokens=4))
        assert text.choices[0].text == expected.text
        assert {one.id for one in client.models.list()} == set(server.models.values())
        with pytest.raises(openai.NotFoundError) as missing:
            client.embeddings.create(model="text-embedding-3-small", input="a")
        assert missing.value.code == "unknown_model"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**chat(server, temperature=0.7))


def test_cohere(server: Server, ranking: list[tuple[int, float]]) -> None:
    cohere = pytest.importorskip("cohere", reason="needs the extra 'clients'")
    for client in (cohere.ClientV2(KEY, base_url=server.url), cohere.Client(KEY, base_url=server.url)):
        found = client.rerank(model=server.models["rerank"], query=QUERY, documents=TEXTS, top_n=2)
        assert [(one.index, one.relevance_score) for one in found.results] == ranking


def test_langchain_openai(server: Server, vectors: np.ndarray, answer: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="needs the extra 'clients'")
    base = {"base_url": f"{server.url}/v1", "api_key": KEY}
    # Without this it counts tokens by OpenAI's tokenizer, which it fetches.
    embeddings = langchain.OpenAIEmbeddings(model=server.models["embed"], check_embedding_ctx_length=False, **base)
    assert same(embeddings.embed_documents(TEXTS), vectors)
    assert same(embeddings.embed_query(TEXTS[1]), vectors[1])
    model = langchain.ChatOpenAI(model=server.models["generate"], max_tokens=8, temperature=0, **base)
    assert model.invoke("a b").content == answer
    assert "".join(chunk.content for chunk in model.stream("a b")) == answer


def test_litellm(server: Server, vectors: np.ndarray, ranking: list[tuple[int, float]], answer: str) -> None:
    litellm = pytest.importorskip("litellm", reason="needs the extra 'clients'")
    base = {"api_base": f"{server.url}/v1", "api_key": KEY}
    found = litellm.embedding(model=f"openai/{server.models['embed']}", input=TEXTS, encoding_format="float", **base)
    assert same([one["embedding"] for one in found.data], vectors)
    options = chat(server, **base)
    whole = litellm.completion(**{**options, "model": f"openai/{options['model']}"})
    assert whole.choices[0].message.content == answer
    ranked = litellm.rerank(
        model=f"jina_ai/{server.models['rerank']}", query=QUERY, documents=TEXTS, api_base=f"{server.url}/v1/rerank",
        api_key=KEY,
    )  # fmt: skip
    assert [(one["index"], one["relevance_score"]) for one in ranked.results] == ranking


def test_huggingface_hub(server: Server, vectors: np.ndarray) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra 'clients'")
    with hub.InferenceClient(model=f"{server.url}/embed", token=KEY) as client:
        assert same(client.feature_extraction(TEXTS), vectors)
        assert same(client.feature_extraction(TEXTS[0], normalize=True, truncate=True), vectors[:1])


def test_curl_as_the_documents_have_it(server: Server) -> None:
    if subprocess.run(["which", "curl"], capture_output=True).returncode:
        pytest.skip("needs curl")
    page = Path(__file__).parents[3].joinpath("docs", "serve.md").read_text()
    commands = re.findall(r"^\$ (curl (?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert len(commands) >= 4
    names = {"minilm": "embed", "ms-marco": "rerank", "smollm2": "generate"}
    for command in commands:
        command = command.replace("http://localhost:8765", server.url)
        for name, task in names.items():
            command = command.replace(f'"{name}"', f'"{server.models[task]}"')
        done = subprocess.run(["bash", "-c", command.replace("curl ", "curl -fsS ", 1)], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, (command, done.stderr)
