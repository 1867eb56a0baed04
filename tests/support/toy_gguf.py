"""Toy GGUF files for tests: seeded checkpoints put through the real builder, and hand-made broken ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ToyGguf:
    """One GGUF, the checkpoint folder it came from, and its digest."""

    path: Path
    checkpoint: Path
    digest: str


def sha256(path: Path) -> str:
    """Return the lowercase hex SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_toy(folder: Path, name: str, write: Callable[..., Path], *, dtype: str = "f32", **config: Any) -> ToyGguf:
    """Write a toy checkpoint with *write* and build ``<name>.gguf`` beside it."""
    from engines.checkpoint.read import Checkpoint
    from engines.llama.build.convert import build

    checkpoint = write(folder / name, **config)
    path = folder / f"{name}-{dtype}.gguf"
    build(Checkpoint.open(checkpoint), path, dtype=dtype)
    return ToyGguf(path, checkpoint, sha256(path))


def rewrite(source: Path, target: Path, *, drop: tuple[str, ...] = (), **metadata: Any) -> ToyGguf:
    """Copy a GGUF without the tensors whose names start with one of *drop*, and with metadata replaced.

    A metadata value of -1 removes the key; ``__`` in a key stands for a dot. Other values are a string, a flag, a
    number of 32 bits, a list or bytes.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    changed = {key.replace("__", "."): value for key, value in metadata.items()}
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in changed:
            continue
        kind = entry.types[0]
        element = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, entry.contents(), kind, sub_type=element)
    for key, value in changed.items():
        kinds: dict[type, Any] = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        if value != -1:
            kinds.get(type(value), writer.add_array)(key, value)
    for tensor in reader.tensors:
        if not tensor.name.startswith(drop or ("\0",)):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ToyGguf(target, source.parent, sha256(target))
