"""File and tree digests."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import digest
from engines.bundle.manifest import BundleError


def plant(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO")
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_file_that_is_no_plain_one_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "f"
    if kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero")
    with pytest.raises(BundleError, match="not a plain file"):
        digest.file_digest(place)


def test_a_file_is_hashed_in_blocks_and_every_block_is_progress(tmp_path: Path) -> None:
    data = os.urandom(2 * digest.BLOCK + 5)
    file = tmp_path / "f"
    file.write_bytes(data)
    seen: list[tuple[int, int]] = []
    assert digest.file_digest(file, lambda done, total: seen.append((done, total))) == hashlib.sha256(data).hexdigest()
    assert seen == [(digest.BLOCK, len(data)), (2 * digest.BLOCK, len(data)), (len(data), len(data))]


def test_an_open_file_is_hashed_from_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"headtail")
    with file.open("rb", buffering=0) as handle:
        handle.seek(4)
        assert digest.file_digest(handle) == hashlib.sha256(b"tail").hexdigest()


def test_a_missing_file_is_a_bundle_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nothere"):
        digest.file_digest(tmp_path / "nothere")


def test_verify_takes_a_prefix_and_any_case_but_no_empty_digest(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x")
    right = hashlib.sha256(b"x").hexdigest()
    for stated in (right, "sha256:" + right, "SHA256:" + right.upper()):
        digest.verify_file(file, stated)
    for stated in ("", "sha256:", "0" * 64, right[:-1]):
        with pytest.raises(BundleError, match="expected"):
            digest.verify_file(file, stated)


def test_the_compatible_stream_is_path_zero_content_sorted_by_path_bytes(tmp_path: Path) -> None:
    files = {"weights/weight.bin": b"W", "weights.x": b"dot", ".hidden": b"h", "Data/é": b"", "a/b/c": b"deep"}
    plant(tmp_path, files)
    stream = b"".join(name + b"\0" + data for name, data in sorted((n.encode(), d) for n, d in files.items()))
    found = digest.tree_digest(tmp_path)
    assert found.compatible == hashlib.sha256(stream).hexdigest()
    assert (found.files, found.nbytes) == (5, sum(map(len, files.values())))
    # As strings `weights.x` comes first; as path components it would be the other way round.
    assert stream.index(b"weights.x\0") < stream.index(b"weights/weight.bin\0")


def test_the_compatible_digest_is_not_injective_and_ours_is(tmp_path: Path) -> None:
    one = digest.tree_digest(plant(tmp_path / "one", {"a": b"Xb\0Y"}))
    two = digest.tree_digest(plant(tmp_path / "two", {"a": b"X", "b": b"Y"}))
    assert one.compatible == two.compatible
    assert one.injective != two.injective


trees = st.dictionaries(st.text("ab", min_size=1, max_size=3), st.binary(max_size=6), max_size=4)


@given(one=trees, two=trees)
def test_the_injective_digest_is_equal_for_equal_trees_only(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, bytes], two: dict[str, bytes]
) -> None:
    digests = []
    for tree in (one, two):
        root = tmp_path_factory.mktemp("tree")
        digests.append(digest.tree_digest(plant(root, tree)).injective)
    assert (digests[0] == digests[1]) == (one == two)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_symlinks_are_refused(tmp_path: Path, kind: str) -> None:
    root = plant(tmp_path / "root", {"a": b"1", "d/x": b"2"})
    (root / "link").symlink_to({"file": "a", "folder": "d", "dangling": "nowhere"}[kind])
    with pytest.raises(BundleError, match="symbolic link"):
        digest.tree_digest(root)


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BundleError, match="special file"):
        digest.tree_digest(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(BundleError, match="special file"):
            digest.tree_digest(tmp_path)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff", "wb"):  # noqa: PTH123
        pass
    with pytest.raises(BundleError, match="not UTF-8"):
        digest.tree_digest(tmp_path)


def test_a_file_that_grows_meanwhile_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"1")

    def grow(done: int, total: int) -> None:
        if total == 1 and done == 1:
            with file.open("ab") as handle:
                handle.write(b"2")

    with pytest.raises(BundleError, match="changed while"):
        digest.tree_digest(tmp_path, grow)


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "MAX_FILES", 2)
    plant(tmp_path, {"a": b"", "b": b"", "c": b""})
    with pytest.raises(BundleError, match="more than 2 files"):
        digest.tree_digest(tmp_path)


def test_a_root_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere"):
        digest.tree_digest(tmp_path / "nowhere")
