"""Reference fixtures by ``transformers`` (extra ``reference``), independent of every engine here.

``python -m engines.checkpoint.reference CHECKPOINT OUT.npz [--max-tokens N] [--gguf FILE]``

The probes of ``engines.checkpoint.probes`` are tokenised, run through the Hugging Face model of the checkpoint one at a
time in float64 (generation: float32, where argmax ties don't matter), and stored as ``engines.bundle.fixtures`` says.
``--gguf`` takes a generator's weights from a GGUF, dequantised by transformers; CHECKPOINT then only holds its
tokenizer.json. The fixtures name programme, versions and the digest of the weights, and whether those are rounded ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from engines.bundle import digest, fixtures
from engines.bundle.fixtures import Reference
from engines.checkpoint import facts, probes, program
from engines.checkpoint.dequantize import QUANTIZED_DIGEST, QUANTIZED_DTYPE
from engines.checkpoint.read import Checkpoint, CheckpointError
from engines.checkpoint.tokenizer import with_end

STEPS: Final = 8
DECIDED: Final = 0.25
"""A next token is asked for only where the reference's two best are at least this far apart, in logits. Closer
ones are a coin's throw at any rounding (quantised kernels move a logit by about 0.1) and tell nothing of an engine."""

Progress = Callable[[int, int], None]


