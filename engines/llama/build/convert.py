"""Checkpoint -> GGUF, on the ``gguf`` package; run as ``python -m engines.llama build CHECKPOINT OUT.gguf --dtype
f16``.

Also ``python -m engines.llama tokenizer MODEL.gguf OUT.json``: a tokenizer.json from a GGUF's own vocabulary.

Both print progress as JSON lines ``{"stage", "done", "total"}`` (bytes of tensor data written) and end with one
``{"stage": "result", ...}``. A failure is one line on stderr and exit status 1. Output is deterministic.

What is peculiar to BERT here: llama.cpp adds token type 0 to every token and its own converter drops the pooler. So the
pooler is written as ``cls``, and a cross-encoder's vocabulary is doubled: row V + i is word[i] + (type1 - type0),
which makes the sum before the embedding norm exactly the trained one. ``synapse.token_type_vocab_offset`` says V to
the worker.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.manifest import BundleError
from engines.checkpoint import facts, program
from engines.checkpoint.read import Checkpoint
from engines.checkpoint.safetensors import narrow_bf16

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import Array, FloatArray

DTYPES: Final = ("f32", "f16", "bf16", "q8_0")
END_KEY: Final = "synapse.end_token_ids"
TOKEN_TYPE_KEY: Final = "synapse.token_type_vocab_offset"  # noqa: S105
_FILE_TYPES: Final = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_POOLING_TYPES: Final = {"mean": 1, "cls": 2, "last": 3, "rank": 4}
_Q8_BLOCK: Final = 32


@dataclass(frozen=True)
class GgufTensor:
    """One tensor to write: its GGUF name, its shape, whether it follows the file's dtype, and how to make it."""

    name: str
    shape: tuple[int, ...]
    matrix: bool
    make: Callable[[], FloatArray]


