"""One rival in its own process and environment, driven by JSON lines; it times itself around its own call.

    .venv-rivals/bin/python bench/rival.py KIND OPTIONS_JSON

First line out: {"ready": true, "what": …} or {"error": …}. Then a line in, a line out: {"op": "embed", "texts": […]} ->
{"seconds": s, "first": […]} with the first vector, so that the suite can see that the same thing was computed.
OPTIONS: bundle (folder), folder (scratch), threads, gguf (file). Standard library at the top: what a rival needs is
imported by that rival alone.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 32
MICRO_BATCH = 512


class Rival:
    """Base: options, and what most of them need."""

    what = ""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.threads = int(options["threads"])
        self.bundle = Path(options["bundle"]) if "bundle" in options else Path()
        self.scratch = Path(options["folder"])

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.bundle / "manifest.json").read_text())
        return found

    def checkpoint(self, *, rerank: bool = False) -> Path:
        """Write the bundle's fp32 weights as a Hugging Face checkpoint, once an environment, and return its folder.

        An older transformers can't read the tokenizer configuration that a newer one writes.
        """
        folder = self.scratch / f"hf-{self.bundle.name}-{Path(sys.prefix).name}"
        if (folder / "model.safetensors").exists():
            return folder
        from safetensors.torch import load_file
        from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

        manifest = self.manifest()
        config = {
            k: v for k, v in manifest["config"].items() if "dropout" not in k and k not in ("dtype", "_name_or_path")
        }
        for key in ("layer_norm_eps", "initializer_range"):
            if key in config:
                config[key] = float(config[key])
        package = next(a for a in manifest["artifacts"] if a["format"] == "safetensors-package" and a["dtype"] == "f32")
        weights = load_file(self.bundle / package["path"])
        if rerank:
            model: Any = BertForSequenceClassification(BertConfig(**{**config, "num_labels": 1}))
            weights = {(k if k.startswith("classifier") else f"bert.{k}"): v for k, v in weights.items()}
        else:
            model = BertModel(BertConfig(**config), add_pooling_layer=any(k.startswith("pooler") for k in weights))
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and not [m for m in missing if "position_ids" not in m], (missing, unexpected)
        model.save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(self.bundle / manifest["tokenizer"]["path"]),
            model_max_length=manifest["max_tokens"],
            unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]", mask_token="[MASK]",
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        )  # fmt: skip
        tokenizer.save_pretrained(folder)
        return folder

    def onnx(self) -> Path:
        """Export the checkpoint's encoder (ids, mask, types -> last_hidden_state), once, and return its folder."""
        folder = self.scratch / f"onnx-{self.bundle.name}"
        if (folder / "done").exists():
            return folder
        import shutil
        import warnings

        import torch
        from transformers import AutoModel

        source = self.checkpoint()
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        model = AutoModel.from_pretrained(source, attn_implementation="eager").eval()

        class Encoder(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
                return self.model(
                    input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
                ).last_hidden_state

        ids = torch.ones((2, 8), dtype=torch.long)
        axes = {0: "batch", 1: "sequence"}
        names = ["input_ids", "attention_mask", "token_type_ids"]
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Encoder(), (ids, torch.ones_like(ids), torch.zeros_like(ids)), str(folder / "model.onnx"),
                input_names=names, output_names=["last_hidden_state"], opset_version=17, dynamo=False,
                dynamic_axes=dict.fromkeys([*names, "last_hidden_state"], axes),
            )  # fmt: skip
        (folder / "done").touch()
        return folder

    def close(self) -> None:
        """Stop what was started."""


class SentenceTransformers(Rival):
    """SentenceTransformer.encode, batches of 32."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import sentence_transformers
        import torch
        from sentence_transformers import models

        torch.set_num_threads(self.threads)
        manifest = self.manifest()
        transformer = models.Transformer(str(self.checkpoint()), max_seq_length=manifest["max_tokens"])
        pooling = models.Pooling(manifest["dims"], pooling_mode=manifest["pooling"])
        self.model = sentence_transformers.SentenceTransformer(
            modules=[transformer, pooling, models.Normalize()], device="cpu"
        )
        self.what = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"

    def embed(self, texts: list[str]) -> Any:
        """Return vectors."""
        return self.model.encode(texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False)


class SentenceTransformersOnRay(Rival):
    """The same in an actor of Ray Data, as its documentation shows: read_json, map_batches, write_parquet."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import ray.data
        import sentence_transformers

        self.checkpoint()
        self.what = f"sentence-transformers {sentence_transformers.__version__} under Ray Data {ray.__version__}"

    def embed_file(self, source: str, out: str, pieces: int, piece: int) -> Any:
        """Embed a file into a folder of parquet; return a vector."""
        import ray

        options = self.options

        class Model:
            def __init__(self) -> None:
                self.rival = SentenceTransformers(options)

            def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
                return {**batch, "vector": self.rival.embed(list(batch["text"]))}

        # One core more than the model's threads: reading and writing are tasks of their own.
        ray.init("local", num_cpus=self.threads + 1, include_dashboard=False, log_to_driver=False)
        try:
            data = ray.data.read_json(source, override_num_blocks=pieces).map_batches(
                Model, batch_size=piece, num_cpus=self.threads, compute=ray.data.ActorPoolStrategy(size=1)
            )
            data.write_parquet(out)
        finally:
            ray.shutdown()
        return [[0.0]]


