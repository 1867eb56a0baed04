"""Unpacking: each attack on its own, and that nothing lands outside."""

from __future__ import annotations

import contextlib
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.bundle.archive import ArchiveError, Limits, unpack


def make(entries: list[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    def check(data: bytes, **options: object) -> str:
        source, out = tmp_path / "a.zip", tmp_path / "out"
        source.write_bytes(data)
        out.mkdir()
        with pytest.raises(ArchiveError) as caught:
            unpack(source, out, **options)  # type: ignore[arg-type]
        assert {path.name for path in tmp_path.iterdir()} == {"a.zip", "out"}
        return str(caught.value)

    return check


def test_files_and_folders_come_out_as_they_went_in(tmp_path: Path) -> None:
    source, out = tmp_path / "a.whl", tmp_path / "out"
    source.write_bytes(make([("p/", b""), ("p/a.txt", b"one"), ("p/q/b.bin", bytes(3_000_000)), ("empty", b"")]))
    out.mkdir()
    seen: list[tuple[int, int]] = []
    written = unpack(source, out, limits=Limits(ratio=5000), progress=lambda done, total: seen.append((done, total)))
    assert [path.relative_to(out).as_posix() for path in written] == ["p/a.txt", "p/q/b.bin", "empty"]
    assert (out / "p/q/b.bin").read_bytes() == bytes(3_000_000)
    assert seen[-1] == (3_000_003, 3_000_003)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_only_what_is_wanted_is_written_and_it_must_be_there(tmp_path: Path) -> None:
    source, out = tmp_path / "a.zip", tmp_path / "out"
    source.write_bytes(make([("a", b"1"), ("b", b"2")]))
    out.mkdir()
    assert unpack(source, out, wanted={"b"}) == [out / "b"]
    assert sorted(path.name for path in out.iterdir()) == ["b"]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ArchiveError, match="holds no 'c'"):
        unpack(source, other, wanted={"a", "c"})


def test_an_unwanted_bad_entry_still_refuses_the_whole_archive(refused: Callable[..., str]) -> None:
    assert "leaves its folder" in refused(make([("good", b"1"), ("../evil", b"2")]), wanted={"good"})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/etc/cron.d/x", "plain relative path"),
        ("//host/share", "plain relative path"),
        ("C:/windows/x", "plain relative path"),
        ("C:x", "plain relative path"),
        ("a\\..\\..\\x", "plain relative path"),
        ("../x", "leaves its folder"),
        ("a/../../x", "leaves its folder"),
        ("a/..", "leaves its folder"),
        ("./x", "empty part"),
        ("a//b", "empty part"),
        ("a/./b", "empty part"),
        ("a\nb", "control characters"),
        ("a\x1bb", "control characters"),
        ("/", "name|part|path"),
        ("d/" * 40 + "x", "too long or too deep"),
        ("x" * 600, "too long or too deep"),
    ],
)
def test_a_path_that_is_not_plain(refused: Callable[..., str], name: str, why: str) -> None:
    info = zipfile.ZipInfo("placeholder")
    info.filename = info.orig_filename = name
    message = refused(make([(info, b"x")]))
    assert any(part in message for part in why.split("|")), message


