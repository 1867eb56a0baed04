"""Rows about real models through the host, text in, against whoever else is installed, in the same rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import texts
from bench.rivals import SETTLE_S, Missing, Rival
from bench.rounds import Row, Spread, interleaved, row
from bench.vocabulary import with_vocabulary
from synapse_host import Host, HostConfig
from synapse_host.models import catalogue
from synapse_host.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from bench.plan import Plan
    from engines.bundle.manifest import Bundle

ENGINES = """version: 1
hardware: {any: {}}
engines:
  onnx-cpu: {engine: cuda, device: cpu, format: safetensors-package, requires: any%(extra)s}
  onnx-cpu-int8: {engine: cuda, device: cpu, format: safetensors-package, requires: any, dtype: [int8]%(extra)s}
  llama-cpu: {engine: llama, device: cpu, format: gguf, requires: any%(extra)s}
lanes:
%(lanes)s
"""
AGREEMENT = 0.995
"""Cosine of the first vector between us and a rival, below which they computed something else."""


def matrix(plan: Plan, lanes: dict[str, tuple[str, str]], *, threads: int | None = None) -> Path:
    """Write a matrix of *lanes*, name -> (task, engine), each engine with *threads* where given."""
    extra = f', runtime_config: {{threads: "{threads}"}}' if threads else ""
    body = "\n".join(f"  {name}: {{task: {task}, engines: [{engine}]}}" for name, (task, engine) in lanes.items())
    path = plan.folder / f"{'-'.join(lanes)}-{threads or 'all'}.yaml"
    path.write_text(ENGINES % {"extra": extra, "lanes": body})
    return path


@asynccontextmanager
async def host(plan: Plan, model: str, task: str, engine: str, *, threads: int | None = None) -> AsyncIterator[Host]:
    """Open a host with one lane for *model* on *engine*, loaded."""
    bundle = catalogue.obtain(model, plan.models_dir)
    found = matrix(plan, {task: (task, engine)}, threads=threads)
    async with Host.open(found, {model: bundle.root}, HostConfig(models_dir=plan.models_dir)) as opened:
        await opened.load(model)
        yield opened


async def rows(plan: Plan) -> list[Row]:
    """Return every row of this group."""
    found: list[Row] = []
    for part in (padding, embed, rerank, generate, overhead, shared, lanes):
        found += await part(plan)
    return found


class Contest:
    """Contestants of one model, and rows between two of them."""

    def __init__(self, plan: Plan, stack: AsyncExitStack) -> None:
        self.plan = plan
        self.stack = stack
        self.rivals: dict[str, Rival] = {}
        self.missing: dict[str, str] = {}

    def rival(self, kind: str, **options: Any) -> None:
        """Start a rival, or remember why not."""
        try:
            self.rivals[kind] = Rival(kind, self.plan, **options)
        except Missing as exc:
            self.missing[kind] = str(exc)
        else:
            self.stack.callback(self.rivals[kind].close)

    def absent(self, group: str, name: str, unit: str, better: str, kind: str, target: float | None) -> Row:
        """Return the row that says that a rival isn't here."""
        why = self.missing.get(kind, "not installed (make bench-rivals)")
        status = "not installed" if "not installed" in why else "failed"
        return Row(group, name, unit, better, rival_name=kind, target=target, status=status, note=why)


def timed(call: Any) -> Any:
    """Return a contestant that awaits *call* and returns its seconds."""

    async def sample() -> float:
        await asyncio.sleep(SETTLE_S)
        begun = time.perf_counter()
        await call()
        return time.perf_counter() - begun

    return sample