class CrossEncoder(Rival):
    """CrossEncoder.predict, batches of 32."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import sentence_transformers
        import torch

        torch.set_num_threads(self.threads)
        folder = self.checkpoint(rerank=True)
        self.model = sentence_transformers.CrossEncoder(
            str(folder), device="cpu", max_length=self.manifest()["max_tokens"]
        )
        self.what = f"sentence-transformers {sentence_transformers.__version__} CrossEncoder"

    def rerank(self, query: str, documents: list[str]) -> Any:
        """Return logits."""
        import torch

        pairs = [(query, document) for document in documents]
        return self.model.predict(
            pairs, batch_size=BATCH, show_progress_bar=False, activation_fn=torch.nn.Identity()
        ).reshape(-1, 1)


class Fastembed(Rival):
    """fastembed.TextEmbedding on the fp32 graph, batches of 32."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import fastembed
        from fastembed.common.model_description import ModelSource, PoolingType

        manifest = self.manifest()
        fastembed.TextEmbedding.add_custom_model(
            model="local/bench", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="local/bench"),
            dim=manifest["dims"], model_file="model.onnx",
        )  # fmt: skip
        self.model = fastembed.TextEmbedding(
            "local/bench",
            specific_model_path=str(self.onnx()),
            threads=self.threads,
            providers=["CPUExecutionProvider"],
        )
        self.what = f"fastembed {fastembed.__version__}"

    def embed(self, texts: list[str]) -> Any:
        """Return vectors."""
        import numpy as np

        return np.array(list(self.model.embed(texts, batch_size=BATCH)))


