"""Checkpoint -> GGUF, on the ``gguf`` package; a GGUF's vocabulary -> tokenizer.json.

``python -m engines.llama build CHECKPOINT OUT.gguf --dtype f16`` and ``python -m engines.llama tokenizer MODEL.gguf
OUT.json`` print progress as JSON lines ``{"stage", "done", "total"}`` (bytes of tensor data written) and end with one
``{"stage": "result", ...}``. A failure is one line on stderr and exit status 1. Output is deterministic.

Theory of operation. A checkpoint is opened and checked by ``engines.checkpoint``, which maps its weights. A family's
module says its metadata and names its tensors; first all names, shapes and types are written, then each tensor is made,
encoded and written in turn, so that one is in memory at a time. The file appears under its name once it is whole.
Matrices take the dtype that was asked for, everything else stays float32, which is what llama.cpp computes with. The
k-quants (``q4_k_m``, ``q5_k_m``, ``q6_k``) are made by llama.cpp's own quantizer from such a file.

A new family is one file here, with ``metadata`` and ``tensors``, and a row in :data:`FAMILIES`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.bundle.digest import PREFIX, file_digest
from engines.bundle.manifest import BundleError
from engines.checkpoint import facts, program
from engines.checkpoint.read import Checkpoint
from engines.llama.build import bert, decoder, gemma3_text, nomic_bert
from engines.llama.build.native import QUANTS, quantize
from engines.llama.build.tensors import GgufTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

    from engines.checkpoint.safetensors import Array, FloatArray

DTYPES: Final = ("f32", "f16", "bf16", "q8_0", *QUANTS)
END_KEY: Final = "synapse.end_token_ids"
FAMILIES: Final[Mapping[str, Any]] = {
    "bert": bert,
    "gemma3_text": gemma3_text,
    "nomic_bert": nomic_bert,
    **dict.fromkeys(("qwen3", "qwen2", "llama", "mistral"), decoder),
}
"""Family -> the module with its ``metadata`` and ``tensors``."""
ARCHITECTURES: Final = {"mistral": "llama", "gemma3_text": "gemma-embedding", "nomic_bert": "nomic-bert"}
"""Families that are another one in llama.cpp."""
_FILE_TYPES: Final = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_POOLING_TYPES: Final = {"mean": 1, "cls": 2, "last": 3, "rank": 4}
_Q8_BLOCK: Final = 32


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
    checkpoint.need_format("gguf")
    if dtype in QUANTS:
        return _quantized(checkpoint, out, dtype=dtype, name=name, pooling=pooling, progress=progress)
    writer = gguf.GGUFWriter(None, _architecture(checkpoint), use_temp_file=False)
    writer.add_name(name or checkpoint.folder.name)
    _metadata(writer, checkpoint, pooling)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    plan = [(tensor, _kind(tensor, dtype)) for tensor in FAMILIES[checkpoint.family].tensors(checkpoint)]
    sizes = [math.prod(gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind)) for tensor, kind in plan]
    for (tensor, kind), size in zip(plan, sizes, strict=True):
        # The shape is the logical one in every case: only uint8 input would make the writer derive it.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
    temporary = out.with_name(out.name + ".part")
    try:
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total, done = sum(sizes), 0
        for (tensor, kind), size in zip(plan, sizes, strict=True):
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


def _quantized(checkpoint: Checkpoint, out: Path, *, dtype: str, **options: Any) -> int:
    """Write a generator's GGUF in llama.cpp's k-quants, from one as the checkpoint is stored, which goes afterwards.

    llama.cpp picks the type of each matrix, and a coarser one for rows that aren't whole blocks of 256 numbers.
    """
    if checkpoint.task != "generate":
        raise BundleError(
            f"{dtype} is for generators: vectors and scores of k-quants are not certified; use q8_0 or f16"
        )
    whole, temporary = (out.with_name(f"{out.name}.{part}") for part in ("whole", "part"))
    try:
        build(checkpoint, whole, dtype=checkpoint.stored_dtype, **options)
        quantize(whole, temporary, dtype)
        temporary.replace(out)
    finally:
        whole.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
    return out.stat().st_size


def _kind(tensor: GgufTensor, dtype: str) -> GGMLQuantizationType:
    import gguf

    if dtype == "q8_0" and tensor.shape[-1] % _Q8_BLOCK:
        dtype = "f16"  # Q8_0 holds whole blocks of 32 only
    return gguf.GGMLQuantizationType[dtype.upper() if tensor.matrix else "F32"]


def _encode(array: FloatArray, kind: GGMLQuantizationType) -> Array:
    import gguf

    with np.errstate(over="ignore"):
        stored: Array = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind)
    if kind.name == "F16" and not np.isfinite(stored).all():
        raise BundleError("a weight is beyond what f16 can hold; build with --dtype bf16 or f32")
    return stored


def _architecture(checkpoint: Checkpoint) -> str:
    return ARCHITECTURES.get(checkpoint.family, checkpoint.family)


def _metadata(writer: Any, checkpoint: Checkpoint, pooling: str | None) -> None:
    known, c = facts.of_checkpoint(checkpoint), checkpoint.config
    writer.add_context_length(checkpoint.known.positions)
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_head_count(c["num_attention_heads"])
    FAMILIES[checkpoint.family].metadata(writer, checkpoint, known)
    if checkpoint.task != "generate":
        kind = "rank" if checkpoint.task == "rerank" else pooling or known.pooling
        writer.add_uint32(f"{_architecture(checkpoint)}.pooling_type", _POOLING_TYPES[str(kind)])
    _vocabulary(writer, checkpoint, known)


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
    two.add_argument("--given", action="store_true", help="OUT is there already: only say what it must agree with")
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
            from engines.llama.build.tokenizer import describe

            made = describe(args.gguf, None if args.given else args.out)
        found = {"path": args.out.name, "bytes": args.out.stat().st_size, "digest": PREFIX + file_digest(args.out)}
        return found | made

    return program.run("build", make, missing="pip install 'synapse-workers[llama]'")


if __name__ == "__main__":
    raise SystemExit(main())