INT8 = "onnx-cpu int8 (approximate)"
EMBED_ROWS = (
    # case, ours, rival, target
    ("mix", "onnx-cpu", "sentence-transformers", 2.7),
    ("mix", "onnx-cpu", "infinity", 2.7),
    ("mix", "onnx-cpu", "fastembed", 4.0),
    ("mix", "onnx-cpu", "onnxruntime", 1.35),
    ("mix", INT8, "sentence-transformers", 2.7),
    ("mix", INT8, "fastembed", 4.0),
    ("mix", INT8, "onnxruntime", 1.35),
    ("equal", "onnx-cpu", "fastembed", 0.97),
    ("equal", "onnx-cpu", "sentence-transformers", 1.9),
    ("equal", "onnx-cpu", "onnxruntime", None),
    ("single", "onnx-cpu", "sentence-transformers", 0.87),
    ("single", "onnx-cpu", "fastembed", 0.87),
    ("single", "onnx-cpu", "onnxruntime", 0.87),
    ("mix", "llama-cpu", "sentence-transformers", 2.6),
    ("mix", "llama-cpu", "llama-cpp-python", 3.5),
    ("mix", "llama-cpu", "xllamacpp", 3.5),
    ("mix", "llama-cpu", "one 2-thread context", 1.15),
)


async def padding(plan: Plan) -> list[Row]:
    """Real tokens a computed one on onnx-cpu, of every set of texts below: a count, the same on every machine."""
    from engines.cuda import assembly, buckets

    sets = {
        "256 mixed texts": texts.mixed_lengths(256),
        "200 mixed texts": texts.mixed_lengths(200),
        "64 mixed texts": texts.mixed_lengths(64),
        "32 texts of 64 tokens": [64] * 32,
        "50 pairs of 128 tokens": [128] * 50,
    }

    def share(lengths: list[int], tokens: int) -> float:
        made = buckets.plan(np.array(lengths, np.int32), buckets.Policy(tokens, ladder=(), rows=256)).buckets
        return sum(lengths) / sum(bucket.rows * bucket.width for bucket in made)

    return [
        Row("models", f"onnx-cpu: real tokens a computed one, {name}", "", "higher",
            ours=Spread.of([share(lengths, assembly.CPU_CALL_TOKENS)]), target=0.97, absolute=True, rounds=1,
            note=f"int8: {share(lengths, assembly.CPU_CALL_TOKENS_INT8):.3f}")
        for name, lengths in sets.items()
    ]  # fmt: skip


async def embed(plan: Plan) -> list[Row]:
    """MiniLM: 256 mixed texts, 32 texts of 64 tokens, one text of 64 tokens."""
    bundle = catalogue.obtain("minilm", plan.models_dir)
    tokenizer = bundle.root / "tokenizer.json"
    cases = {
        "mix": texts.mix(tokenizer, 64 if plan.quick else 256),
        "equal": texts.equal(tokenizer, 32, 64),
        "single": texts.equal(tokenizer, 1, 64),
    }
    labels = {
        "mix": f"{len(cases['mix'])} mixed texts",
        "equal": "32 texts of 64 tokens",
        "single": "one text of 64 tokens",
    }
    rounds = {"mix": plan.rounds, "equal": plan.rounds, "single": 3 * plan.rounds}
    found: list[Row] = []
    async with AsyncExitStack() as stack:
        onnx = await stack.enter_async_context(host(plan, "minilm", "embed", "onnx-cpu"))
        llama = await stack.enter_async_context(host(plan, "minilm", "embed", "llama-cpu"))
        int8 = await stack.enter_async_context(host(plan, "minilm", "embed", "onnx-cpu-int8"))
        hosts = {"onnx-cpu": onnx, INT8: int8, "llama-cpu": llama}
        contest = Contest(plan, stack)
        for kind in ("sentence-transformers", "infinity", "fastembed", "onnxruntime"):
            contest.rival(kind, bundle=str(bundle.root))
        served = Path(llama.lane_of("minilm").require().load.artifact_path)
        worded = with_vocabulary(served, tokenizer, plan.folder / "worded.gguf")
        for kind in ("llama-cpp-python", "xllamacpp"):
            contest.rival(kind, gguf=str(worded))
        context = stack.enter_context(_llama_in_process(bundle, served, plan.threads, {"contexts": "1"}))
        mine = await onnx.embed("minilm", cases["equal"][:1])
        for case, sentences in cases.items():
            wanted = {name for of, *pair, _ in EMBED_ROWS if of == case for name in pair}
            contestants: dict[str, Any] = {
                name: timed(lambda opened=opened, sentences=sentences: opened.embed("minilm", sentences))
                for name, opened in hosts.items()
                if name in wanted
            }
            for kind, rival in contest.rivals.items():
                if kind in wanted:
                    contestants[kind] = lambda rival=rival, sentences=sentences: rival.ask("embed", texts=sentences)
            if case == "mix":
                batch = _batch(bundle, sentences)
                contestants["one 2-thread context"] = lambda batch=batch: _seconds(lambda: context(batch))
            await interleaved(contestants, 1)
            figures = await interleaved(contestants, rounds[case])
            for of, ours, kind, target in EMBED_ROWS:
                if of != case:
                    continue
                name = f"{ours} embed, {labels[case]}"
                if kind not in figures:
                    found.append(contest.absent("models", name, "texts/s", "higher", kind, target))
                    continue
                rates = {key: [len(sentences) / s for s in figures[key]] for key in (ours, kind)}
                what = contest.rivals[kind].what if kind in contest.rivals else kind
                found.append(
                    row(rates, ours, kind, group="models", name=name, unit="texts/s", better="higher",
                        rival_name=what, target=target, note=_threads(plan))
                )  # fmt: skip
        approximate = (await int8.embed("minilm", cases["equal"][:1]))[0]
        assert float(np.dot(mine[0], approximate)) > AGREEMENT, "int8 computed something else"
        for kind, rival in contest.rivals.items():
            rival.ask("embed", texts=cases["equal"][:1])
            cosine = float(np.dot(mine[0], rival.first) / np.linalg.norm(rival.first))
            assert cosine > AGREEMENT, f"{kind} computed something else: cosine {cosine:.4f}"
    return found


