"""The llama worker as a process: every refusal leaves the same pid answering, and an abort leaves one line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.protocol.messages import Err, Generate, Text
from tests.support.toy_gguf import ToyGguf, rewrite
from tests.support.worker_client import (
    ROOT,
    Exchange,
    WorkerClient,
    WorkerEnded,
    ids_bytes,
    module_worker,
    require_loaded,
)

pytestmark = [pytest.mark.llama, pytest.mark.process]

Toys = Callable[[str], ToyGguf]


@pytest.fixture
def worker() -> Iterator[WorkerClient]:
    with module_worker("engines.llama") as client:
        yield client


def load(client: WorkerClient, toy: ToyGguf, **config: object) -> str:
    return require_loaded(client.load(toy.path, toy.digest, **config)).model_ref


def generate(client: WorkerClient, ref: str, prompt: list[int], max_tokens: int = 4) -> Exchange:
    request = Generate(req_id=client.next_id(), model_ref=ref, max_tokens=max_tokens)
    return client.call(request, ids_bytes([prompt]))


def test_every_refusal_leaves_the_same_process_answering(worker: WorkerClient, toys: Toys, tmp_path: Path) -> None:
    headless = rewrite(toys("bert-rerank").path, tmp_path / "headless.gguf", drop=("cls",))
    lost = rewrite(toys("bert-rerank").path, tmp_path / "lost.gguf", synapse__token_type_vocab_offset=-1)
    bert, bert512 = load(worker, toys("bert")), load(worker, toys("bert512"))
    qwen, llama = load(worker, toys("qwen3-generate")), load(worker, toys("llama-generate"))
    cross, bare, typeless = load(worker, toys("bert-rerank")), load(worker, headless), load(worker, lost)
    qwen3, pid = load(worker, toys("qwen3")), worker.hello.pid
    expected = worker.embed(bert, [[5, 6, 7]]).raw

    refusals: dict[str, tuple[Callable[[], Exchange], str]] = {
        "600 tokens into 512 positions": (lambda: worker.embed(bert512, [[5] * 600]), "invalid_request"),
        "id beyond the vocabulary": (lambda: worker.embed(bert, [[5], [128]]), "invalid_request"),
        "rerank without a head": (lambda: worker.rerank(bert, [10], [[11]]), "operation_mismatch"),
        "rerank with the head lost": (lambda: worker.rerank(bare, [10], [[11]]), "operation_mismatch"),
        "rerank with token types lost": (lambda: worker.rerank(typeless, [10], [[11]]), "model_unsupported"),
        "rerank on qwen3": (lambda: worker.rerank(qwen, [10], [[11]]), "operation_mismatch"),
        "pair too long": (lambda: worker.rerank(cross, [10] * 30, [[11] * 60]), "invalid_request"),
        "nothing left of the query": (lambda: worker.rerank(cross, [2, 3], [[11]]), "invalid_request"),
        "513 tokens into a decoder's 512": (lambda: worker.embed(qwen3, [[5] * 513]), "invalid_request"),
        "id beyond a decoder's vocabulary": (lambda: worker.embed(qwen3, [[320]]), "invalid_request"),
        "id of the doubled half": (lambda: worker.rerank(cross, [10], [[128]]), "invalid_request"),
        "query id of the doubled half": (lambda: worker.rerank(cross, [128], [[10]]), "invalid_request"),
        "generate on a reranker": (lambda: generate(worker, cross, [5]), "operation_mismatch"),
        "generate on a decoder that embeds": (lambda: generate(worker, qwen3, [5]), "operation_mismatch"),
        "a prompt over the context": (lambda: generate(worker, llama, [5] * 257, 0), "invalid_request"),
        "embed on a reranker": (lambda: worker.embed(cross, [[5]]), "operation_mismatch"),
        "generate on an encoder": (lambda: generate(worker, bert, [5]), "operation_mismatch"),
        "max_tokens over the ceiling": (lambda: generate(worker, llama, [5], max_tokens=513), "invalid_request"),
        "prompt and tokens over the context": (lambda: generate(worker, llama, [5] * 255, 2), "invalid_request"),
        "prompt id beyond the vocabulary": (lambda: generate(worker, llama, [320]), "invalid_request"),
        "encode on a cache": (
            lambda: worker.load(toys("qwen3").path, toys("qwen3").digest, forward_pass="encode"),
            "config_invalid",
        ),
        "another backend": (
            lambda: worker.load(toys("bert").path, toys("bert").digest, backend="metal"),
            "backend_missing",
        ),
    }
    for name, (call, code) in refusals.items():
        answer = call()
        assert answer.code == code, f"{name}: {answer.reply}"
        assert worker.embed(bert, [[5, 6, 7]]).raw == expected, name
        assert worker.process.pid == pid and worker.process.poll() is None
    assert "Qwen3" in str(worker.rerank(qwen, [10], [[11]]).reply), "the message says which models these are"
    assert "token type" in str(worker.rerank(typeless, [10], [[11]]).reply)
    assert worker.ping().models_loaded == 8
    assert worker.stderr() == "", "a refusal is no event for the log"
    assert worker.shutdown() == 0


def test_oom_is_real(toys: Toys, tmp_path: Path) -> None:
    """An address space too small for the cache, then for the weights: the worker says oom and lives."""
    script = (
        "import resource, sys\n"
        "from engines.llama.__main__ import main\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "sys.exit(main())\n"
    )
    wide = rewrite(toys("llama-generate").path, tmp_path / "wide.gguf", llama__context_length=2**24)
    with WorkerClient([sys.executable, "-c", script]) as client:
        ref = load(client, wide, ctx_size=2**24)
        assert generate(client, ref, [5]).code == "oom", "a cache of 4 GiB in a space of 3"
        small = load(client, toys("llama-generate"))
        assert isinstance(generate(client, small, [5]).reply, Text)
        assert client.ping().models_loaded == 2
        assert client.shutdown() == 0


ABORTING = '''
"""A llama worker whose EMBED_BATCH runs into a real GGML_ASSERT: more tokens than n_ubatch in one llama_encode (U1)."""
import sys
import engines.llama.binding as binding
import engines.llama.engine as engine
from engines.runtime.main import run


class Unguarded(binding.NativeContext):
    def __init__(self, model, shape):
        import dataclasses
        super().__init__(model, dataclasses.replace(shape, n_ubatch=2048))
        self.api.llama_free(self._context)
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.embeddings = 2048, 2048, 64, 64, True
        self._context = self.api.llama_init_from_model(model.handle, params)


import engines.llama.contexts as contexts
contexts.NativeContext = Unguarded
sys.exit(run(engine.LlamaEngine, program="aborting"))
'''


def test_an_abort_leaves_one_line_and_the_signal(toys: Toys, tmp_path: Path) -> None:
    script = tmp_path / "aborting.py"
    script.write_text(ABORTING)
    environment = {"PYTHONPATH": str(ROOT)}
    with WorkerClient([sys.executable, str(script)], env=environment) as client:
        ref = load(client, toys("bert512"))
        with pytest.raises(WorkerEnded):
            client.embed(ref, [[5] * 300])
        assert client.process.wait(30) == -signal.SIGABRT
        (line,) = [line for line in client.stderr().splitlines() if "GGML_ASSERT" in line]
        assert "n_ubatch" in line
        assert "gdb" not in client.stderr() and len(client.stderr()) < 8192


@pytest.mark.parametrize("toy", ["bert", "bert-rerank", "llama-generate"])
def test_no_single_wrong_number_in_the_metadata_kills_the_worker(
    worker: WorkerClient, toys: Toys, tmp_path: Path, toy: str
) -> None:
    """Each integer of the header in turn 0, huge or absent: LOAD refuses, or what is served is served or refused."""
    import gguf

    source = toys(toy).path
    fields = gguf.GGUFReader(source).fields
    keys = [
        key
        for key, entry in fields.items()
        if not key.startswith("GGUF.") and entry.types[0] in (gguf.GGUFValueType.UINT32, gguf.GGUFValueType.UINT64)
    ]
    assert len(keys) >= 8
    for key in keys:
        for value in (0, 2**31, -1):
            wrong = rewrite(source, tmp_path / "wrong.gguf", **{key.replace(".", "__"): value})
            answer = worker.load(wrong.path, wrong.digest)
            if isinstance(answer.reply, Err):
                assert answer.code in ("artifact_invalid", "model_unsupported", "oom"), (key, value, answer.reply)
                continue
            ref = require_loaded(answer).model_ref
            worker.embed(ref, [[5, 6, 7], [8]])
            worker.rerank(ref, [5], [[6, 7]])
            generate(worker, ref, [5, 6, 7])
            worker.unload(ref)
    assert worker.ping().models_loaded == 0
    assert worker.shutdown() == 0
