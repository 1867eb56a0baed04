"""The header of a GGUF file, read by us before any native code sees the file.

Source: the GGUF format page of ggml (versions 2 and 3, little-endian). Every count and every length is bounded and
checked against the bytes that are really there, so a hostile or truncated file becomes ``artifact_invalid`` with a
reason instead of an abort inside the library.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from engines.runtime.batch import FloatArray

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_KEYS: Final = 65_536
MAX_TENSORS: Final = 65_536
MAX_KEY_BYTES: Final = 65_535
MAX_NAME_BYTES: Final = 64
"""ggml keeps tensor names in 64 bytes."""
MAX_STRING_BYTES: Final = 16 * 1024 * 1024
MAX_ARRAY_ITEMS: Final = 16 * 1024 * 1024
MAX_DIMENSIONS: Final = 4
MAX_ELEMENTS: Final = 2**48
MAX_LAYERS: Final = 512
"""llama.cpp's own ceiling; beyond it, it aborts."""
KEPT_ITEMS: Final = 4096
"""Numeric arrays up to this length are kept; of longer ones and of string arrays only the length."""
WINDOW_BYTES: Final = 1024 * 1024

_SCALARS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9

BLOCKS: Final[Mapping[int, tuple[int, int]]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip
"""ggml tensor type -> (elements in a block, bytes of a block). Types that hold weights: in integers (24 to 27) and
doubles (28) no model is stored, and llama.cpp aborts where it computes with them (seen with 0.3.36)."""
ROTATED_WHOLE: Final = ("llama", "qwen2", "qwen3")
"""Architectures that rotate whole heads; others may rotate a part."""
F32: Final = 0
F16: Final = 1


@dataclass(frozen=True, slots=True)
class Array:
    """A metadata array: its length, and its numbers where they were few enough to keep."""

    count: int
    values: tuple[int | float, ...] | None = None


Value: TypeAlias = int | float | bool | str | Array


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` innermost first as in the file, ``offset`` absolute in the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Special token ids as the metadata names them; None where absent or out of the vocabulary."""

    bos: int | None
    sep: int | None
    eos: int | None


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF says about itself."""

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    data_offset: int

    @property
    def architecture(self) -> str:
        """``general.architecture``, such as ``bert`` or ``qwen3``."""
        return str(self.metadata["general.architecture"])

    def integer(self, key: str, *, scoped: bool = False) -> int | None:
        """Return a non-negative integer of the metadata, or None; *scoped* puts ``<architecture>.`` in front."""
        name = f"{self.architecture}.{key}" if scoped else key
        value = self.metadata.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if value >= 0 else None

    @property
    def context_length(self) -> int | None:
        """Positions the model was trained for."""
        return self.integer("context_length", scoped=True)

    @property
    def pooling_type(self) -> int | None:
        """llama.cpp's pooling type: 0 none, 1 mean, 2 cls, 3 last, 4 rank."""
        return self.integer("pooling_type", scoped=True)

    @property
    def position_rows(self) -> int | None:
        """Rows of a learned position table: a sequence beyond them aborts inside ggml (U3)."""
        return self._rows("position_embd.weight")

    @property
    def embedding_rows(self) -> int | None:
        """Rows of the token embedding: ids at or above it have no vector."""
        return self._rows("token_embd.weight")

    @property
    def token_count(self) -> int | None:
        """Length of the vocabulary list, or ``<architecture>.vocab_size`` of a file without one."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, Array):
            return tokens.count
        return self.integer("vocab_size", scoped=True)

    @property
    def token_type_vocab_offset(self) -> int | None:
        """V of a split vocabulary: the id of a passage token is shifted by V (token type 1)."""
        return self.integer("synapse.token_type_vocab_offset")

    @property
    def vocab_size(self) -> int | None:
        """Ids that may come over the wire are below this: V where the vocabulary is split."""
        split = self.token_type_vocab_offset
        if split is not None:
            return split
        sizes = [size for size in (self.embedding_rows, self.token_count) if size is not None]
        return min(sizes) if sizes else None

    @property
    def special(self) -> SpecialIds:
        """Special ids from the metadata: ``llama_vocab_*`` answers -1 for files without a vocabulary."""
        limit = self.vocab_size or 0
        names = ("bos", "cls", "seperator", "eos")
        ids = [self.integer(f"tokenizer.ggml.{name}_token_id") for name in names]
        bos, cls, sep, eos = (id_ if id_ is not None and id_ < limit else None for id_ in ids)
        # Converters name BERT's first token either way.
        return SpecialIds(bos=cls if bos is None else bos, sep=sep, eos=eos)

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation by the model's own files; llama.cpp's vocabulary knows one, or guesses by name."""
        listed = self.metadata.get("synapse.end_token_ids")
        values = listed.values if isinstance(listed, Array) else None
        return frozenset(value for value in values or () if isinstance(value, int))

    @property
    def has_rank_head(self) -> bool:
        """Whether the file was made for RANK pooling and carries the classifier for it (U7)."""
        return self.pooling_type == 4 and any(name.startswith("cls") for name in self.tensors)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def _rows(self, name: str) -> int | None:
        tensor = self.tensors.get(name)
        return tensor.shape[1] if tensor is not None and len(tensor.shape) > 1 else None


def refuse(reason: str) -> NoReturn:
    """Raise ``artifact_invalid`` for a file that is not a usable GGUF."""
    raise EngineError(ErrorCode.ARTIFACT_INVALID, f"not a usable GGUF file: {reason}")


def read_header(descriptor: int) -> Header:
    """Read and check the header of the open file *descriptor*, from its first byte.

    Raises EngineError ``artifact_invalid`` for anything malformed, truncated or out of bounds.
    """
    cursor = _Cursor(descriptor)
    if cursor.take(4, "the magic") != MAGIC:
        refuse("it does not start with the magic 'GGUF'")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        refuse("it is big-endian" if swapped else f"version {version}, supported are 2 and 3")
    tensor_count = cursor.count("tensors", MAX_TENSORS)
    key_count = cursor.count("metadata keys", MAX_KEYS)
    metadata: dict[str, Value] = {}
    for index in range(key_count):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            refuse(f"metadata key {key!r} stands there twice")
        metadata[key] = _value(cursor, key)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        refuse("metadata has no 'general.architecture'")
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not _is_alignment(alignment):
        refuse(f"general.alignment is {alignment!r}, not a power of two")
    raw: dict[str, TensorInfo] = {}
    for index in range(tensor_count):
        tensor = _tensor(cursor, index, alignment)
        if tensor.name in raw:
            refuse(f"tensor {tensor.name!r} stands there twice")
        raw[tensor.name] = tensor
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorInfo(name, tensor.shape, tensor.type, data_offset + tensor.offset, tensor.nbytes)
        for name, tensor in raw.items()
    }
    smallest = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=cursor.position)
    if cursor.size < smallest:
        refuse(f"truncated: {cursor.size} bytes, its tensors end at byte {smallest}")
    header = Header(version, metadata, tensors, data_offset)
    parts = header.integer("split.count")
    if parts is not None and parts > 1:
        refuse(f"it is one of {parts} parts: merge them into one file")
    _check_sizes(header)
    _check_split(header)
    return header


def read_rows(descriptor: int, tensor: TensorInfo) -> FloatArray | None:
    """Return a small F32 or F16 matrix row by row, or None for another type or more than 16 MiB."""
    import numpy as np

    letter = {F32: "<f4", F16: "<f2"}.get(tensor.type)
    if letter is None or len(tensor.shape) != 2 or tensor.nbytes > MAX_STRING_BYTES:
        return None
    cursor = _Cursor(descriptor)
    cursor.skip(tensor.offset, f"tensor {tensor.name!r}")
    values = np.frombuffer(cursor.take(tensor.nbytes, f"tensor {tensor.name!r}"), letter)
    return values.reshape(tensor.shape[::-1]).astype(np.float32)


class _Cursor:
    """Reads forward through a buffer of its own, so that a big file costs no more memory than a small one."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self.position = 0
        self._file = open(descriptor, "rb", WINDOW_BYTES, closefd=False)  # noqa: SIM115 - it stays open
        self._file.seek(0)

    def take(self, length: int, what: str) -> bytes:
        # The size is asked first, so that a length that the file claims is never allocated.
        data = self._file.read(length) if self.position + length <= self.size else b""
        if len(data) < length:
            refuse(f"truncated in {what}")
        self.position += length
        return data

    def skip(self, length: int, what: str) -> None:
        self.position += length
        if self.position > self.size:
            refuse(f"truncated in {what}")
        self._file.seek(self.position)

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, limit: int) -> int:
        value = self.u64(f"the number of {what}")
        if value > limit:
            refuse(f"{value} {what}, at most {limit} are accepted")
        return value

    def string(self, what: str, limit: int) -> str:
        length = self.u64(what)
        if length > limit:
            refuse(f"{what} claims {length} bytes, at most {limit} are accepted")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            refuse(f"{what} is not UTF-8")


def _value(cursor: _Cursor, key: str) -> Value:
    what = f"metadata {key!r}"
    kind = cursor.u32(what)
    if kind == _STRING:
        return cursor.string(what, MAX_STRING_BYTES)
    if kind == _ARRAY:
        return _array(cursor, what)
    layout = _SCALARS.get(kind)
    if layout is None:
        refuse(f"{what} has the unknown type {kind}")
    value: int | float = struct.unpack(layout, cursor.take(struct.calcsize(layout), what))[0]
    return bool(value) if kind == _BOOL else value


def _array(cursor: _Cursor, what: str) -> Array:
    kind = cursor.u32(what)
    count = cursor.count(f"items in {what}", MAX_ARRAY_ITEMS)
    if kind == _STRING:
        for _ in range(count):
            length = cursor.u64(what)
            if length > MAX_STRING_BYTES:
                refuse(f"a string in {what} claims {length} bytes, at most {MAX_STRING_BYTES} are accepted")
            cursor.skip(length, what)
        return Array(count)
    layout = _SCALARS.get(kind)
    if layout is None:  # llama.cpp reads no arrays of arrays either
        refuse(f"{what} is an array of the unknown type {kind}")
    nbytes = count * struct.calcsize(layout)
    if count > KEPT_ITEMS:
        cursor.skip(nbytes, what)
        return Array(count)
    return Array(count, struct.unpack(f"<{count}{layout[1]}", cursor.take(nbytes, what)))


def _tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        refuse(f"{what} has {dimensions} dimensions, 1 to {MAX_DIMENSIONS} are accepted")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, what))
    elements = 1
    for size in shape:
        elements *= size
        if not 1 <= elements <= MAX_ELEMENTS:
            refuse(f"{what} has the shape {list(shape)}")
    kind = cursor.u32(what)
    block = BLOCKS.get(kind)
    if block is None:
        refuse(f"{what} has the type {kind}, in which no weights are stored")
    if dimensions == 1 and kind != F32:
        # Norms and biases: converters leave them in float32, and llama.cpp adds and multiplies by nothing else.
        refuse(f"{what} is a vector of the type {kind}, vectors are stored in float32")
    if shape[0] % block[0]:
        refuse(f"{what} has rows of {shape[0]} elements, not a multiple of its block of {block[0]}")
    offset = cursor.u64(what)
    nbytes = elements // block[0] * block[1]
    if offset % alignment:
        refuse(f"{what} begins at {offset}, not a multiple of {alignment}")
    if offset + nbytes > cursor.size:
        refuse(f"truncated: {what} ends beyond the file's {cursor.size} bytes")
    return TensorInfo(name, shape, kind, offset, nbytes)


def _check_sizes(header: Header) -> None:
    """Refuse numbers on which llama.cpp asserts instead of returning (seen with 0.3.36)."""
    for key, value in header.metadata.items():
        if isinstance(value, float) and not (math.isfinite(value) and (value >= 0 or not key.endswith("epsilon"))):
            refuse(f"{key} is {value}")
    _check_rotation(header)
    for key, limit in (("block_count", MAX_LAYERS), ("context_length", 2**31 - 1)):
        name = f"{header.architecture}.{key}"
        if name in header.metadata and not 1 <= (header.integer(key, scoped=True) or 0) <= limit:
            refuse(f"{name} is {header.metadata[name]!r}, 1 to {limit} are accepted")


def _check_rotation(header: Header) -> None:
    """Refuse rotary embeddings of another width than an attention head, where llama.cpp asserts that they are one."""
    rotated, heads = (header.integer(key, scoped=True) for key in ("rope.dimension_count", "attention.head_count"))
    width = header.integer("attention.key_length", scoped=True)
    if width is None and heads:
        width = (header.integer("embedding_length", scoped=True) or 0) // heads
    if header.architecture in ROTATED_WHOLE and rotated is not None and width and rotated != width:
        refuse(f"{header.architecture}.rope.dimension_count is {rotated}, a head has {width} numbers")


def _check_split(header: Header) -> None:
    split = header.token_type_vocab_offset
    if split is None:
        if "synapse.token_type_vocab_offset" in header.metadata:
            refuse("synapse.token_type_vocab_offset is not a number of tokens")
        return
    for what, rows in (("token embedding rows", header.embedding_rows), ("tokens", header.token_count)):
        if rows is not None and rows != 2 * split:
            refuse(f"a vocabulary split at {split} needs {2 * split} {what}, it has {rows}")


def _is_alignment(value: int) -> bool:
    return 1 <= value <= 2**20 and value & (value - 1) == 0