async def rerank(plan: Plan) -> list[Row]:
    """ms-marco MiniLM-L12: one query, 50 pairs of 128 tokens."""
    bundle = catalogue.obtain("ms-marco", plan.models_dir)
    tokenizer = bundle.root / "tokenizer.json"
    count = 12 if plan.quick else 50
    query = texts.equal(tokenizer, 1, 12)[0]
    # [CLS] query [SEP] document [SEP]: 128 tokens in all.
    documents = texts.equal(tokenizer, count, 128 - 12 + 1)
    name = f"rerank 1 x {count} pairs of 128 tokens"
    async with AsyncExitStack() as stack:
        onnx = await stack.enter_async_context(host(plan, "ms-marco", "rerank", "onnx-cpu"))
        int8 = await stack.enter_async_context(host(plan, "ms-marco", "rerank", "onnx-cpu-int8"))
        llama = await stack.enter_async_context(host(plan, "ms-marco", "rerank", "llama-cpu"))
        contest = Contest(plan, stack)
        contest.rival("cross-encoder", bundle=str(bundle.root))
        contestants: dict[str, Any] = {
            "onnx-cpu": timed(lambda: onnx.rerank("ms-marco", query, documents)),
            "onnx-cpu int8": timed(lambda: int8.rerank("ms-marco", query, documents)),
            "llama-cpu": timed(lambda: llama.rerank("ms-marco", query, documents)),
        }
        if "cross-encoder" in contest.rivals:
            rival = contest.rivals["cross-encoder"]
            contestants["cross-encoder"] = lambda: rival.ask("rerank", query=query, documents=documents)
        await interleaved(contestants, 1)
        figures = await interleaved(contestants, plan.rounds)
        rates = {key: [count / s for s in values] for key, values in figures.items()}
        found = []
        for ours, target in (("onnx-cpu", 1.9), ("onnx-cpu int8", 3.8), ("llama-cpu", 1.3)):
            if "cross-encoder" not in rates:
                found.append(contest.absent("models", f"{ours} {name}", "pairs/s", "higher", "cross-encoder", target))
                continue
            found.append(
                row(rates, ours, "cross-encoder", group="models", name=f"{ours} {name}", unit="pairs/s",
                    better="higher", rival_name=contest.rivals["cross-encoder"].what, target=target,
                    note=_threads(plan))
            )  # fmt: skip
        if "cross-encoder" in contest.rivals:
            score = (await onnx.rerank("ms-marco", query, documents[:1], raw=True))[0]
            contest.rivals["cross-encoder"].ask("rerank", query=query, documents=documents[:1])
            assert abs(score - contest.rivals["cross-encoder"].first[0]) < 0.05, "the rival scored something else"
    return found


