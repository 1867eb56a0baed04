"""Recompute goldens.npz: what `transformers` says in fp32 about the toy models of conftest.py and the real ones.

    .venv-reference/bin/python -m tests.ane.make_goldens [MODELS_DIR]

Rows come from seeds (:func:`rows`), weights from toy_models' seeds; only vectors and logits are stored. MODELS_DIR
holds the default bundles (``minilm``, ``ms-marco``); without it the parts of the real models are kept as they stand.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).with_name("goldens.npz")
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 63, 64)
REAL_LENGTHS = (1, 2, 3, 8, 20, 64, 127, 128)
SEP = {"cross": 3, "modernbert-rerank": 3, "modernbert-rerank-cls": 3, "ms-marco": 102}
REAL = ("minilm", "ms-marco")


def rows(name: str) -> list[np.ndarray]:
    """Return the rows of one model: random ids, one row of one repeated id, a separator in the middle for pairs."""
    vocab = 30522 if name in REAL else 128
    rng = np.random.default_rng(sum(name.encode()))
    found = [rng.integers(5, vocab, n) for n in (REAL_LENGTHS if name in REAL else LENGTHS)]
    found.append(np.full(24, 7))
    for row in found if name in SEP else []:
        if len(row) > 4:
            row[len(row) // 2] = SEP[name]
    return found


def pooled(states: np.ndarray, how: str) -> np.ndarray:
    """Pool and normalise fp32 states (tokens, dims)."""
    vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[how]
    return vector / np.linalg.norm(vector)


def unpack(bundle: Path, folder: Path, *, classifier: bool) -> None:
    """Write a bundle's fp32 package as a checkpoint folder that `transformers` loads."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((bundle / "manifest.json").read_bytes())["config"]
    needed = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    numbers = {key: config[key] for key in (*needed, "type_vocab_size", "vocab_size", "hidden_act")}
    numbers |= {"model_type": "bert", "layer_norm_eps": float(config["layer_norm_eps"])}
    if classifier:
        numbers |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(numbers))
    tensors = load_file(bundle / "model-f32.safetensors")
    prefix = "bert." if classifier else ""
    renamed = {name if name.startswith("classifier") else prefix + name: value for name, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification

    from tests.ane.recipes import RECIPES

    out: dict[str, np.ndarray] = dict(np.load(GOLDENS)) if GOLDENS.exists() else {}
    for name in (*RECIPES, *(REAL if len(sys.argv) > 1 else ())):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            if name in REAL:
                unpack(Path(sys.argv[1]) / name, folder, classifier=name in SEP)
            else:
                write, options = RECIPES[name]
                write(folder, **options)
            kind = AutoModelForSequenceClassification if name in SEP else AutoModel
            model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            how = {"modernbert": "cls", "qwen3": "last"}.get(name, "mean")
            answers = []
            for row in rows(name):
                extra = {}
                if name in ("cross", "ms-marco"):
                    types = np.zeros(len(row), int)
                    found = np.flatnonzero(row == SEP[name])
                    if len(found):
                        types[found[0] + 1 :] = 1
                    extra["token_type_ids"] = torch.tensor(types[None])
                with torch.no_grad():
                    result = model(
                        input_ids=torch.tensor(row[None]), attention_mask=torch.ones(1, len(row)).long(), **extra
                    )
                if name in SEP:
                    answers.append(result.logits[0].numpy())
                else:
                    answers.append(pooled(result.last_hidden_state[0].numpy(), how))
            out[name] = np.stack(answers).astype(np.float32)
    np.savez(GOLDENS, **{name: out[name] for name in sorted(out)})


if __name__ == "__main__":
    main()
