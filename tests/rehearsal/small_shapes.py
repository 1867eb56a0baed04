"""A pytest plugin for the hardware run on the stubs: the served shapes' names, with a toy's size behind each.

Kernels compute nothing there, but packages are written and hashed, and the CPU reference is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.rehearsal.conftest import case

SMALL: dict[str, dict[str, Any]] = {
    "minilm": {**case("bert-mean").options, "max_positions": 512},
    "modernbert": {**case("modernbert-cls").options, "max_positions": 2048},
    "qwen3": {**case("qwen3-last").options, "max_positions": 2048},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for shapes in {id(item.module.SHAPES): item.module.SHAPES for item in items}.values():  # type: ignore[attr-defined]
        for name, options in SMALL.items():
            shapes[name] = replace(shapes[name], options=options, vocab=128)
