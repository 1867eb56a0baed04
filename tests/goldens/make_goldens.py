"""Regenerate the golden files: what transformers computes, for engines to be compared with.

    .venv-reference/bin/python tests/goldens/make_goldens.py

Needs torch and transformers. The forward pass runs in float64, results are stored as float32.

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
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

HERE = Path(__file__).resolve().parent
SHORT = [1, 2, 7, 33, 64]
TOY_LENGTHS = dict.fromkeys(("bert", "roberta", "distilbert"), SHORT) | {
    "modernbert": [1, 2, 9, 17, 64, 150, 256],
    "qwen3": [1, 2, 13, 80, 200],
    "mpnet": [1, 2, 9, 33, 64, 130, 192],
    "gemma": [1, 2, 8, 9, 17, 40, 64, 200],
    "nomic": [1, 2, 9, 33, 64, 200],
}


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows])
    ids = np.array([n for row in rows for n in row], np.int32)
    return ids, np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


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
    parser.add_argument("--only", choices=("toys", "families"))
    parser.add_argument(
        "--python", default=str(HERE.parents[1] / ".venv/bin/python"), help="has this project installed"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    for name, module in (("toys", "toy_models"), ("families", "toy_families")):
        if args.only in (None, name):
            np.savez_compressed(HERE / f"{name}.npz", **toys(args.python, module))
            print(name, (HERE / f"{name}.npz").stat().st_size)


if __name__ == "__main__":
    main()