class Infinity(Rival):
    """infinity's AsyncEmbeddingEngine in this process, torch engine, batches of 32; mean pooling and L2 are its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import asyncio
        from importlib.metadata import version

        import infinity_emb
        import torch

        torch.set_num_threads(self.threads)
        assert self.manifest()["pooling"] == "mean", "infinity pools a bare checkpoint by the mean"
        arguments = infinity_emb.EngineArgs(
            model_name_or_path=str(self.checkpoint()), engine="torch", device="cpu", dtype="float32", batch_size=BATCH
        )
        self.engine = infinity_emb.AsyncEmbeddingEngine.from_args(arguments)
        self.runner = asyncio.Runner()
        self.runner.run(self.engine.astart())
        self.what = f"infinity {version('infinity-emb')}, torch {torch.__version__}"

    def embed(self, texts: list[str]) -> Any:
        """Return vectors."""
        return self.runner.run(self.engine.embed(sentences=texts))[0]

    def close(self) -> None:
        """Stop its threads."""
        self.runner.run(self.engine.astop())
        self.runner.close()


class HandFed(Rival):
    """onnxruntime as a careful person feeds it: `tokenizers`, sorted by length, 32 a batch, all threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import onnxruntime
        from tokenizers import Tokenizer

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = self.threads
        self.session = onnxruntime.InferenceSession(
            str(self.onnx() / "model.onnx"), settings, providers=["CPUExecutionProvider"]
        )
        manifest = self.manifest()
        self.tokenizer = Tokenizer.from_file(str(self.bundle / manifest["tokenizer"]["path"]))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(manifest["max_tokens"])
        self.what = f"onnxruntime {onnxruntime.__version__}, sorted, {BATCH} a batch, {self.threads} threads"

    def embed(self, texts: list[str]) -> Any:
        """Return vectors."""
        import numpy as np

        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        out = np.empty((len(rows), 384), np.float32)
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            width = len(rows[part[0]])
            ids = np.zeros((len(part), width), np.int64)
            mask = np.zeros_like(ids)
            for place, index in enumerate(part):
                ids[place, : len(rows[index])] = rows[index]
                mask[place, : len(rows[index])] = 1
            feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            states = self.session.run(None, feed)[0]
            means = (states * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
            out[part] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return out


class HttpServer(Rival):
    """Base of the llama.cpp servers: OpenAI's /v1/embeddings over HTTP on loopback, one client, texts in."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()
        deadline = time.monotonic() + 60
        while True:
            try:
                self.embed(["ready?"])
                return
            except (OSError, http.client.HTTPException, KeyError, ValueError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def start(self) -> None:
        """Start the server on ``self.port``."""
        raise NotImplementedError

    def embed(self, texts: list[str]) -> Any:
        """Return vectors."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = json.dumps({"model": "bench", "input": texts})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        rows = sorted(answer["data"], key=lambda row: row["index"])
        return [row["embedding"] for row in rows]


class LlamaCppPython(HttpServer):
    """``python -m llama_cpp.server``."""

    def start(self) -> None:
        """Start it as its documentation says."""
        from importlib.metadata import version

        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "llama_cpp.server", "--model", self.options["gguf"], "--embedding", "true",
                "--n_threads", str(self.threads), "--n_threads_batch", str(self.threads), "--n_ctx", "512",
                "--n_batch", str(MICRO_BATCH), "--n_ubatch", str(MICRO_BATCH), "--port", str(self.port),
                "--host", "127.0.0.1", "--verbose", "false",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.what = f"llama-cpp-python {version('llama-cpp-python')} server over HTTP"

    def close(self) -> None:
        """Stop it."""
        self.process.kill()
        self.process.wait()


class Xllamacpp(HttpServer):
    """llama.cpp's own server, as xllamacpp packs it."""

    def start(self) -> None:
        """Start it in this process."""
        from importlib.metadata import version

        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = self.options["gguf"]
        params.embedding = True
        params.hostnames, params.port = ["127.0.0.1"], self.port
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        params.n_batch = params.n_ubatch = MICRO_BATCH
        params.n_ctx = MICRO_BATCH
        params.n_parallel = 1
        self.server = xllamacpp.Server(params)
        self.what = f"xllamacpp {version('xllamacpp')} (llama.cpp's server) over HTTP"

    def close(self) -> None:
        """End with the process."""


class LlamaGenerate(Rival):
    """llama.cpp by hand: one context, greedy, nothing between two tokens but the arg max. llama-bench in Python."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import ctypes

        import llama_cpp

        self.api = llama_cpp
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._silent = silent
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            options["gguf"].encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = self.threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.what = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), one context, {self.threads} threads"

    def generate(self, ids: list[int], max_tokens: int) -> Any:
        """Return [tokens generated, tokens]."""
        import ctypes

        import numpy as np

        api, context = self.api, self.context
        api.llama_memory_clear(api.llama_get_memory(context), False)
        n_vocab = api.llama_vocab_n_tokens(self.vocab)
        buffer = (ctypes.c_int32 * len(ids))(*ids)
        assert api.llama_decode(context, api.llama_batch_get_one(buffer, len(ids))) == 0
        tokens: list[int] = []
        one = (ctypes.c_int32 * 1)()
        while len(tokens) < max_tokens:
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), (n_vocab,))
            token = int(logits.argmax())
            if api.llama_vocab_is_eog(self.vocab, token):
                break
            tokens.append(token)
            if len(tokens) < max_tokens:
                one[0] = token
                assert api.llama_decode(context, api.llama_batch_get_one(one, 1)) == 0
        return [tokens]


class Grpc(Rival):
    """A unary gRPC echo over a Unix socket, client and server in two processes."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import grpc

        address = f"unix:{self.scratch}/grpc.sock"
        self.child = os.fork()
        if not self.child:
            from concurrent.futures import ThreadPoolExecutor

            handler = grpc.method_handlers_generic_handler(
                "bench", {"echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
            )
            server = grpc.server(ThreadPoolExecutor(1))
            server.add_generic_rpc_handlers((handler,))
            server.add_insecure_port(address)
            server.start()
            server.wait_for_termination()
            os._exit(0)
        self.channel = grpc.insecure_channel(address)
        grpc.channel_ready_future(self.channel).result(timeout=20)
        self.call = self.channel.unary_unary("/bench/echo")
        self.what = f"grpcio {grpc.__version__}, unary over a Unix socket"

    def echo(self, size: int, calls: int) -> Any:
        """Return [[p50 seconds]]."""
        import statistics

        raw, times = bytes(size), []
        for _ in range(calls):
            begun = time.perf_counter()
            self.call(raw)
            times.append(time.perf_counter() - begun)
        return [[statistics.median(times)]]

    def close(self) -> None:
        """Stop the server."""
        os.kill(self.child, 9)
        os.waitpid(self.child, 0)


KINDS: dict[str, type[Rival]] = {
    "sentence-transformers": SentenceTransformers,
    "sentence-transformers on ray": SentenceTransformersOnRay,
    "cross-encoder": CrossEncoder,
    "fastembed": Fastembed,
    "infinity": Infinity,
    "onnxruntime": HandFed,
    "llama-cpp-python": LlamaCppPython,
    "xllamacpp": Xllamacpp,
    "llama-generate": LlamaGenerate,
    "grpc": Grpc,
}


def main(kind: str, options: dict[str, Any]) -> int:
    """Serve orders until the end of stdin."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print what they like

    def tell(document: dict[str, Any]) -> None:
        out.write(json.dumps(document) + "\n")
        out.flush()

    try:
        rival = KINDS[kind](options)
    except Exception as exc:  # whatever a rival's libraries raise is told, and the row says why it is missing
        tell({"error": f"{type(exc).__name__}: {exc}"[:500]})
        return 1
    tell({"ready": True, "what": rival.what})
    try:
        for line in sys.stdin:
            order = json.loads(line)
            call = getattr(rival, order.pop("op"))
            begun = time.perf_counter()
            result = call(**order)
            seconds = time.perf_counter() - begun
            tell({"seconds": seconds, "first": [float(number) for number in result[0]]})
    finally:
        rival.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
