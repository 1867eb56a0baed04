"""A copy of an encoder's GGUF with its word pieces: llama.cpp's servers take text, our bundles keep no vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = {"[PAD]": 3, "[UNK]": 2, "[CLS]": 3, "[SEP]": 3, "[MASK]": 3}
"""llama.cpp's token types: 1 normal, 2 unknown, 3 control."""


def with_vocabulary(source: Path, tokenizer: Path, target: Path) -> Path:
    """Write *target*: the tensors and keys of *source* and the vocabulary of *tokenizer* (tokenizer.json)."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        value, kind = field.contents(), field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    # llama.cpp marks the beginning of a word where WordPiece marks its continuation.
    writer.add_token_list([t if t in SPECIAL else t[2:] if t.startswith("##") else "\u2581" + t for t in tokens])
    writer.add_token_types([SPECIAL.get(token, 1) for token in tokens])
    for key, token in (("bos", "[CLS]"), ("eos", "[SEP]"), ("unknown", "[UNK]"), ("seperator", "[SEP]"),
                       ("padding", "[PAD]"), ("cls", "[CLS]"), ("mask", "[MASK]")):  # fmt: skip
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", vocabulary[token])
    writer.add_token_type_count(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
