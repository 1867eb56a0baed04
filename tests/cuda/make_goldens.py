"""Compute goldens.npz with transformers in fp32, one row at a time, no padding: run with .venv-reference/bin/python.

    .venv-reference/bin/python -m tests.cuda.make_goldens

Per case: embeddings (rows, hidden) after pooling and L2, or logits (rows,). Weights and rows come
from seeds (cases.py).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.cuda.cases import CASES, Case


def reference(case: Case, folder: Path) -> np.ndarray:
    """Return one case's outputs, float32."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    outputs = []
    with torch.no_grad():
        if case.task == "rerank" and family == "qwen3":
            model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
            ids = json.loads((folder / "1_LogitScore" / "config.json").read_text())
            for row in case.rows():
                logits = model(input_ids=torch.tensor([row])).logits[0, -1]
                outputs.append((logits[ids["true_token_id"]] - logits[ids["false_token_id"]]).item())
        elif case.task == "rerank":
            model = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
            for row in case.rows():
                types = {}
                if family == "bert":
                    first = row.index(3) + 1 if 3 in row else len(row)
                    types = {"token_type_ids": torch.tensor([[0] * first + [1] * (len(row) - first)])}
                outputs.append(model(input_ids=torch.tensor([row]), **types).logits[0, 0].item())
        else:
            model = AutoModel.from_pretrained(folder, **options).eval()
            pooling = case.options.get(
                "pooling", {"modernbert": "cls", "qwen3": "last", "qwen2": "last"}.get(family, "mean")
            )
            for row in case.rows():
                states = model(input_ids=torch.tensor([row])).last_hidden_state[0].double()
                vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
                if case.options.get("normalize", True):
                    vector = vector / vector.norm()
                outputs.append(vector.numpy())
    return np.asarray(outputs, np.float32)


def main() -> None:
    """Write the file."""
    arrays = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            arrays[case.name] = reference(case, case.checkpoint(Path(folder) / "model"))
    np.savez_compressed(Path(__file__).with_name("goldens.npz"), **arrays)


if __name__ == "__main__":
    main()
