"""The safetensors format: parser bounds, mapped reading, bfloat16, deterministic writing."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engines.bundle.manifest import BundleError
from engines.checkpoint import safetensors
from engines.checkpoint.safetensors import SafetensorsFile, narrow_bf16, widen_bf16


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_write_then_read_gives_the_same_arrays(tmp_path: Path) -> None:
    tensors = {
        "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a.bias": np.array([0.5, -1], np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.0, np.float32),
    }
    seen: list[tuple[int, int]] = []
    size = safetensors.write(
        tmp_path / "x", tensors, metadata={"profile": "p"}, progress=lambda done, total: seen.append((done, total))
    )
    assert size == (tmp_path / "x").stat().st_size
    assert seen[-1] == (32, 32)
    file = SafetensorsFile.open(tmp_path / "x")
    assert file.header.metadata == {"profile": "p"}
    assert list(file.header.tensors) == ["a.bias", "b.weight", "empty", "scalar"]
    for name, array in tensors.items():
        read = file.array(name)
        assert read.shape == array.shape
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def test_the_same_input_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    tensors = {"b": np.ones(3, np.float32), "a": np.zeros(2, np.float32)}
    safetensors.write(tmp_path / "one", tensors, metadata={"y": "2", "x": "1"})
    safetensors.write(tmp_path / "two", dict(reversed(tensors.items())), metadata={"x": "1", "y": "2"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_an_open_descriptor_is_what_is_mapped_and_stays_open(tmp_path: Path) -> None:
    place, other = tmp_path / "x", tmp_path / "y"
    safetensors.write(place, {"w": np.arange(4, dtype=np.float32)})
    safetensors.write(other, {"w": np.zeros(4, np.float32)})
    fd = os.open(place, os.O_RDONLY)
    try:
        other.replace(place)
        array = SafetensorsFile.open(place, fd=fd).array("w")
        os.fstat(fd)
    finally:
        os.close(fd)
    np.testing.assert_array_equal(array, [0, 1, 2, 3])
    assert not array.flags.owndata, "a view, and it outlives file and descriptor"
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_bfloat16_keeps_its_values(tmp_path: Path) -> None:
    values = np.array([1.0, -0.0, 3.140625, 1e38, 1e-40, np.inf, -np.inf, np.nan], np.float32)
    safetensors.write(tmp_path / "x", {"w": values}, dtype="BF16")
    read = SafetensorsFile.open(tmp_path / "x").array("w")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(narrow_bf16(read), narrow_bf16(values))
    assert np.isnan(read[-1])
    assert read[2] == np.float32(3.140625)


@given(arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=True)))
def test_bfloat16_rounds_to_nearest_even(values: np.ndarray) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(widen_bf16(narrow_bf16(values)), expected)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "too few"),
        (b"12345678", "too few"),
        (struct.pack("<Q", 2**63) + b"{}", "can't be"),
        (struct.pack("<Q", 100) + b"{}", "can't be"),
        (struct.pack("<Q", 0) + b"{}", "can't be"),
        (raw(b"no json"), "not valid JSON"),
        (raw(b"[1, 2]"), "not a JSON object"),
        (raw(b'{"t":1,"t":2}'), "'t' occurs twice"),
        (raw({"__metadata__": {"a": 1}}), "strings to strings"),
        (raw({"__metadata__": []}), "strings to strings"),
        (raw({"t": 1}), "'t': Expected `object`"),
        (raw({"t": {"dtype": "F32", "shape": [2]}}), "missing required field `data_offsets`"),
        (raw(one(shape=[-2]), bytes(8)), "shape"),
        (raw(one(shape=[2.0]), bytes(8)), "shape"),
        (raw(one(shape=[True, 2]), bytes(8)), "shape"),
        (raw(one(shape=2), bytes(8)), "shape"),
        (raw(one(shape=[1] * 9), bytes(8)), "shape"),
        (raw(one(shape=[2**62, 2**62, 2**62])), "needs"),
        (raw(one(dtype="F33"), bytes(8)), "dtype"),
        (raw(one(dtype=[]), bytes(8)), "dtype"),
        (raw({"t" * 9000: 1}), "tensor 't{80}':"),
        (raw(("{" + "".join(f'"{n}":1,' for n in range(70_000)) + '"69999":2}').encode()), "'69999' occurs twice"),
        (raw(one(shape=[3]), bytes(8)), "needs 12 bytes"),
        (raw(one(data_offsets=[0, 8, 9]), bytes(8)), "data_offsets"),
        (raw(one(data_offsets=[8, 0]), bytes(8)), "needs"),
        (raw(one(), bytes(7)), "end at byte"),
        (raw(one(), bytes(9)), "end at byte"),
        (raw(one(data_offsets=[4, 12]), bytes(12)), "starts at byte"),
        (raw({**one(), **{"u": one()["t"]}}, bytes(8)), "starts at byte"),
        (raw(b'{"t":' * 100_000 + b"1" + b"}" * 100_000), "not valid JSON|Expected"),
    ],
)
def test_a_damaged_header_is_refused_by_name(tmp_path: Path, data: bytes, part: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(BundleError, match=part) as caught:
        SafetensorsFile.open(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


@given(at=st.integers(0, 400), value=st.integers(0, 255))
def test_no_single_byte_leads_to_another_exception(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    safetensors.write(folder / "x", {"w": np.zeros((2, 3), np.float32), "v": np.zeros(5, np.float16)})
    data = bytearray((folder / "x").read_bytes())
    data[at % len(data)] = value
    (folder / "y").write_bytes(data)
    try:
        file = SafetensorsFile.open(folder / "y")
        for name in file.header.tensors:
            file.array(name)
    except BundleError:
        pass


@pytest.mark.timeout(20)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    paths = [tmp_path, tmp_path / "nowhere"]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        paths.append(tmp_path / "fifo")
    for path in paths:
        with pytest.raises(BundleError):
            SafetensorsFile.open(path)


def test_a_dtype_nobody_writes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="complex"):
        safetensors.write(tmp_path / "x", {"w": np.zeros(2, np.complex64)})
    (tmp_path / "b").write_bytes(raw(one(dtype="BOOL", shape=[8]), bytes(8)))
    with pytest.raises(BundleError, match="BOOL"):
        SafetensorsFile.open(tmp_path / "b").array("t")
