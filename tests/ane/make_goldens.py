"""Recompute goldens.npz: what `transformers` says in fp32 about the toy models of recipes.py.

    .venv-reference/bin/python -m tests.ane.make_goldens

Rows come from seeds (:func:`rows`), weights from toy_models' seeds; only vectors and logits are stored.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).with_name("goldens.npz")
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 63, 64)
RERANKERS = ("cross", "modernbert-rerank", "modernbert-rerank-cls")
HOW = {"modernbert": "cls", "qwen3": "last", "qwen2": "last"}
"""The pooling of each embedder, ``mean`` for the others."""
SEP = 3


def rows(name: str) -> list[np.ndarray]:
    """Return the rows of one model: random ids, one row of one repeated id, a separator in the middle for pairs."""
    rng = np.random.default_rng(sum(name.encode()))
    found = [*(rng.integers(5, 128, n) for n in LENGTHS), np.full(24, 7)]
    for row in found if name in RERANKERS else []:
        if len(row) > 4:
            row[len(row) // 2] = SEP
    return found


def pooled(states: np.ndarray, how: str) -> np.ndarray:
    """Pool and normalise fp32 states (tokens, dims)."""
    vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[how]
    return vector / np.linalg.norm(vector)


def main() -> None:
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification

    from tests.ane.recipes import RECIPES

    out: dict[str, np.ndarray] = {}
    for name, (write, options) in RECIPES.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = write(Path(scratch), **options)
            kind = AutoModelForSequenceClassification if name in RERANKERS else AutoModel
            model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            answers = []
            for row in rows(name):
                extra = {}
                if name == "cross":
                    types = np.zeros(len(row), int)
                    found = np.flatnonzero(row == SEP)
                    if len(found):
                        types[found[0] + 1 :] = 1
                    extra["token_type_ids"] = torch.tensor(types[None])
                with torch.no_grad():
                    result = model(
                        input_ids=torch.tensor(row[None]), attention_mask=torch.ones(1, len(row)).long(), **extra
                    )
                if name in RERANKERS:
                    answers.append(result.logits[0].numpy())
                else:
                    answers.append(pooled(result.last_hidden_state[0].numpy(), HOW.get(name, "mean")))
            out[name] = np.stack(answers).astype(np.float32)
    np.savez(GOLDENS, **{name: out[name] for name in sorted(out)})


if __name__ == "__main__":
    main()
