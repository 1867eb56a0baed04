"""Regenerate the golden files: what transformers computes, for engines to be compared with.

    .venv-reference/bin/python tests/goldens/make_goldens.py [--models-dir DIR]

Needs torch and transformers, and the default bundles made (`synapse models install minilm ms-marco`). Weights are the
bundles' own fp32 ones, read by the `safetensors` package; the forward pass runs in float64, results are stored as
float32.

minilm.npz
    input_ids int32 (tokens,), cu_seqlens int32 (rows + 1,): rows laid end to end, special ids included, 1 to 512
    tokens; vectors float32 (rows, 384): masked mean, L2-normalised; norms float32 (rows,): length of the mean before
    that.
ms-marco.npz
    query_ids int32, query_cu int32 (queries + 1,); candidate_ids int32, candidate_cu int32 (pairs + 1,): bare ids,
    without special tokens; query_of int32 (pairs,): which query a candidate belongs to; logits float32 (pairs,): raw,
    for [CLS] query [SEP] candidate [SEP] with token type 1 from the candidate on; the longest pair has 512 tokens.
toys.npz
    per toy of `tests/support/toy_models.py` as its TOYS table has it: `<toy>.ids`, `<toy>.cu`,
    `<toy>.out`: embedders: L2-normalised vectors; rerankers: logits (bert: token type 1 from the middle of the row on,
    `<toy>.types`); generators: last-token logits, and `<toy>.greedy` int32 (rows, 8), the greedy continuation.
families.npz
    the same of the toys of `tests/support/toy_families.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.goldens.texts import PARAGRAPH, QUERIES, TEXTS  # noqa: E402

SHORT = [1, 2, 7, 33, 64]
TOY_LENGTHS = dict.fromkeys(("bert", "roberta", "distilbert"), SHORT) | {
    "modernbert": [1, 2, 9, 17, 64, 150, 256],
    "qwen3": [1, 2, 13, 80, 200],
    "mpnet": [1, 2, 9, 33, 64, 130, 192],
    "gemma": [1, 2, 8, 9, 17, 40, 64, 200],
    "nomic": [1, 2, 9, 33, 64, 200],
}


def bundle(models: Path, name: str) -> tuple[dict, dict[str, torch.Tensor], Tokenizer]:
    """Return a bundle's manifest, its fp32 weights by canonical name, and its tokenizer without padding or cutting."""
    manifest = json.loads((models / name / "manifest.json").read_text("utf-8"))
    package = next(a for a in manifest["artifacts"] if a["format"] == "safetensors-package" and a["dtype"] == "f32")
    tokenizer = Tokenizer.from_file(str(models / name / manifest["tokenizer"]["path"]))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return manifest, load_file(models / name / package["path"]), tokenizer


def bert_config(manifest: dict) -> BertConfig:
    config = dict(manifest["config"])
    config["layer_norm_eps"] = float(config["layer_norm_eps"])
    config.pop("dtype", None)
    for key in ("attention_probs_dropout_prob", "hidden_dropout_prob", "initializer_range"):
        config.pop(key, None)
    return BertConfig(**config)


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows])
    ids = np.array([n for row in rows for n in row], np.int32)
    return ids, np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def minilm(models: Path) -> dict[str, np.ndarray]:
    manifest, weights, tokenizer = bundle(models, "minilm")
    model = BertModel(bert_config(manifest), add_pooling_layer=False)
    model.load_state_dict(weights, strict=True)
    model = model.double().eval()
    rows = [tokenizer.encode(text).ids for text in TEXTS]
    long = tokenizer.encode(PARAGRAPH * 12, add_special_tokens=False).ids
    rows += [
        [101, *long[: n - 2], 102]
        for n in (3, 5, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 200, 255, 256, 511, 512)
    ]
    rows += [[101], [101, 102], [7592], [101, *[2054] * 254, 102]]
    vectors, norms = [], []
    with torch.no_grad():
        for row in rows:
            mean = model(torch.tensor([row])).last_hidden_state[0].mean(0)
            norms.append(mean.norm().item())
            vectors.append((mean / mean.norm()).numpy())
    ids, cu = flat(rows)
    return {
        "input_ids": ids,
        "cu_seqlens": cu,
        "vectors": np.array(vectors, np.float32),
        "norms": np.array(norms, np.float32),
    }


