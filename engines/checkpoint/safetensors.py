"""The safetensors file format: a bounded header parser, a mapped reader, and a deterministic writer.

Layout (the format's own page): u64 little-endian header length, a JSON object ``{name: {dtype, shape, data_offsets}}``
with an optional ``__metadata__`` of strings, then the data buffer; offsets count from its start. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from engines.bundle.manifest import BundleError, open_plain, unique_keys

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    FloatArray = npt.NDArray[np.float32]

METADATA_KEY: Final = "__metadata__"
MAX_HEADER: Final = 16 * 1024 * 1024
ITEM_SIZES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
NUMPY_NAMES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}


Size: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Entry(Struct):
    """What a header says about one tensor."""

    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"]
    shape: Annotated[list[Size], Meta(max_length=8)]
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. ``begin`` and ``end`` are byte offsets within the file (not within the data buffer)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: tensors in file order, and the metadata strings."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def parse_header(data: mmap.mmap | bytes, *, where: str) -> Header:
    """Parse and check the header of a mapped file, or of a whole file's bytes.

    Every count is bounded before it is used, and the tensors must tile the data buffer exactly: no hole, no overlap,
    nothing beyond the file. Raises BundleError naming *where* and the tensor.
    """

    def refuse(why: str) -> BundleError:
        return BundleError(f"{where}: {why}; the file is damaged or not a safetensors file")

    file_size = len(data)
    if file_size < 10:
        raise BundleError(f"{where}: {file_size} bytes are too few for a safetensors file")
    (length,) = struct.unpack_from("<Q", data)
    if not 2 <= length <= min(MAX_HEADER, file_size - 8):
        raise refuse(f"a header of {length} bytes can't be")

    try:
        obj = json.loads(data[8 : 8 + length], object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as exc:
        raise refuse(f"the header is not valid JSON ({exc})") from exc
    if not isinstance(obj, dict):
        raise refuse("the header is not a JSON object")
    metadata = obj.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse(f"{METADATA_KEY} must map strings to strings")
    infos = [_tensor(name, entry, 8 + length, refuse) for name, entry in obj.items()]
    infos.sort(key=lambda info: (info.begin, info.end))
    position = 8 + length
    for info in infos:
        if info.begin != position:
            raise refuse(f"tensor {info.name!r} starts at byte {info.begin}, expected {position}")
        position = info.end
    if position != file_size:
        raise refuse(f"the tensors end at byte {position}, the file at {file_size}")
    return Header({info.name: info for info in infos}, metadata)


def _tensor(name: str, entry: Any, base: int, refuse: Callable[[str], BundleError]) -> TensorInfo:
    try:
        found = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as exc:
        raise refuse(f"tensor {name[:80]!r}: {exc}") from None
    begin, end = found.data_offsets
    size = math.prod(found.shape) * ITEM_SIZES[found.dtype]
    if end - begin != size:
        raise refuse(
            f"tensor {name!r} of {found.dtype}{found.shape} needs {size} bytes, its offsets give {end - begin}"
        )
    return TensorInfo(name, found.dtype, tuple(found.shape), base + begin, base + end)


class SafetensorsFile:
    """A mapped file. Tensors are read as views of the map; BF16 is widened to float32 one tensor at a time.

    The map lives as long as any view of it: nothing has to be closed, and a view never dangles.
    """

    def __init__(self, header: Header, buffer: mmap.mmap | bytes, path: Path) -> None:
        self.header = header
        self.path = path
        self._buffer = buffer

    @classmethod
    def open(cls, path: Path | str, *, fd: int | None = None) -> SafetensorsFile:
        """Map *path*, or the already open descriptor *fd* (kept by the caller; *path* then only names it in errors).

        Raises BundleError for anything that isn't a whole safetensors file.
        """
        path = Path(path)
        if fd is None:
            try:
                with open_plain(path) as file:
                    return cls.open(path, fd=file.fileno())
            except OSError as exc:
                raise BundleError(f"{path}: {exc.strerror or exc}") from exc
        try:
            size = os.fstat(fd).st_size
            buffer = mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b""
        except (OSError, ValueError) as exc:
            raise BundleError(f"{path}: can't be mapped: {exc}") from exc
        return cls(parse_header(buffer, where=str(path)), buffer, path)

    def array(self, name: str) -> Array:
        """Return a tensor: a read-only view, for BF16 a fresh float32 array (the exact same values)."""
        import numpy as np

        info = self.header.tensors[name]
        raw = memoryview(self._buffer)[info.begin : info.end]
        if info.dtype == "BF16":
            return widen_bf16(np.frombuffer(raw, "<u2")).reshape(info.shape)
        if info.dtype not in NUMPY_NAMES:
            raise BundleError(f"{self.path}: tensor {name!r} has dtype {info.dtype}, which no model here uses")
        array = np.frombuffer(raw, NUMPY_NAMES[info.dtype]).reshape(info.shape)
        return array if sys.byteorder == "little" else array.astype(array.dtype.newbyteorder("="))


def widen_bf16(bits: Array) -> FloatArray:
    """Turn bfloat16 bit patterns (uint16, any shape) into float32 of the same values."""
    import numpy as np

    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow_bf16(array: Array) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bit patterns: nearest, ties to even; NaN stays (quiet) NaN."""
    import numpy as np

    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, quiet, rounded >> np.uint32(16)).astype(np.uint16)


