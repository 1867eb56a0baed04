"""File and tree digests."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.bundle import digest
from engines.bundle.manifest import BundleError


def plant(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def test_a_file_is_hashed_in_blocks_and_every_block_is_progress(tmp_path: Path) -> None:
    data = os.urandom(2 * digest.BLOCK + 5)
    file = tmp_path / "f"
    file.write_bytes(data)
    seen: list[tuple[int, int]] = []
    assert digest.file_digest(file, lambda done, total: seen.append((done, total))) == hashlib.sha256(data).hexdigest()
    assert seen == [(digest.BLOCK, len(data)), (2 * digest.BLOCK, len(data)), (len(data), len(data))]
    with file.open("rb", buffering=0) as handle:
        handle.seek(4)
        assert digest.file_digest(handle) == hashlib.sha256(data[4:]).hexdigest(), "an open file from where it stands"
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


trees = st.dictionaries(st.text("ab", min_size=1, max_size=3), st.binary(max_size=6), max_size=4)


@example(one={"a": b"Xb\0Y"}, two={"a": b"X", "b": b"Y"})  # of which the compatible digest is the same
@given(one=trees, two=trees)
def test_the_injective_digest_is_equal_for_equal_trees_only(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, bytes], two: dict[str, bytes]
) -> None:
    digests = []
    for tree in (one, two):
        root = tmp_path_factory.mktemp("tree")
        digests.append(digest.tree_digest(plant(root, tree)).injective)
    assert (digests[0] == digests[1]) == (one == two)


def _socket(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "s"))


def _alien(root: Path) -> None:
    os.close(os.open(os.fsencode(root) + b"/\xff", os.O_CREAT | os.O_WRONLY))


@pytest.mark.parametrize(
    ("plant_it", "words"),
    [
        (lambda root: (root / "link").symlink_to("nowhere"), "symbolic link"),
        (lambda root: (root / "link").symlink_to(root / "a"), "symbolic link"),
        (lambda root: os.mkfifo(root / "pipe"), "special file"),
        (_socket, "special file"),
        (_alien, "not UTF-8"),
        (lambda root: (root / "a" / "b").rmdir(), ""),
        (lambda root: plant(root, {"x": b"", "y": b"", "z": b""}), "more than 2 files"),
    ],
)
def test_a_tree_holds_plain_files_and_folders_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant_it: Callable[[Path], object], words: str
) -> None:
    monkeypatch.setattr(digest, "MAX_FILES", 2)
    (tmp_path / "a" / "b").mkdir(parents=True)
    plant_it(tmp_path)
    if words:
        with pytest.raises(BundleError, match=words):
            digest.tree_digest(tmp_path)
    else:
        assert digest.tree_digest(tmp_path).files == 0
    with pytest.raises(BundleError, match="nowhere"):
        digest.tree_digest(tmp_path / "nowhere")


def test_a_file_that_grows_meanwhile_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"1")

    def grow(done: int, total: int) -> None:
        if total == 1 and done == 1:
            with file.open("ab") as handle:
                handle.write(b"2")

    with pytest.raises(BundleError, match="changed while"):
        digest.tree_digest(tmp_path, grow)
