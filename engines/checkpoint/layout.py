"""How a checkpoint's tensors are named, which of them may be left out, and which a package stores as int8.

Canonical names are Hugging Face's without the leading ``bert.`` or ``model.`` (a family's ``prefix``); matrices are
(out, in). Which ones a family has is said in :mod:`engines.checkpoint.families`.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

from engines.bundle.manifest import BundleError, Family, Task
from engines.checkpoint.families import FAMILIES, known

Shapes: TypeAlias = dict[str, tuple[int, ...]]

_PREFIX: Final = re.compile(rf"^({'|'.join(sorted({kind.prefix for kind in FAMILIES.values()}))})\.")
# Stored names that belong to a training head or a buffer and never enter a forward pass.
_BUFFERS: Final = re.compile(r"(^|\.)(position_ids|token_type_ids|rotary_emb\.inv_freq)$|^cls\.|^decoder\.")
# Heads that other tasks don't use.
_OTHER_HEADS: Final = re.compile(r"^(pooler|head|classifier)\.|^lm_head\.")


def ignorable(name: str, task: Task) -> bool:
    """Tell whether a tensor beyond ``required`` may be left out without changing the task's numbers."""
    if _BUFFERS.search(name):
        return True
    # A tied output matrix is stored by some writers; a rerank head's unexpected part would change the score.
    return name == "lm_head.weight" or (task != "rerank" and bool(_OTHER_HEADS.search(name)))


def canonical(stored: str) -> str:
    """Return a stored tensor's canonical name; LayerNorm's older ``gamma`` and ``beta`` are weight and bias."""
    name = _PREFIX.sub("", stored)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def required(family: Family, task: Task, config: dict[str, Any]) -> Shapes:
    """Return every tensor that a complete config's family needs for the task, with its shape, in a fixed order."""
    return dict(known(family, config).tensors(task))


INT8: Final = "int8"
"""The dtype, as manifests and matrices spell it, of packages whose layers' matrices are int8."""
SCALE: Final = ".scale"
APART: Final = ".apart"
CHANNELS: Final = "apart"
"""int8 packages: the input channels that the matrices after a norm multiply apart, int32 (K,)."""
CHANNEL_COUNT: Final = 8
_AFTER_NORM: Final = re.compile(r"\.(attention\.self\.(query|key|value)|intermediate\.dense)\.weight$")


def is_dense(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether an int8 package stores a tensor as int8: a layer's matrix. Tables, norms and heads stay float."""
    return layer_of(name) is not None and len(shape) == 2 and name.endswith(".weight")


def is_after_norm(name: str) -> bool:
    """Tell whether a BERT matrix multiplies the output of a norm."""
    return _AFTER_NORM.search(name) is not None


def stored_int8(name: str, shape: tuple[int, ...]) -> str:
    """Return how an int8 package stores a tensor, as safetensors spells it."""
    return "I32" if name == CHANNELS else "I8" if is_dense(name, shape) else "F32"


def required_int8(family: Family, task: Task, config: dict[str, Any]) -> Shapes:
    """Return what an int8 package holds: :func:`required`, a scale per output row of each matrix, columns apart.

    Raises BundleError for a family that isn't built in int8.
    """
    if family != "bert":
        raise BundleError(f"int8 packages are made of bert models only, this is a {family} model; use f32")
    shapes = required(family, task, config)
    count = min(CHANNEL_COUNT, config["hidden_size"])
    extra: Shapes = {CHANNELS: (count,)}
    for name, shape in shapes.items():
        if is_dense(name, shape):
            extra[name + SCALE] = shape[:1]
            if is_after_norm(name):
                extra[name + APART] = (shape[0], count)
    return shapes | extra


def layer_of(name: str) -> int | None:
    """Return the layer a canonical name belongs to, or None."""
    match = re.match(r"(?:encoder\.layer|layers)\.(\d+)\.", name)
    return int(match[1]) if match else None
