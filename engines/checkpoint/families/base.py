"""What all families share: the keys of every config.json, and what a family may say differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from msgspec import Meta, Struct

from engines.bundle.manifest import BundleError, Task
from engines.protocol.messages import Pooling

Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Number: TypeAlias = Annotated[float, Meta(gt=0, lt=2.0**63)]
FORMATS: Final = {"gguf": "llama.cpp", "safetensors-package": "onnxruntime on CPU and CUDA", "coreml": "Neural Engine"}
"""What a model is built as, and which engine takes it."""
Tensor: TypeAlias = tuple[str, tuple[int, ...]]
"""A canonical name and a shape; matrices are (out, in)."""


class CheckpointError(BundleError):
    """A checkpoint can't be used. The message names the file and the key or tensor."""


def need(ok: bool, key: str, why: str) -> None:
    """Refuse a config.json by the key that can't be served."""
    if not ok:
        raise CheckpointError(f"{key}: {why}")


class Spelling:
    """How a checkpoint spells what a family's class says: as the class itself, unless a method says otherwise."""

    prefix: ClassVar[str] = ""
    """What stored names begin with, beside ``model.``."""
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Patterns of stored names without their prefix, and what the family has in their place; applied in order."""
    made: ClassVar[tuple[str, ...]] = ()
    """Tensors that the family needs and this spelling hasn't: zeros."""

    def check(self, task: Task, kind: str) -> None:
        """Refuse a task that can't be served. *kind*: config.json's model_type."""

    def config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json in the words of the family's class. Raises CheckpointError naming the key."""
        return dict(raw)

    def skipped(self, raw: Mapping[str, Any]) -> dict[str, int]:
        """Return how many rows of a stored tensor stand before the first one needed, by canonical name."""
        return {}

    def canonical(self, stored: str) -> str:
        """Return the canonical name of a stored tensor."""
        name = re.sub(rf"^(model\.)?({self.prefix}\.)?", "", stored) if self.prefix else stored
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


class Config(Struct, kw_only=True):
    """The keys of config.json that a forward pass reads in every family, and what they may be."""

    pooling: ClassVar[Pooling]
    """How its embedders pool where nothing says so."""
    prefix: ClassVar[str] = "model"
    """What stands before its tensors' names where a head is beside them."""
    causal: ClassVar[bool] = False
    """A decoder: it may generate, and its config.json names its special ids."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Keys of its own in config.json that change nothing of what is served."""
    spelling: ClassVar[Spelling] = Spelling()
    """How checkpoints spell this class."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    num_attention_heads: Count
    max_position_embeddings: Count
    head_dim: Count = 0

    @classmethod
    def thetas(cls, rope: Mapping[str, Any]) -> dict[str, Any]:
        """Return the objects of *rope* that may hold a ``rope_theta``, by the key it has in this class."""
        return {"rope_theta": rope}

    def complete(self, config: Mapping[str, Any]) -> None:
        """Fill in what depends on other keys, and refuse what isn't served. *config*: the keys as they were given."""
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        need(self.head_dim > 0, "head_dim", "must be positive: num_attention_heads exceeds hidden_size")

    def unheld(self, task: Task) -> dict[str, str]:
        """Return the formats of :data:`FORMATS` that can't hold a model for *task*, each with the reason."""
        why = "that engine doesn't generate"
        return {"safetensors-package": why, "coreml": why} if task == "generate" else {}

    def tensors(self, task: Task) -> Iterator[Tensor]:
        """Yield every tensor that the family needs for *task*, in a fixed order."""
        raise NotImplementedError

    @property
    def positions(self) -> int:
        """Tokens that a row may have."""
        return self.max_position_embeddings

    @property
    def token_types(self) -> bool:
        """Whether a cross-encoder tells query and passage apart by token types."""
        return False

    @property
    def head(self) -> dict[str, Any] | None:
        """What a manifest says about a reranker's head; None where it reads off the words yes and no."""
        return None


class Encoder(Config, kw_only=True):
    """A model that sees the whole row and keeps no cache."""

    def complete(self, config: Mapping[str, Any]) -> None:
        """As in every family; the heads share the hidden size."""
        Config.complete(self, config)
        need(self.hidden_size % self.num_attention_heads == 0, "num_attention_heads", "must divide hidden_size")


def affine(name: str, *shape: int, bias: bool = True) -> Iterator[Tensor]:
    """Yield a dense layer (out, in) or a norm (size,)."""
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]