def build(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str,
    name: str = "",
    pooling: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write one GGUF and return its size. One tensor is in memory at a time.

    Raises BundleError for a family or task that llama.cpp can't serve, OSError where the disk says no.
    """
    import gguf

    if dtype not in DTYPES:
        raise BundleError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if checkpoint.family == "modernbert":
        raise BundleError("ModernBERT is not converted to GGUF here; build it as safetensors-package or coreml")
    if checkpoint.family == "qwen3" and checkpoint.task == "rerank":
        raise BundleError(
            "a Qwen3 reranker is not served from GGUF (its template isn't faithful there); use another format"
        )
    writer = gguf.GGUFWriter(None, checkpoint.family, use_temp_file=False)
    writer.add_name(name or checkpoint.folder.name)
    _metadata(writer, checkpoint, pooling)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    tensors = list(_bert_tensors(checkpoint) if checkpoint.family == "bert" else _decoder_tensors(checkpoint))
    kinds = [_kind(tensor, dtype) for tensor in tensors]
    sizes = [_stored_bytes(tensor.shape, kind) for tensor, kind in zip(tensors, kinds, strict=True)]
    for tensor, kind, size in zip(tensors, kinds, sizes, strict=True):
        ggml = gguf.GGMLQuantizationType[kind.upper()]
        # The shape is the logical one in every case: only uint8 input would make the writer derive it.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=ggml)
    temporary = out.with_name(out.name + ".part")
    try:
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total, done = sum(sizes), 0
        for tensor, kind, size in zip(tensors, kinds, sizes, strict=True):
            writer.write_tensor_data(_encode(tensor.make(), kind))
            done += size
            if progress is not None:
                progress(done, total)
        writer.close()
        temporary.replace(out)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    return out.stat().st_size


def _kind(tensor: GgufTensor, dtype: str) -> str:
    if not tensor.matrix:
        return "f32"
    if dtype == "q8_0" and tensor.shape[-1] % _Q8_BLOCK:
        return "f16"  # Q8_0 holds whole blocks of 32 only
    return dtype


def _stored_bytes(shape: tuple[int, ...], kind: str) -> int:
    count = math.prod(shape)
    return count // _Q8_BLOCK * (_Q8_BLOCK + 2) if kind == "q8_0" else count * (4 if kind == "f32" else 2)


def _encode(array: FloatArray, kind: str) -> Array:
    import gguf

    if kind == "f32":
        return np.ascontiguousarray(array, np.float32)
    if kind == "f16":
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(array, np.float16)
        if not np.isfinite(half).all():
            raise BundleError("a weight is beyond what f16 can hold; build with --dtype bf16 or f32")
        return half
    if kind == "bf16":
        return narrow_bf16(array)
    quantised: Array = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), gguf.GGMLQuantizationType.Q8_0)
    return quantised


def _metadata(writer: Any, checkpoint: Checkpoint, pooling: str | None) -> None:
    known, c = facts.of_checkpoint(checkpoint), checkpoint.config
    writer.add_vocab_size(c["vocab_size"] * (2 if known.token_types is True else 1))
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_head_count(c["num_attention_heads"])
    (_bert_metadata if checkpoint.family == "bert" else _decoder_metadata)(writer, checkpoint, known, pooling)
    _vocabulary(writer, checkpoint, known)


def _bert_metadata(writer: Any, checkpoint: Checkpoint, known: facts.Facts, pooling: str | None) -> None:
    c = checkpoint.config
    writer.add_layer_norm_eps(float(c["layer_norm_eps"]))
    writer.add_causal_attention(False)
    kind = "rank" if checkpoint.task == "rerank" else pooling or known.pooling or "mean"
    writer.add_uint32("bert.pooling_type", _POOLING_TYPES[kind])
    # Required even without a vocabulary: the loader throws on 0.
    writer.add_token_type_count(c["type_vocab_size"])
    if known.token_types is True:
        writer.add_uint32(TOKEN_TYPE_KEY, c["vocab_size"])


def _bert_tensors(checkpoint: Checkpoint) -> Iterator[GgufTensor]:
    c = checkpoint.config
    split = checkpoint.task == "rerank" and c["type_vocab_size"] > 1
    words, types = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"

    def embedding() -> FloatArray:
        table = checkpoint.f32(words)
        if not split:
            return table
        kinds = checkpoint.f32(types)
        return np.concatenate((table, table + (kinds[1] - kinds[0])))

    rows, width = checkpoint.shape(words)
    yield GgufTensor("token_embd.weight", (rows * 2 if split else rows, width), True, embedding)
    yield _same(checkpoint, "position_embd.weight", "embeddings.position_embeddings.weight", matrix=False)
    yield _same(checkpoint, "token_types.weight", types, matrix=False)
    yield from _both(checkpoint, "token_embd_norm", "embeddings.LayerNorm", matrix=False)
    for n in range(c["num_hidden_layers"]):
        layer, block = f"encoder.layer.{n}", f"blk.{n}"
        for short, part in (("q", "query"), ("k", "key"), ("v", "value")):
            yield from _both(checkpoint, f"{block}.attn_{short}", f"{layer}.attention.self.{part}")
        yield from _both(checkpoint, f"{block}.attn_output", f"{layer}.attention.output.dense")
        norm = f"{layer}.attention.output.LayerNorm"
        yield from _both(checkpoint, f"{block}.attn_output_norm", norm, matrix=False)
        yield from _both(checkpoint, f"{block}.ffn_up", f"{layer}.intermediate.dense")
        yield from _both(checkpoint, f"{block}.ffn_down", f"{layer}.output.dense")
        yield from _both(checkpoint, f"{block}.layer_output_norm", f"{layer}.output.LayerNorm", matrix=False)
    if checkpoint.task == "rerank":
        yield from _both(checkpoint, "cls", "pooler.dense", matrix=False)
        yield from _both(checkpoint, "cls.output", "classifier", matrix=False)


def _decoder_metadata(writer: Any, checkpoint: Checkpoint, known: facts.Facts, pooling: str | None) -> None:
    c = checkpoint.config
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_rope_freq_base(float(c["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(c["rms_norm_eps"]))
    if checkpoint.task == "embed":
        kind = pooling or known.pooling or "last"
        writer.add_uint32(f"{checkpoint.family}.pooling_type", _POOLING_TYPES[kind])


def _decoder_tensors(checkpoint: Checkpoint) -> Iterator[GgufTensor]:
    c = checkpoint.config
    biased = c["attention_bias"]
    yield _same(checkpoint, "token_embd.weight", "embed_tokens.weight")
    for n in range(c["num_hidden_layers"]):
        layer, block = f"layers.{n}", f"blk.{n}"
        yield _same(checkpoint, f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight", matrix=False)
        for short, heads in (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"]), ("v", 0)):
            parts = ("weight", "bias") if biased else ("weight",)
            for part in parts:
                source = f"{layer}.self_attn.{short}_proj.{part}"
                name = f"{block}.attn_{short}.{part}"
                # llama's rotary pairs neighbours where Hugging Face pairs halves; qwen3 keeps halves on both sides.
                turned = heads if checkpoint.family == "llama" else 0
                yield _rotated(checkpoint, name, source, turned, matrix=part == "weight")
        yield from _both(checkpoint, f"{block}.attn_output", f"{layer}.self_attn.o_proj", bias=biased)
        if checkpoint.family == "qwen3":
            for short in ("q", "k"):
                source = f"{layer}.self_attn.{short}_norm.weight"
                yield _same(checkpoint, f"{block}.attn_{short}_norm.weight", source, matrix=False)
        yield _same(checkpoint, f"{block}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", matrix=False)
        for short in ("gate", "up", "down"):
            yield from _both(
                checkpoint, f"{block}.ffn_{short}", f"{layer}.mlp.{short}_proj", bias=c.get("mlp_bias", False)
            )
    yield _same(checkpoint, "output_norm.weight", "norm.weight", matrix=False)
    if "lm_head.weight" in checkpoint.tensors:
        yield _same(checkpoint, "output.weight", "lm_head.weight")


def _same(checkpoint: Checkpoint, name: str, source: str, *, matrix: bool = True) -> GgufTensor:
    return GgufTensor(name, checkpoint.shape(source), matrix, lambda: checkpoint.f32(source))


def _both(
    checkpoint: Checkpoint, name: str, source: str, *, matrix: bool = True, bias: bool = True
) -> Iterator[GgufTensor]:
    yield _same(checkpoint, f"{name}.weight", f"{source}.weight", matrix=matrix)
    if bias:
        yield _same(checkpoint, f"{name}.bias", f"{source}.bias", matrix=False)


def _rotated(checkpoint: Checkpoint, name: str, source: str, heads: int, *, matrix: bool) -> GgufTensor:
    shape = checkpoint.shape(source)

    def make() -> FloatArray:
        array = checkpoint.f32(source)
        if not heads:
            return array
        halves = array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
        return halves.swapaxes(1, 2).reshape(shape)

    return GgufTensor(name, shape, matrix, make)


def _vocabulary(writer: Any, checkpoint: Checkpoint, known: facts.Facts) -> None:
    """Encoders and embedders take ids only; a generator turns ids into text, so its file carries the tokens."""
    if checkpoint.task == "generate":
        from engines.llama.build.vocabulary import write_bpe

        write_bpe(writer, checkpoint.folder / "tokenizer.json", checkpoint.config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    # Written for `no_vocab` files too: the worker reads them with its own header parser.
    keys = {"bos": "bos", "eos": "eos", "sep": "seperator", "pad": "padding", "unk": "unknown", "mask": "mask"}
    for role, key in keys.items():
        if role in known.special_ids:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", known.special_ids[role])
    if checkpoint.task == "generate":
        if known.end_ids:
            writer.add_array(END_KEY, list(known.end_ids))
        writer.add_add_bos_token(False)
        if known.chat_template:
            writer.add_chat_template(known.chat_template)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``build`` or ``tokenizer``; return the exit status (0 done, 1 failed, 2 wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m engines.llama", description="Make files for the llama engine.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("build", help="checkpoint folder to GGUF")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--dtype", choices=DTYPES, default="f16")
    one.add_argument("--task", choices=("embed", "rerank", "generate"), default=None)
    one.add_argument("--pooling", choices=("mean", "cls", "last"), default=None)
    one.add_argument("--name", default="")
    two = verbs.add_parser("tokenizer", help="tokenizer.json from a GGUF's vocabulary")
    two.add_argument("gguf", type=Path)
    two.add_argument("out", type=Path)
    try:
        args = parser.parse_args(argv)
    except SystemExit as exc:
        return int(exc.code or 0)

    def make() -> dict[str, Any]:
        made: dict[str, Any]
        if args.verb == "build":
            options = {"dtype": args.dtype, "name": args.name, "pooling": args.pooling}
            build(
                Checkpoint.open(args.checkpoint, task=args.task), args.out, **options, progress=program.report("build")
            )
            made = {"dtype": args.dtype}
        else:
            from engines.llama.build.vocabulary import write_tokenizer

            made = {"facts": write_tokenizer(args.gguf, args.out, progress=program.report("tokenizer"))}
        found = {"path": args.out.name, "bytes": args.out.stat().st_size, "digest": PREFIX + file_digest(args.out)}
        return found | made

    return program.run("build", make, missing="install the extra 'llama'")


if __name__ == "__main__":
    raise SystemExit(main())
