"""The rival of the throughput test: the same checkpoint in torch with SDPA, in an interpreter that has torch.

    python tests/hardware/torch_rate.py CHECKPOINT [cuda|cpu] < lengths.json

prints one JSON line: ``tokens_per_s`` and what measured it, or ``why`` it could not. fp16 on a GPU, fp32 on the CPU
(where it only proves that this script runs). Rows go sorted, 64 a batch; a call ends with its vectors on the host.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 64
REPEATS = 3


def measure(folder: Path, device: str, lengths: list[int]) -> dict[str, Any]:
    """Return the figures, or ``why`` there are none."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch
        import transformers
    except ImportError as exc:
        return {"why": f"{exc.name} is not installed"}
    if device == "cuda" and not torch.cuda.is_available():
        return {"why": f"torch {torch.__version__} sees no GPU"}
    dtype = torch.float16 if device == "cuda" else torch.float32
    made = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model = made.to(device).eval()
    ordered = sorted(lengths)

    def once() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            for start in range(0, len(ordered), BATCH):
                part = torch.tensor(ordered[start : start + BATCH])
                mask = (torch.arange(int(part.max())) < part[:, None]).long()
                states = model(input_ids=(7 * mask).to(device), attention_mask=mask.to(device)).last_hidden_state
                states[:, 0].float().cpu()
        return time.perf_counter() - started

    once()
    once()
    taken = statistics.median(once() for _ in range(REPEATS))
    return {
        "tokens_per_s": sum(lengths) / taken,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(dtype).removeprefix("torch."),
    }


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda", json.load(sys.stdin))))
