"""A model of golden files, built and served on this machine's engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from synapse_host.host import Host

# bf16 dots of llama.cpp; onnxruntime computes in float32.
ENGINES = {"safetensors-package": ("onnx-cpu", 2e-6), "gguf": ("llama-cpu", 1e-3)}
"""Format -> the engine that serves it here, and how far a number may be from transformers'."""


def rows(goldens: Mapping[str, Any], toy: str) -> list[list[int]]:
    """Return the rows of ids of *toy* in a golden file."""
    ids, cu = goldens[f"{toy}.ids"], goldens[f"{toy}.cu"]
    return [ids[first:last].tolist() for first, last in pairwise(cu)]


def serve(bundle: Path, work: Any) -> Any:
    """Return what the coroutine ``work(host)`` gives on a host of one bundle, called ``toy``."""

    async def main() -> Any:
        async with Host.open(None, {"toy": bundle}) as host:
            return await work(host)

    return asyncio.run(main())