async def generate(plan: Plan) -> list[Row]:
    """SmolLM2, greedy, one stream: tokens a second through the host, and by hand on the same library."""
    bundle = catalogue.obtain("smollm2", plan.models_dir)
    tokens = 24 if plan.quick else 64
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(host(plan, "smollm2", "generate", "llama-cpu"))
        contest = Contest(plan, stack)
        gguf = opened.lane_of("smollm2").require().load.artifact_path
        contest.rival("llama-generate", gguf=gguf)
        prompt = [504, 3575, 282, 4649, 314]
        made = {"ours": 0}

        async def ours() -> None:
            made["ours"] = (await opened.generate_ids("smollm2", prompt, tokens)).n_gen

        contestants: dict[str, Any] = {"ours": timed(ours)}
        name = f"generate {tokens} tokens, one stream"
        if "llama-generate" not in contest.rivals:
            return [contest.absent("models", name, "tokens/s", "higher", "llama-generate", 0.98)]
        rival = contest.rivals["llama-generate"]
        contestants["llama.cpp"] = lambda: rival.ask("generate", ids=prompt, max_tokens=tokens)
        await interleaved(contestants, 4)  # the worker keeps the last four answers, each in a context made once (11 ms)
        assert len(rival.first) == made["ours"], "the two generated different texts"
        figures = await interleaved(contestants, 2 * plan.rounds)
        rates = {key: [made["ours"] / s for s in values] for key, values in figures.items()}
        del bundle
        return [
            row(rates, "ours", "llama.cpp", group="models", name=name, unit="tokens/s", better="higher",
                rival_name=rival.what, target=0.98, note=_threads(plan))
        ]  # fmt: skip


async def overhead(plan: Plan) -> list[Row]:
    """32 x 128 tokens through the host and the same model called in this process."""
    bundle = catalogue.obtain("minilm", plan.models_dir)
    sentences = texts.equal(bundle.root / "tokenizer.json", 32, 128)
    found = []
    for engine in ("onnx-cpu", "llama-cpu"):
        async with host(plan, "minilm", "embed", engine) as opened:
            rows = _rows(bundle, sentences)
            batch = _batch(bundle, sentences)
            spec = opened.lane_of("minilm").require()
            enter = _llama_in_process if engine == "llama-cpu" else _owned_in_process
            with enter(bundle, Path(spec.load.artifact_path), plan.threads, dict(spec.load.runtime_config)) as direct:
                contestants = {
                    "host": timed(lambda opened=opened, rows=rows: opened.embed_ids("minilm", rows)),
                    "in process": lambda direct=direct, batch=batch: _seconds(lambda: direct(batch)),
                }
                await interleaved(contestants, 2)
                figures = await interleaved(contestants, plan.scaled(4 * plan.rounds))
        found.append(
            row(figures, "host", "in process", group="models", name=f"{engine}: 32 x 128 tokens through the host",
                unit="ms", better="lower", scale=1e3, rival_name="the same model called in process", target=0.99,
                note="ids in; 0.99 is an overhead of 1 %")
        )  # fmt: skip
    return found


async def shared(plan: Plan) -> list[Row]:
    """200 concurrent calls with a text each against one call with 200."""
    bundle = catalogue.obtain("minilm", plan.models_dir)
    sentences = texts.mix(bundle.root / "tokenizer.json", 200)
    count = len(sentences)
    found = []
    for engine in ("onnx-cpu", "llama-cpu"):
        async with host(plan, "minilm", "embed", engine) as opened:

            async def apart(opened: Host = opened) -> None:
                await asyncio.gather(*(opened.embed("minilm", [text]) for text in sentences))

            contestants = {
                "apart": timed(apart),
                "together": timed(lambda opened=opened: opened.embed("minilm", sentences)),
            }
            await interleaved(contestants, 1)
            figures = await interleaved(contestants, plan.scaled(2 * plan.rounds))
        found.append(
            row(figures, "apart", "together", group="models", name=f"{engine}: {count} concurrent calls of one text",
                unit="ms", better="lower", scale=1e3, rival_name=f"one call with {count} texts", target=1 / 1.15,
                note="calls that wait share an exchange")
        )  # fmt: skip
    return found