def test_a_name_with_a_zero_byte(refused: Callable[..., str]) -> None:
    assert "control characters" in refused(make([("good__evil", b"x")]).replace(b"good__evil", b"good\0_evil"))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_links_and_devices(refused: Callable[..., str], kind: int) -> None:
    info = zipfile.ZipInfo("link")
    info.create_system = 3
    info.external_attr = (kind | 0o777) << 16
    assert "special file" in refused(make([(info, b"/etc/passwd")]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("one", "two", "why"),
    [
        ("a", "a", "twice"),
        ("a/b", "a/B", "twice"),
        ("straße", "STRASSE", "twice"),
        ("\u00e9", "e\u0301", "twice"),
        ("a", "a/b", "inside a file"),
        ("a/b", "a", "twice"),
        ("a/", "a", "twice"),
        ("a", "a/", "a file and a folder"),
        ("A", "a/b", "inside a file"),
    ],
)
def test_two_entries_for_one_place(refused: Callable[..., str], one: str, two: str, why: str) -> None:
    assert why in refused(make([(one, b"" if one.endswith("/") else b"1"), (two, b"" if two.endswith("/") else b"2")]))


def test_too_many_entries(refused: Callable[..., str]) -> None:
    data = make([(f"f{n}", b"") for n in range(11)])
    assert "at most 10" in refused(data, limits=Limits(entries=10))


def test_more_entries_than_the_end_record_claims(refused: Callable[..., str]) -> None:
    data = bytearray(make([(f"f{n}", b"") for n in range(20)]))
    end = data.rfind(b"PK\x05\x06")
    data[end + 8 : end + 12] = struct.pack("<HH", 1, 1)
    assert "at most 10" in refused(bytes(data), limits=Limits(entries=10))


def test_a_zip64_directory(refused: Callable[..., str]) -> None:
    data = bytearray(make([("a", b"1")]))
    end = data.rfind(b"PK\x05\x06")
    forged = data[:end] + b"PK\x06\x07" + bytes(16) + data[end:]
    assert "zip64" in refused(bytes(forged))


def test_an_entry_count_of_all_ones(refused: Callable[..., str]) -> None:
    data = bytearray(make([("a", b"1")]))
    end = data.rfind(b"PK\x05\x06")
    data[end + 8 : end + 12] = b"\xff\xff\xff\xff"
    assert "zip64" in refused(bytes(data))


def test_too_many_bytes(refused: Callable[..., str]) -> None:
    data = make([("a", bytes(600)), ("b", bytes(600))], zipfile.ZIP_STORED)
    assert "more than 1000 bytes" in refused(data, limits=Limits(total_bytes=1000))


def test_an_entry_that_is_too_large(refused: Callable[..., str]) -> None:
    assert "at most 1000" in refused(make([("a", bytes(1001))]), limits=Limits(entry_bytes=1000))


def test_a_compression_bomb(refused: Callable[..., str]) -> None:
    assert "bomb" in refused(make([("zeros", bytes(20_000_000))]))


def test_an_entry_longer_than_its_directory_says(tmp_path: Path) -> None:
    """The declared size is only a claim: here 10 bytes are declared and 5,000,000 would come out."""
    content = bytes(5_000_000)
    forged = bytearray(make([("liar", content)]))
    for mark, crc_at, size_at in ((b"PK\x03\x04", 14, 22), (b"PK\x01\x02", 16, 24)):
        at = forged.find(mark)
        forged[at + crc_at : at + crc_at + 4] = struct.pack("<I", zlib.crc32(content[:10]))
        forged[at + size_at : at + size_at + 4] = struct.pack("<I", 10)
    source, out = tmp_path / "a.zip", tmp_path / "out"
    source.write_bytes(bytes(forged))
    out.mkdir()
    with contextlib.suppress(ArchiveError):
        unpack(source, out)
    assert sum(path.stat().st_size for path in out.rglob("*")) <= 10


def test_a_truncated_stream_and_a_wrong_checksum(refused: Callable[..., str], tmp_path: Path) -> None:
    data = bytearray(make([("a", b"hello world" * 100)], zipfile.ZIP_STORED))
    data[60] ^= 0xFF
    assert "a.zip" in refused(bytes(data))


def test_an_encrypted_entry(refused: Callable[..., str]) -> None:
    data = bytearray(make([("a", b"1")]))
    for mark, flags_at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(mark) + flags_at] |= 1
    assert "encrypted" in refused(bytes(data))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_unusual_compression(refused: Callable[..., str], method: int) -> None:
    assert "compression method" in refused(make([("a", b"1")], method))


@pytest.mark.parametrize("data", [b"", b"PK", b"not a zip file at all" * 10, b"PK\x05\x06" + b"\0" * 10])
def test_no_zip_file(refused: Callable[..., str], data: bytes) -> None:
    assert "zip" in refused(data)


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    """Every single flipped byte ends in ArchiveError or in the original content: no other exception, no stray file."""
    content = b"payload " * 40
    whole = make([("a/b", content), ("c", b"x" * 50)])
    source = tmp_path / "a.zip"
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 0x41
        source.write_bytes(bytes(data))
        out = tmp_path / f"out{at}"
        out.mkdir()
        try:
            written = unpack(source, out)
        except ArchiveError:
            continue
        for path in written:
            assert path.resolve().is_relative_to(out.resolve())
    assert {path.name.rstrip("0123456789") for path in tmp_path.iterdir()} == {"a.zip", "out"}


def test_the_target_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(make([("a", b"1")]))
    with pytest.raises(ArchiveError, match="not empty"):
        unpack(tmp_path / "a.zip", tmp_path)