def write(
    path: Path | str,
    tensors: Mapping[str, Array],
    *,
    metadata: Mapping[str, str] | None = None,
    dtype: str | Callable[[str], str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a file, one tensor in memory at a time, byte for byte the same for the same input; return its size.

    ``tensors``: name -> array. ``dtype``: F32, F16 or BF16 for all of them, or one by name; None keeps each own.
    With ``dtype`` and ``shapes`` no tensor is touched before it is written. ``progress(done, total)``: bytes of data
    written. The order in the file is by name, so it doesn't depend on the mapping.
    """
    import numpy as np

    path = Path(path)
    kinds = {np.dtype(NUMPY_NAMES[kind]): kind for kind in ("F32", "F16", "I64", "I32", "I8")}
    header: dict[str, Any] = {}
    if metadata:
        header[METADATA_KEY] = dict(sorted(metadata.items()))
    position = 0
    plan: list[tuple[str, str]] = []
    for name in sorted(tensors):
        shape = list(shapes[name] if shapes is not None else tensors[name].shape)
        kind = dtype(name) if callable(dtype) else dtype or kinds.get(tensors[name].dtype)
        if kind is None:
            raise BundleError(f"{path}: tensor {name!r} has dtype {tensors[name].dtype}; write float32 or float16")
        end = position + math.prod(shape) * ITEM_SIZES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, end]}
        position = end
        plan.append((name, kind))
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # data starts on 8 bytes, so views are aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        done = 0
        for name, kind in plan:
            data = _encode(name, tensors[name], kind)
            file.write(data)
            done += len(data)
            if progress is not None:
                progress(done, position)
    return 8 + len(raw) + position


def _encode(name: str, array: Array, kind: str) -> memoryview:
    import numpy as np

    # Beyond 65504 a float16 is infinity without a word.
    if kind == "F16" and array.size and not float(np.abs(array).max()) <= float(np.finfo(np.float16).max):
        raise BundleError(f"tensor {name!r} holds a weight that f16 can't; build with dtype f32 or bf16")
    stored = narrow_bf16(array).astype("<u2") if kind == "BF16" else np.ascontiguousarray(array, NUMPY_NAMES[kind])
    return stored.reshape(-1).view(np.uint8).data if stored.size else memoryview(b"")


class MappedTensors(Mapping[str, "Array"]):
    """Tensors of one or several files under canonical names, each read only when asked for.

    ``skipped``: how many first rows of a tensor are left out. ``zeros``: shapes of float32 tensors that no file holds.
    """

    def __init__(
        self,
        places: Mapping[str, tuple[SafetensorsFile, str]],
        *,
        skipped: Mapping[str, int] | None = None,
        zeros: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._places = dict(places)
        self._skipped = dict(skipped or {})
        self._zeros = dict(zeros or {})

    def __getitem__(self, name: str) -> Array:
        import numpy as np

        if name in self._zeros:
            return np.zeros(self._zeros[name], np.float32)
        file, stored = self._places[name]
        return file.array(stored)[self._skipped.get(name, 0) :]

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from self._zeros

    def __len__(self) -> int:
        return len(self._places) + len(self._zeros)

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._zeros

    @property
    def files(self) -> list[SafetensorsFile]:
        """The files that hold them, by path."""
        return sorted({id(file): file for file, _ in self._places.values()}.values(), key=lambda file: str(file.path))

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and place without touching the data; zeros have the dtype of their neighbours."""
        if name in self._zeros:
            return TensorInfo(name, self.info(next(iter(self._places))).dtype, self._zeros[name], 0, 0)
        file, stored = self._places[name]
        info = file.header.tensors[stored]
        if not (rows := self._skipped.get(name, 0)):
            return info
        begin = info.begin + rows * (info.nbytes // info.shape[0])
        return replace(info, shape=(info.shape[0] - rows, *info.shape[1:]), begin=begin)
