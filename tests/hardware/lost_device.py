"""A CUDA worker whose requests read their token ids at an address that nobody owns; started with ``python -m``.

On a GPU that is what a faulty kernel does: the device reports an illegal address and its context is lost. LOAD is left
alone, so sessions with recorded launches exist by then. The rows of a request must not fit a recorded shape.
"""

from __future__ import annotations

import sys
from typing import Any

from engines.cuda import binding, model
from engines.cuda.__main__ import main

NOWHERE = 4096


def lose() -> None:
    """From the first request on, bind the token ids to :data:`NOWHERE`."""
    embed, bind = model.OwnedModel.embed, binding.Binding.input

    def astray(self: binding.Binding, name: str, shape: tuple[int, ...], address: int, *, host: bool = False) -> None:
        bind(self, name, shape, NOWHERE if name == "input_ids" else address, host=host)

    def embed_astray(self: model.OwnedModel, *arguments: Any, **keywords: Any) -> Any:
        binding.Binding.input = astray  # type: ignore[method-assign]
        return embed(self, *arguments, **keywords)

    model.OwnedModel.embed = embed_astray  # type: ignore[method-assign]


if __name__ == "__main__":
    lose()
    sys.exit(main())
