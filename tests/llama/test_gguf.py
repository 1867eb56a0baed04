"""The header parser: facts of sound files, reasons for broken ones, and never anything but artifact_invalid."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.llama import gguf
from engines.protocol.errors import EngineError, ErrorCode

STRING, ARRAY, U32, U64, F32, BOOL = 8, 9, 4, 10, 6, 7


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    )


ARCHITECTURE = pair("general.architecture", STRING, text("bert"))


def head(pairs: list[bytes], tensors: list[bytes], *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)


def sound(*, version: int = 3) -> bytes:
    """A whole small file: 4 x 6 embedding, position table 4 x 5, the ids, a kept and a skipped array."""
    pairs = [
        ARCHITECTURE,
        number("bert.context_length", 5),
        number("bert.pooling_type", 1),
        pair("bert.block_count", U64, struct.pack("<Q", 2)),
        number("tokenizer.ggml.bos_token_id", 2),
        number("tokenizer.ggml.seperator_token_id", 3),
        number("tokenizer.ggml.eos_token_id", 9),
        pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 6) + b"".join(text(c) for c in "abcdef")),
        pair("some.numbers", ARRAY, struct.pack("<IQ3f", F32, 3, 1.0, 2.0, 3.0)),
        pair("some.flag", BOOL, b"\x01"),
        pair("bert.attention.layer_norm_epsilon", F32, struct.pack("<f", 1e-12)),
    ]
    tensors = [tensor("token_embd.weight", (4, 6)), tensor("position_embd.weight", (4, 5), offset=96)]
    data = head(pairs, tensors, version=version)
    return data + bytes(-len(data) % 32) + bytes(96 + 80)


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[bytes], gguf.Header]:
    path = tmp_path / "m.gguf"

    def call(data: bytes) -> gguf.Header:
        path.write_bytes(data)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return gguf.read_header(descriptor)
        finally:
            os.close(descriptor)

    return call


Parse = Callable[[bytes], gguf.Header]


@pytest.mark.parametrize("version", [2, 3])
def test_facts_of_a_sound_file(parse: Parse, version: int) -> None:
    data = sound(version=version)
    header = parse(data)
    assert (header.architecture, header.context_length, header.pooling_type) == ("bert", 5, 1)
    assert (header.embedding_rows, header.position_rows, header.vocab_size) == (6, 5, 6)
    assert header.special == gguf.SpecialIds(bos=2, sep=3, eos=None), "an id beyond the vocabulary is none"
    assert header.metadata["some.numbers"] == gguf.Array(3, (1.0, 2.0, 3.0))
    assert header.metadata["some.flag"] is True
    assert header.tensors["position_embd.weight"].offset == 96
    assert header.tensor_bytes == 176
    assert not header.has_rank_head and header.token_type_vocab_offset is None
    assert parse(head([*QWEN3, number("qwen3.rope.dimension_count", 16)], [])).vocab_size is None


def test_a_number_of_every_kind_is_read(parse: Parse) -> None:
    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    header = parse(head([ARCHITECTURE, *(pair(f"k{n}", n, struct.pack(f"<{c}", 7)) for n, c in kinds.items())], []))
    assert {header.metadata[f"k{n}"] for n in kinds} == {7}


def test_truncation_at_every_byte_is_artifact_invalid(parse: Parse) -> None:
    data = sound()
    for length in range(len(data)):
        with pytest.raises(EngineError) as caught:
            parse(data[:length])
        assert caught.value.code is ErrorCode.ARTIFACT_INVALID
        assert "truncated" in caught.value.msg
    parse(data)


HUGE = 2**63
QWEN3 = [
    pair("general.architecture", STRING, text("qwen3")),
    number("qwen3.embedding_length", 64),
    number("qwen3.attention.head_count", 4),
]
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "magic": (head([ARCHITECTURE], [], magic=b"GGML"), "magic"),
    "version 1": (head([ARCHITECTURE], [], version=1), "version 1"),
    "version 4": (head([ARCHITECTURE], [], version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "claims"),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "claims"),
    "key length": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE), "claims"),
    "string length": (head([text("a") + struct.pack("<IQ", STRING, HUGE)], []), "claims"),
    "array count": (head([text("a") + struct.pack("<IIQ", ARRAY, U32, HUGE)], []), "claims"),
    "string in array": (head([text("a") + struct.pack("<IIQQ", ARRAY, STRING, 1, HUGE)], []), "claims"),
    "long array": (head([text("a") + struct.pack("<IIQ", ARRAY, U64, 2**23)], []), "truncated"),
    "nested array": (head([text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)], []), "unknown type 9"),
    "value type": (head([text("a") + struct.pack("<I", 77)], []), "unknown type 77"),
    "key twice": (head([ARCHITECTURE, ARCHITECTURE], []), "twice"),
    "key not UTF-8": (head([text(b"\xff\xfe") + struct.pack("<IB", 0, 1)], []), "UTF-8"),
    "no architecture": (head([], []), "general.architecture"),
    "architecture a number": (head([pair("general.architecture", U32, bytes(4))], []), "general.architecture"),
    "alignment 0": (head([ARCHITECTURE, pair("general.alignment", U32, bytes(4))], []), "alignment"),
    "alignment 48": (head([ARCHITECTURE, number("general.alignment", 48)], []), "alignment"),
    "no dimensions": (head([ARCHITECTURE], [tensor("t", ())]), "dimensions"),
    "five dimensions": (head([ARCHITECTURE], [tensor("t", (1, 1, 1, 1, 1))]), "dimensions"),
    "zero rows": (head([ARCHITECTURE], [tensor("t", (4, 0))]), "shape"),
    "overflowing shape": (head([ARCHITECTURE], [tensor("t", (2**40, 2**40))]), "shape"),
    "tensor type": (head([ARCHITECTURE], [tensor("t", (4,), kind=99)]), "the type 99"),
    **{
        f"weights in {name}": (head([ARCHITECTURE], [tensor("t", (4,), kind=kind)]) + bytes(64), f"the type {kind}, in")
        for kind, name in ((24, "i8"), (25, "i16"), (26, "i32"), (27, "i64"), (28, "f64"))
    },
    **{
        f"{key} {value}": (head([ARCHITECTURE, pair(f"bert.{key}", F32, struct.pack("<f", value))], []), key)
        for key, value in (
            ("attention.layer_norm_epsilon", math.nan),
            ("attention.layer_norm_epsilon", -1e-5),
            ("attention.layer_norm_rms_epsilon", math.inf),
            ("rope.freq_base", math.nan),
            ("rope.freq_base", -math.inf),
        )
    },
    "half a block": (head([ARCHITECTURE], [tensor("t", (33, 2), kind=8)]), "block"),
    "a norm in f16": (head([ARCHITECTURE], [tensor("t", (32,), kind=1)]), "stored in float32"),
    "a norm in q8_0": (head([ARCHITECTURE], [tensor("t", (32,), kind=8)]), "stored in float32"),
    **{
        f"rotated by {width}": (head([*QWEN3, number("qwen3.rope.dimension_count", width)], []), "a head has 16")
        for width in (0, 1, 8, 17, 2**32 - 1)
    },
    "offset": (head([ARCHITECTURE], [tensor("t", (4,), offset=8)]), "multiple"),
    "beyond the end": (head([ARCHITECTURE], [tensor("t", (4096,))]), "truncated"),
    "tensor twice": (head([ARCHITECTURE], [tensor("t", (1,)), tensor("t", (1,))]) + bytes(64), "twice"),
    "long tensor name": (head([ARCHITECTURE], [tensor("t" * 65, (1,))]), "claims"),
    **{
        f"{key} {value}": (head([ARCHITECTURE, number(f"bert.{key}", value)], []), key)
        for key, value in (("block_count", 0), ("block_count", 513), ("context_length", 0), ("context_length", 2**31))
    },
    "layers that are no number": (head([ARCHITECTURE, pair("bert.block_count", F32, bytes(4))], []), "block_count"),
    "one part of three": (head([ARCHITECTURE, pair("split.count", 2, struct.pack("<H", 3))], []), "3 parts"),
    "split without a vocabulary for it": (
        head([ARCHITECTURE, number(gguf.TOKEN_TYPE_KEY, 3)], [tensor("token_embd.weight", (1, 5))]) + bytes(64),
        "split",
    ),
    "split of a wrong type": (head([ARCHITECTURE, pair(gguf.TOKEN_TYPE_KEY, F32, bytes(4))], []), gguf.TOKEN_TYPE_KEY),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_say_why(parse: Parse, name: str) -> None:
    data, reason = BROKEN[name]
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        parse(data)
    assert caught.value.code is ErrorCode.ARTIFACT_INVALID
    assert reason in caught.value.msg
    assert time.monotonic() - started < 5, "a claimed count must not be worked through"


def test_a_long_vocabulary_is_counted_not_kept(parse: Parse) -> None:
    count = 200_000
    tokens = pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, count) + text("token") * count)
    scores = pair("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", F32, count) + bytes(4 * count))
    header = parse(head([ARCHITECTURE, tokens, scores], []))
    assert header.metadata["tokenizer.ggml.tokens"] == gguf.Array(count)
    assert header.metadata["tokenizer.ggml.scores"] == gguf.Array(count)
    assert header.token_count == count


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_do_more_than_refuse(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray(sound())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, 600)) % len(content)] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        header = gguf.read_header(descriptor)
    except EngineError as exc:
        assert exc.code is ErrorCode.ARTIFACT_INVALID
    else:
        _ = (header.special, header.vocab_size, header.has_rank_head, header.context_length)
    finally:
        os.close(descriptor)


@pytest.mark.llama
def test_block_sizes_are_those_of_the_gguf_package() -> None:
    package = pytest.importorskip("gguf")
    theirs = {int(kind): size for kind, size in package.GGML_QUANT_SIZES.items()}
    theirs.setdefault(42, (64, 18))  # Q2_0: llama.cpp has it (ggml-common.h, block_q2_0), released packages do not yet
    assert dict(gguf.BLOCKS) == {kind: theirs[kind] for kind in gguf.BLOCKS}