async def lanes(plan: Plan) -> list[Row]:
    """Two lanes with a thread each against one of them alone."""
    bundle = catalogue.obtain("minilm", plan.models_dir)
    sentences = texts.mix(bundle.root / "tokenizer.json", 48 if plan.quick else 128)
    found = []
    for engine in ("onnx-cpu", "llama-cpu"):
        path = matrix(plan, {"embed": ("embed", engine), "other": ("embed", engine)}, threads=1)
        async with Host.open(path, {"minilm": bundle.root}, HostConfig(models_dir=plan.models_dir)) as opened:
            await asyncio.gather(opened.load("minilm"), opened.load("minilm", lane="other"))

            async def both(opened: Host = opened) -> None:
                await asyncio.gather(opened.embed("minilm", sentences), opened.embed("minilm", sentences, lane="other"))

            contestants = {
                "two": timed(both),
                "one": timed(lambda opened=opened: opened.embed("minilm", sentences)),
            }
            await interleaved(contestants, 1)
            figures = await interleaved(contestants, plan.rounds)
        rates = {
            "two": [2 * len(sentences) / s for s in figures["two"]],
            "one": [len(sentences) / s for s in figures["one"]],
        }
        found.append(
            row(rates, "two", "one", group="models", name=f"{engine}: 2 lanes of one thread", unit="texts/s",
                better="higher", rival_name="one lane of one thread", target=1.8)
        )  # fmt: skip
    return found


# --- the same engines without a host --------------------------------------------------------------------------------


def _rows(bundle: Bundle, sentences: list[str]) -> list[Any]:
    ids = TextTokenizer(bundle).rows(sentences)
    bounds = np.concatenate(([0], np.cumsum(ids.lengths)))
    return [ids.ids[start:stop] for start, stop in pairwise(bounds)]


def _batch(bundle: Bundle, sentences: list[str]) -> Any:
    from engines.runtime.batch import TokenBatch

    ids = TextTokenizer(bundle).rows(sentences)
    return TokenBatch(np.ascontiguousarray(ids.ids), np.concatenate(([0], np.cumsum(ids.lengths))).astype(np.int32))


def _llama_in_process(bundle: Any, path: Path, threads: int, config: dict[str, str]) -> Any:
    from engines.llama.engine import LlamaEngine
    from engines.runtime.engine import WorkerOptions

    return _loaded(LlamaEngine(WorkerOptions(device="cpu")), bundle, path, {"threads": str(threads), **config})


def _owned_in_process(bundle: Any, path: Path, threads: int, config: dict[str, str]) -> Any:
    from engines.cuda.engine import CudaEngine
    from engines.runtime.engine import WorkerOptions

    engine = CudaEngine(WorkerOptions(device="cpu", manifest=bundle.root / "manifest.json"))
    return _loaded(engine, bundle, path, {"threads": str(threads), **config})


class _loaded:
    """A loaded model as a context manager that gives a function of a batch."""

    def __init__(self, engine: Any, bundle: Any, path: Path, config: dict[str, str]) -> None:
        from engines.protocol.messages import Load
        from engines.runtime.progress import silent

        artifact = next(a for a in bundle.manifest.artifacts if a.path == path.name)
        request = Load("load", str(path), artifact.digest, artifact.format, config)
        self.model = engine.load(request, progress=silent())

    def __enter__(self) -> Any:
        from engines.protocol.messages import Phase, Pooling
        from engines.runtime.progress import ProgressReporter

        def run(batch: Any) -> Any:
            reporter = ProgressReporter(lambda completed, phase: None, phase=Phase.SETUP)
            return self.model.embed(batch, pooling=Pooling.MEAN, normalize=True, packed_width=None, progress=reporter)

        return run

    def __exit__(self, *_: object) -> None:
        self.model.close()


def _seconds(call: Any) -> float:
    time.sleep(SETTLE_S)
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _threads(plan: Plan) -> str:
    return f"{plan.threads} threads each, text in"