def compute(
    folder: Path,
    out: Path,
    *,
    task: str | None = None,
    max_tokens: int | None = None,
    gguf: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> int:
    """Write the fixtures of a checkpoint and return how many probes they hold.

    Raises CheckpointError for a model whose inputs the host composes by a template (a Qwen3 reranker).
    """
    if gguf is not None:
        model = _model("AutoModelForCausalLM", gguf.parent, "float32", gguf_file=gguf.name)
        by = _by("float32", digest.PREFIX + digest.file_digest(gguf), _gguf_dtype(gguf))
        return _generate(folder, out, model, by, max_tokens or 2048, progress)
    checkpoint = Checkpoint.open(folder, task=task)  # type: ignore[arg-type]
    known = facts.of_checkpoint(checkpoint)
    limit = min(max_tokens or known.max_tokens, checkpoint.config["max_position_embeddings"])
    by = _by("float32" if checkpoint.task == "generate" else "float64", *weights_of(checkpoint))
    if checkpoint.task == "embed":
        return _embed(checkpoint, known, out, by, limit, progress)
    if checkpoint.task == "rerank":
        if checkpoint.known.causal:
            raise CheckpointError("no fixtures for rerankers that are decoders: their pairs go through a template")
        return _rerank(checkpoint, known, out, by, limit, progress)
    return _generate(folder, out, _model("AutoModelForCausalLM", folder, "float32"), by, limit, progress)


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{file} is missing: fixtures start from texts")
    ended = with_end(folder)
    tokenizer = Tokenizer.from_file(str(file)) if ended is None else Tokenizer.from_str(json.dumps(ended[1]))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _model(kind: str, folder: Path, dtype: str, **more: Any) -> Any:
    torch, transformers = import_module("torch"), import_module("transformers")
    return getattr(transformers, kind).from_pretrained(folder, dtype=getattr(torch, dtype), **more).eval()


def _by(dtype: str, weights: str, stored: str) -> Reference:
    torch, transformers = import_module("torch"), import_module("transformers")
    version = f"{transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    return Reference("transformers", version, dtype, weights, stored)


def weights_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the digest of a checkpoint's published weights and how they are stored.

    Weights that were dequantised name the file they come from. Several files: the digest of their digests, by name.
    """
    files = checkpoint.tensors.files
    source = files[0].header.metadata
    if {QUANTIZED_DTYPE, QUANTIZED_DIGEST} <= source.keys():
        return source[QUANTIZED_DIGEST], source[QUANTIZED_DTYPE]
    found = [digest.file_digest(file.path) for file in files]
    whole = found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()
    return digest.PREFIX + whole, checkpoint.stored_dtype


def _gguf_dtype(file: Path) -> str:
    """Return the type that most of a GGUF's matrices have, such as q4_1."""
    tensors = import_module("gguf").GGUFReader(file).tensors
    return str(Counter(one.tensor_type.name.lower() for one in tensors if len(one.shape) > 1).most_common(1)[0][0])


def _cut(bare: list[int], frame: tuple[list[int], list[int]], limit: int) -> list[int]:
    prefix, suffix = frame
    return [*prefix, *bare[: limit - len(prefix) - len(suffix)], *suffix]


def _frame(tokenizer: Any, special: dict[str, int], family: str) -> tuple[list[int], list[int]]:
    """Return the special ids around a row: as the tokenizer's own post-processor puts them, else as the host does."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    if whole == bare:
        if family == "qwen3" and "eos" in special:
            return [], [special["eos"]]
        return ([special["cls"]], [special["sep"]]) if "cls" in special else ([], [])
    at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]


def _embed(checkpoint: Checkpoint, known: facts.Facts, out: Path, by: Reference, limit: int, progress: Progress) -> int:
    torch = import_module("torch")
    tokenizer = _tokenizer(checkpoint.folder)
    frame = _frame(tokenizer, known.special_ids, checkpoint.family)
    texts = probes.texts()
    # As a host serves it: without a word of the caller, the model's default prompt is before every text.
    before = known.prompts.get(known.default_prompt or "", "")
    rows = [_cut(tokenizer.encode(before + text, add_special_tokens=False).ids, frame, limit) for text in texts]
    kept = [i for i, row in enumerate(rows) if len(row) > len(frame[0]) + len(frame[1])]
    model = _model("AutoModel", checkpoint.folder, "float64")
    layers = [
        (*(torch.from_numpy(part.copy()).double() for part in one.arrays()), getattr(torch.nn, one.layer.activation)())
        for one in known.dense
    ]
    vectors = []
    asked = [rows[i] for i in kept]
    asked += probes.edges([id for row in asked for id in row[len(frame[0]) : len(row) - len(frame[1])]], limit)
    texts_of = [*(texts[i] for i in kept), *[None] * (len(asked) - len(kept))]
    with torch.no_grad():
        for done, row in enumerate(asked, 1):
            states = model(torch.tensor([row])).last_hidden_state[0]
            vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[str(known.pooling)]
            for weight, bias, activation in layers:
                vector = activation(torch.nn.functional.linear(vector, weight, bias))
            vectors.append((vector / vector.norm() if known.normalize else vector).numpy())
            progress(done, len(asked))
    ids, cu = fixtures.flatten(asked)
    quantised, scale = fixtures.quantize(np.array(vectors))
    arrays = {"input_ids": ids, "cu_seqlens": cu, "vectors_q": quantised, "vectors_scale": scale}
    fixtures.write(out, task="embed", texts=texts_of, computed_by=by, arrays=arrays)
    return len(asked)


def _rerank(
    checkpoint: Checkpoint, known: facts.Facts, out: Path, by: Reference, limit: int, progress: Progress
) -> int:
    torch = import_module("torch")
    tokenizer = _tokenizer(checkpoint.folder)
    cls, sep = known.special_ids["cls"], known.special_ids["sep"]
    pairs = probes.pairs()
    bare = {text: tokenizer.encode(text, add_special_tokens=False).ids for pair in pairs for text in pair}
    between = [sep] * known.pair_separators
    most = limit - 2 - len(between)
    room = {query: most - len(bare[query]) for query, _ in pairs}
    pairs = [(query, document) for query, document in pairs if bare[query] and bare[document] and room[query] > 0]
    queries = list(dict.fromkeys(query for query, _ in pairs))
    candidates = [bare[document][: room[query]] for query, document in pairs]
    # Candidates at the edges belong to a query of one id, which comes last.
    short = [candidates[0][0]]
    extra = probes.edges([id for row in candidates for id in row], most - len(short))
    asked = [*((bare[query], row) for (query, _), row in zip(pairs, candidates, strict=True))]
    asked += [(short, row) for row in extra]
    query_of = [*(queries.index(query) for query, _ in pairs), *[len(queries)] * len(extra)]
    model = _model("AutoModelForSequenceClassification", checkpoint.folder, "float64")
    logits = []
    with torch.no_grad():
        for done, (query_row, candidate) in enumerate(asked, 1):
            head = [cls, *query_row, *between]
            row = torch.tensor([[*head, *candidate, sep]])
            options = {}
            if known.token_types:
                options["token_type_ids"] = torch.tensor([[0] * len(head) + [1] * (len(candidate) + 1)])
            logits.append(model(row, **options).logits.item())
            progress(done, len(asked))
    query_ids, query_cu = fixtures.flatten([*(bare[query] for query in queries), short])
    candidate_ids, candidate_cu = fixtures.flatten([row for _, row in asked])
    arrays = {
        "query_ids": query_ids,
        "query_cu": query_cu,
        "candidate_ids": candidate_ids,
        "candidate_cu": candidate_cu,
        "query_of": np.array(query_of, np.int32),
        "logits": np.array(logits, np.float32),
    }
    texts = [*(list(pair) for pair in pairs), *[None] * len(extra)]
    fixtures.write(out, task="rerank", texts=texts, computed_by=by, arrays=arrays)
    return len(asked)


def _generate(folder: Path, out: Path, model: Any, by: Reference, limit: int, progress: Progress) -> int:
    torch = import_module("torch")
    tokenizer = _tokenizer(folder)
    prompts = probes.prompts()
    rows = [tokenizer.encode(prompt, add_special_tokens=False).ids[: limit - STEPS] for prompt in prompts]
    every = [id for row in rows for id in row]
    texts = [*prompts, *[None] * 3]
    rows += [every[:1], every[:2], [every[len(every) // 2]] * 64]
    kept, greedy, clear = [], [], []
    with torch.no_grad():
        for i, row in enumerate(rows):
            progress(i + 1, len(rows))
            if not row:
                continue
            made: list[int] = []
            apart: list[bool] = []
            state = model(torch.tensor([row]), use_cache=True)
            while len(made) < STEPS:
                best = state.logits[0, -1].topk(2)
                apart.append(float(best.values[0] - best.values[1]) >= DECIDED)
                if not apart[0]:
                    break
                made.append(int(best.indices[0]))
                if len(made) < STEPS:
                    state = model(torch.tensor([made[-1:]]), past_key_values=state.past_key_values, use_cache=True)
            if apart[0]:
                kept.append(i)
                greedy.append(made)
                clear.append(apart)
    ids, cu = fixtures.flatten([rows[i] for i in kept])
    arrays = {"input_ids": ids, "cu_seqlens": cu, "greedy": np.array(greedy, np.int32)}
    arrays["clear"] = np.array(clear, np.uint8)
    fixtures.write(out, task="generate", texts=[texts[i] for i in kept], computed_by=by, arrays=arrays)
    return len(kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program; progress as JSON lines on stdout, a failure as one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m engines.checkpoint.reference", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=("embed", "rerank", "generate"), default=None)
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--gguf", type=Path, default=None)
    args = parser.parse_args(argv)

    def make() -> dict[str, Any]:
        options = {"task": args.task, "max_tokens": args.max_tokens, "gguf": args.gguf}
        count = compute(args.checkpoint, args.out, **options, progress=program.report("reference"))
        return {"path": str(args.out), "probes": count}

    return program.run("reference", make, missing="pip install 'synapse-workers[reference]'")


if __name__ == "__main__":
    raise SystemExit(main())
