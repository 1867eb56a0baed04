"""A pytest plugin for the hardware run on the stubs: the served shapes' names, with a toy's size behind each.

Kernels compute nothing there, but packages are written and hashed, and the CPU reference is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.cuda.cases import SERVED
from tests.rehearsal.conftest import case

SMALL: dict[str, dict[str, Any]] = {
    "minilm": {**case("bert-mean").options, "max_positions": 512},
    "modernbert": {**case("modernbert-cls").options, "max_positions": 2048},
    "qwen3": {**case("qwen3-last").options, "max_positions": 2048},
}


def pytest_configure() -> None:
    for name, options in SMALL.items():
        SERVED[name] = replace(SERVED[name], options=options, vocab=128)