def ms_marco(models: Path) -> dict[str, np.ndarray]:
    manifest, weights, tokenizer = bundle(models, "ms-marco")
    model = BertForSequenceClassification(bert_config(manifest))
    named = {(k if k.startswith("classifier") else "bert." + k): v for k, v in weights.items()}
    model.load_state_dict(named, strict=True)
    model = model.double().eval()

    def bare(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    queries, candidates, query_of, logits = [], [], [], []
    long = bare(PARAGRAPH * 12)
    for number, (query, documents) in enumerate(QUERIES.items()):
        queries.append(bare(query))
        rows = [bare(document) for document in documents]
        room = 512 - 3 - len(queries[-1])
        rows += [long[:room], rows[0] + long[: 120 - len(rows[0])], long[:40] + rows[0], [1996] * 60]
        candidates += rows
        query_of += [number] * len(rows)
    with torch.no_grad():
        for number, row in zip(query_of, candidates, strict=True):
            head = [101, *queries[number], 102]
            ids = [*head, *row, 102]
            types = [0] * len(head) + [1] * (len(row) + 1)
            logits.append(model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits.item())
    query_ids, query_cu = flat(queries)
    candidate_ids, candidate_cu = flat(candidates)
    return {
        "query_ids": query_ids,
        "query_cu": query_cu,
        "candidate_ids": candidate_ids,
        "candidate_cu": candidate_cu,
        "query_of": np.array(query_of, np.int32),
        "logits": np.array(logits, np.float32),
    }


def toys(python: str, module: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([python, "-m", f"tests.support.{module}", scratch], check=True, cwd=HERE.parents[1])
        for folder in sorted(Path(scratch).iterdir()):
            found |= {f"{folder.name}.{key}": value for key, value in toy(folder.name, folder).items()}
    return found


def toy(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Compute one toy with transformers; a tensor missing from or unknown to its class is an error."""
    family, _, task = name.partition("-")
    task = task.split("-")[0]
    kind = AutoModel
    if task == "generate" or name == "qwen3-rerank":
        kind = AutoModelForCausalLM
    elif task == "rerank":
        kind = AutoModelForSequenceClassification
    model, info = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    wrong = {k: [n for n in v if "pooler" not in n] if k == "missing_keys" else v for k, v in info.items()}
    if any(wrong.values()):
        raise SystemExit(f"{name}: transformers doesn't load it cleanly: {wrong}")
    model.eval()
    vocab = model.config.vocab_size
    lengths = TOY_LENGTHS.get(family, TOY_LENGTHS["qwen3"])
    generator = np.random.default_rng(7)
    rows = [generator.integers(5, vocab, n).tolist() for n in lengths]
    if name in ("roberta-rerank", "mpnet-rerank"):  # pairs, as its tokenizer composes them
        rows = [[0, 5, 6, 7, 2, 2, *row[:56], 2] for row in rows]
    outputs, greedy, all_types = [], [], []
    answers = (0, 0)
    if name == "qwen3-rerank":
        conf = json.loads((folder / "1_LogitScore" / "config.json").read_text("utf-8"))
        answers = (conf["true_token_id"], conf["false_token_id"])
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            if name == "bert-rerank":
                types = [int(i >= len(row) // 2) for i in range(len(row))]
                all_types += types
                outputs.append(model(ids, token_type_ids=torch.tensor([types])).logits[0].numpy())
            elif kind is AutoModelForSequenceClassification:
                outputs.append(model(ids).logits[0].numpy())
            elif kind is AutoModelForCausalLM:
                logits = model(ids).logits[0, -1]
                if name == "qwen3-rerank":
                    outputs.append(np.array([(logits[answers[0]] - logits[answers[1]]).item()]))
                else:
                    outputs.append(logits.numpy())
                    made = list(row)
                    for _ in range(8):
                        made.append(int(model(torch.tensor([made])).logits[0, -1].argmax()))
                    greedy.append(made[-8:])
            else:
                states = model(ids).last_hidden_state[0]
                pooled = {"modernbert": states[0], "qwen2": states[-1], "qwen3": states[-1]}.get(family, states.mean(0))
                for module in sorted(folder.glob("*_Dense")):  # all of them the identity without a bias
                    pooled = load_file(module / "model.safetensors")["linear.weight"].double() @ pooled
                outputs.append((pooled / pooled.norm()).numpy())
    ids, cu = flat(rows)
    found = {"ids": ids, "cu": cu, "out": np.array(outputs, np.float32)}
    if greedy:
        found["greedy"] = np.array(greedy, np.int32)
    if all_types:
        found["types"] = np.array(all_types, np.int32)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models-dir", type=Path, default=Path.home() / ".cache" / "synapse" / "models")
    parser.add_argument("--only", choices=("minilm", "ms-marco", "toys", "families"))
    parser.add_argument(
        "--python", default=str(HERE.parents[1] / ".venv/bin/python"), help="has this project installed"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    makers = {
        "minilm": lambda: minilm(args.models_dir),
        "ms-marco": lambda: ms_marco(args.models_dir),
        "toys": lambda: toys(args.python, "toy_models"),
        "families": lambda: toys(args.python, "toy_families"),
    }
    for name, make in makers.items():
        if args.only in (None, name):
            np.savez_compressed(HERE / f"{name}.npz", **make())
            print(name, (HERE / f"{name}.npz").stat().st_size)


if __name__ == "__main__":
    main()
