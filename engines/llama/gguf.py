"""The header of a GGUF file, read by us before any native code sees the file.

Source: the GGUF format page of ggml (versions 2 and 3, little-endian). Every count and every length is bounded and
checked against the bytes that are really there, so a hostile or truncated file becomes ``artifact_invalid`` with a
reason instead of an abort inside the library.

llama.cpp's own reader (``gguf_init_from_file_ptr``, 0.3.36) doesn't do that: a claimed array of strings costs eight
times the size of the file, which may be a sparse one, and where there is less memory an uncaught ``bad_alloc`` ends the
process. Reading a bounded beginning of the file with it would need some fifteen native functions declared and every
check below all the same, to save some thirty lines.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

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

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
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
TOKEN_TYPE_KEY: Final = "synapse.token_type_vocab_offset"  # noqa: S105
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
    """One tensor: ``shape`` innermost first as in the file, ``offset`` in bytes from the header's ``data_offset``."""

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
        return self.integer(TOKEN_TYPE_KEY)

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
    if cursor.take(4) != MAGIC:
        refuse("it does not start with the magic 'GGUF'")
    version = cursor.number("<I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        refuse("it is big-endian" if swapped else f"version {version}, supported are 2 and 3")
    tensor_count, key_count = cursor.count(MAX_TENSORS), cursor.count(MAX_KEYS)
    metadata: dict[str, Value] = {}
    for index in range(key_count):
        cursor.place = f"metadata key {index}"
        key = cursor.string(MAX_KEY_BYTES)
        if key in metadata:
            refuse(f"metadata key {key!r} stands there twice")
        cursor.place = f"metadata {key!r}"
        metadata[key] = _value(cursor)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        refuse("metadata has no 'general.architecture'")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        refuse(f"general.alignment is {alignment!r}, not a power of two")
    tensors: dict[str, TensorInfo] = {}
    for index in range(tensor_count):
        cursor.place = f"the name of tensor {index}"
        name = cursor.string(MAX_NAME_BYTES)
        if name in tensors:
            refuse(f"tensor {name!r} stands there twice")
        cursor.place = f"tensor {name!r}"
        tensors[name] = _tensor(cursor, alignment)
    data_offset = -(-cursor.position // alignment) * alignment
    end = max((data_offset + tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if cursor.size < end:
        refuse(f"truncated: {cursor.size} bytes, its tensors end at byte {end}")
    header = Header(metadata, tensors, data_offset)
    _check_numbers(header)
    _check_rotation(header)
    _check_split(header)
    return header


def read_rows(descriptor: int, header: Header, name: str) -> FloatArray | None:
    """Return a small F32 or F16 matrix row by row, or None for another type or more than 16 MiB."""
    import numpy as np

    tensor = header.tensors[name]
    letter = {F32: "<f4", F16: "<f2"}.get(tensor.type)
    if letter is None or tensor.nbytes > MAX_STRING_BYTES:
        return None
    cursor = _Cursor(descriptor)
    cursor.skip(header.data_offset + tensor.offset)
    return np.frombuffer(cursor.take(tensor.nbytes), letter).reshape(tensor.shape[::-1]).astype(np.float32)


class _Cursor:
    """Reads forward through a buffer of its own, so that a big file costs no more memory than a small one."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self.position = 0
        self.place = "its first bytes"
        """What is being read, for the reason of a refusal."""
        self._file = open(descriptor, "rb", WINDOW_BYTES, closefd=False)  # noqa: SIM115 - it stays open
        self._file.seek(0)

    def take(self, length: int) -> bytes:
        # The size is asked first, so that a length that the file claims is never allocated.
        data = self._file.read(length) if self.position + length <= self.size else b""
        if len(data) < length:
            refuse(f"truncated in {self.place}")
        self.position += length
        return data

    def skip(self, length: int) -> None:
        self.position += length
        if self.position > self.size:
            refuse(f"truncated in {self.place}")
        self._file.seek(self.position)

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def count(self, limit: int) -> int:
        value = int.from_bytes(self.take(8), "little")
        if value > limit:
            refuse(f"{self.place} claims a number or length of {value}, at most {limit} is accepted")
        return value

    def string(self, limit: int) -> str:
        try:
            return self.take(self.count(limit)).decode("utf-8")
        except UnicodeDecodeError:
            refuse(f"{self.place} is not UTF-8")


def _value(cursor: _Cursor) -> Value:
    kind = cursor.number("<I")
    if kind == _STRING:
        return cursor.string(MAX_STRING_BYTES)
    if kind != _ARRAY:
        value: int | float = cursor.number("<" + _letter(cursor, kind))
        return bool(value) if kind == _BOOL else value
    kind, count = cursor.number("<I"), cursor.count(MAX_ARRAY_ITEMS)
    if kind == _STRING:
        for _ in range(count):
            cursor.skip(cursor.count(MAX_STRING_BYTES))
        return Array(count)
    layout = f"<{count}{_letter(cursor, kind)}"  # llama.cpp reads no arrays of arrays either
    if count > KEPT_ITEMS:
        cursor.skip(struct.calcsize(layout))
        return Array(count)
    return Array(count, struct.unpack(layout, cursor.take(struct.calcsize(layout))))


def _letter(cursor: _Cursor, kind: int) -> str:
    return _SCALARS.get(kind) or refuse(f"{cursor.place} has the unknown type {kind}")


def _tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    what = cursor.place
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        refuse(f"{what} has {dimensions} dimensions, 1 to {MAX_DIMENSIONS} are accepted")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
    kind, offset, elements = cursor.number("<I"), cursor.number("<Q"), math.prod(shape)
    if not 1 <= elements <= MAX_ELEMENTS:
        refuse(f"{what} has the shape {list(shape)}")
    if kind not in BLOCKS:
        refuse(f"{what} has the type {kind}, in which no weights are stored")
    if dimensions == 1 and kind != F32:
        # Norms and biases: converters leave them in float32, and llama.cpp adds and multiplies by nothing else.
        refuse(f"{what} is a vector of the type {kind}, vectors are stored in float32")
    block, nbytes = BLOCKS[kind]
    if shape[0] % block:
        refuse(f"{what} has rows of {shape[0]} elements, not a multiple of its block of {block}")
    if offset % alignment:
        refuse(f"{what} begins at {offset}, not a multiple of {alignment}")
    return TensorInfo(shape, kind, offset, elements // block * nbytes)


def _check_numbers(header: Header) -> None:
    """Refuse numbers on which llama.cpp asserts instead of returning (seen with 0.3.36), and a part of a model."""
    if (parts := header.integer("split.count") or 1) > 1:
        refuse(f"it is one of {parts} parts: merge them into one file")
    for key, value in header.metadata.items():
        if isinstance(value, float) and not (math.isfinite(value) and (value >= 0 or not key.endswith("epsilon"))):
            refuse(f"{key} is {value}")
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
    """Refuse a vocabulary that isn't split where the file says so."""
    if TOKEN_TYPE_KEY not in header.metadata:
        return
    split = header.token_type_vocab_offset
    if split is None:
        refuse(f"{TOKEN_TYPE_KEY} is not a number of tokens")
    for what, rows in (("token embedding rows", header.embedding_rows), ("tokens", header.token_count)):
        if rows is not None and rows != 2 * split:
            refuse(f"a vocabulary split at {split} needs {2 * split} {what}, it has {rows}")
