"""Which tensors a checkpoint of each family holds, under which canonical name and in which shape.

Canonical names are Hugging Face's without the leading ``bert.`` or ``model.``; matrices are (out, in). ModernBERT
stacks query, key and value in ``Wqkv``, and in ``Wi`` the half that is activated first, then the gate. ``lm_head`` is
required only where tie_word_embeddings is false and the task is generate or rerank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

from engines.bundle.manifest import BundleError, Task

Family: TypeAlias = Literal["bert", "modernbert", "qwen3", "llama"]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

FAMILIES: Final[tuple[Family, ...]] = ("bert", "modernbert", "qwen3", "llama")

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
    name = re.sub(r"^(bert|model)\.", "", stored)
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: "LayerNorm." + ("weight" if m[1] == "gamma" else "bias"), name)


def required(family: Family, task: Task, config: dict[str, Any]) -> Shapes:
    """Return every tensor that the family needs for the task, with its shape, in a fixed order."""
    if family == "bert":
        return dict(_bert(task, config))
    if family == "modernbert":
        return dict(_modernbert(task, config))
    return dict(_decoder(family, task, config))


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


_Item: TypeAlias = tuple[str, tuple[int, ...]]


def _affine(name: str, *shape: int, bias: bool = True) -> Iterator[_Item]:
    """A dense layer (out, in) or a norm (size,)."""
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _bert(task: Task, c: dict[str, Any]) -> Iterator[_Item]:
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (c["vocab_size"], hidden)
    yield "embeddings.position_embeddings.weight", (c["max_position_embeddings"], hidden)
    yield "embeddings.token_type_embeddings.weight", (c["type_vocab_size"], hidden)
    yield from _affine("embeddings.LayerNorm", hidden)
    for n in range(c["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        for part in ("query", "key", "value"):
            yield from _affine(f"{layer}.attention.self.{part}", hidden, hidden)
        yield from _affine(f"{layer}.attention.output.dense", hidden, hidden)
        yield from _affine(f"{layer}.attention.output.LayerNorm", hidden)
        yield from _affine(f"{layer}.intermediate.dense", ffn, hidden)
        yield from _affine(f"{layer}.output.dense", hidden, ffn)
        yield from _affine(f"{layer}.output.LayerNorm", hidden)
    if task == "rerank":
        yield from _affine("pooler.dense", hidden, hidden)
        yield from _affine("classifier", 1, hidden)


def _modernbert(task: Task, c: dict[str, Any]) -> Iterator[_Item]:
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    norm_bias, attn_bias, mlp_bias = c["norm_bias"], c["attention_bias"], c["mlp_bias"]
    yield "embeddings.tok_embeddings.weight", (c["vocab_size"], hidden)
    yield from _affine("embeddings.norm", hidden, bias=norm_bias)
    for n in range(c["num_hidden_layers"]):
        layer = f"layers.{n}"
        if n:
            yield from _affine(f"{layer}.attn_norm", hidden, bias=norm_bias)
        yield from _affine(f"{layer}.attn.Wqkv", 3 * hidden, hidden, bias=attn_bias)
        yield from _affine(f"{layer}.attn.Wo", hidden, hidden, bias=attn_bias)
        yield from _affine(f"{layer}.mlp_norm", hidden, bias=norm_bias)
        yield from _affine(f"{layer}.mlp.Wi", 2 * ffn, hidden, bias=mlp_bias)
        yield from _affine(f"{layer}.mlp.Wo", hidden, ffn, bias=mlp_bias)
    yield from _affine("final_norm", hidden, bias=norm_bias)
    if task == "rerank":
        yield from _affine("head.dense", hidden, hidden, bias=c["classifier_bias"])
        yield from _affine("head.norm", hidden, bias=norm_bias)
        yield from _affine("classifier", 1, hidden)


def _decoder(family: Family, task: Task, c: dict[str, Any]) -> Iterator[_Item]:
    hidden, ffn, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    attn_bias, mlp_bias = c["attention_bias"], c.get("mlp_bias", False)
    yield "embed_tokens.weight", (c["vocab_size"], hidden)
    for n in range(c["num_hidden_layers"]):
        layer = f"layers.{n}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield from _affine(f"{layer}.self_attn.q_proj", queries, hidden, bias=attn_bias)
        yield from _affine(f"{layer}.self_attn.k_proj", keys, hidden, bias=attn_bias)
        yield from _affine(f"{layer}.self_attn.v_proj", keys, hidden, bias=attn_bias)
        yield from _affine(f"{layer}.self_attn.o_proj", hidden, queries, bias=attn_bias)
        if family == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (dim,)
            yield f"{layer}.self_attn.k_norm.weight", (dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield from _affine(f"{layer}.mlp.gate_proj", ffn, hidden, bias=mlp_bias)
        yield from _affine(f"{layer}.mlp.up_proj", ffn, hidden, bias=mlp_bias)
        yield from _affine(f"{layer}.mlp.down_proj", hidden, ffn, bias=mlp_bias)
    yield "norm.weight", (hidden,)
    if task != "embed" and not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)
