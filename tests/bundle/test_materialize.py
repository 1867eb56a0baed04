"""Zipped Core ML models: unpacked once to a stable path, and every way to get something else there."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.bundle import archive, materialize, preparation
from engines.bundle.digest import file_digest, tree_digest
from engines.bundle.manifest import BundleError

ROOT = Path(__file__).parents[2]
COMPILED = {"m.mlmodelc/model.mil": b"program", "m.mlmodelc/weights/weight.bin": b"w" * 5000, "readme.txt": b"hello"}
PACKAGE = {
    "x.mlpackage/Manifest.json": b"{}",
    "x.mlpackage/Data/com.apple.CoreML/model.mlmodel": b"spec",
    "x.mlpackage/Data/com.apple.CoreML/weights/weight.bin": b"w" * 100,
}


def zipped(path: Path, files: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in files.items():
            out.writestr(name, data)
    return f"sha256:{file_digest(path)}"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Path, str, Path]]:
    """Return (archive, its digest, the cache) for some files."""

    def call(files: dict[str, bytes] | None = None) -> tuple[Path, str, Path]:
        source = tmp_path / "model.zip"
        return source, zipped(source, COMPILED if files is None else files), tmp_path / "cache"

    return call


Make = Callable[..., tuple[Path, str, Path]]


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "ane-coreml").iterdir()) if (cache / "ane-coreml").exists() else []


def test_an_archive_is_unpacked_once_to_a_stable_path_with_its_record(make: Make) -> None:
    source, digest, cache = make()
    seen: list[tuple[int, int]] = []
    first = materialize.materialize(source, digest, cache, progress=lambda done, total: seen.append((done, total)))
    folder = preparation.folder(cache, digest)
    assert first == folder / "tree" / "m.mlmodelc" and first.joinpath("model.mil").read_bytes() == b"program"
    record = json.loads((folder / "materialization.json").read_bytes())
    assert record == {
        "format": "synapse-ane-coreml-materialization-v1",
        "source_digest": digest,
        "model_relative_path": "tree/m.mlmodelc",
        "materialized_digest": f"sha256:{tree_digest(first).compatible}",
    }
    assert seen and all(done <= total for done, total in seen)
    before = (folder / "tree").stat().st_ctime_ns
    source.unlink()  # the second time nothing is read from it
    assert materialize.materialize(source, digest.upper().replace("SHA256", "sha256"), cache) == first
    assert (folder / "tree").stat().st_ctime_ns == before and left(cache) == [folder.name]
    if os.name == "posix":
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_package_s_root_is_the_package(make: Make) -> None:
    source, digest, cache = make(PACKAGE)
    assert materialize.materialize(source, digest, cache).name == "x.mlpackage"


def test_the_first_model_by_sorted_path_is_taken(make: Make) -> None:
    files = {"b/model.mil": b"2", "a.mlmodelc/model.mil": b"1", "a.mlmodelc/inner/model.mil": b"0"}
    source, digest, cache = make(files)
    assert materialize.materialize(source, digest, cache).name == "a.mlmodelc"


def test_a_folder_passes_through_untouched(tmp_path: Path) -> None:
    folder = tmp_path / "m.mlmodelc"
    folder.mkdir()
    (folder / "model.mil").write_bytes(b"program")
    digest = f"sha256:{tree_digest(folder).compatible}"
    assert materialize.materialize(folder, digest, tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()
    with pytest.raises(BundleError, match="expected"):
        materialize.materialize(folder, "sha256:" + "0" * 64, tmp_path / "cache")


# --- what must not get in --------------------------------------------------------------------------------------------


def test_a_wrong_digest_is_refused_before_anything_is_unpacked(make: Make) -> None:
    source, _, cache = make()
    for digest in ("sha256:" + "0" * 64, "", "sha256:../../evil", "sha256:" + "g" * 64):
        with pytest.raises(BundleError):
            materialize.materialize(source, digest, cache)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["/etc/evil", "../evil", "a/../../evil", "a\\evil", "C:evil", "m.mlmodelc//x"])
def test_paths_that_leave_are_refused_and_nothing_stays(name: str, make: Make, tmp_path: Path) -> None:
    source, digest, cache = make({**COMPILED, name: b"evil"})
    with pytest.raises(archive.ArchiveError):
        materialize.materialize(source, digest, cache)
    assert left(cache) == [] and not list(tmp_path.rglob("evil"))


def test_a_symbolic_link_is_refused(make: Make, tmp_path: Path) -> None:
    source, _, cache = make()
    with zipfile.ZipFile(source, "a") as out:
        link = zipfile.ZipInfo("m.mlmodelc/link")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        out.writestr(link, "/etc/passwd")
    with pytest.raises(archive.ArchiveError, match="symbolic link"):
        materialize.materialize(source, f"sha256:{file_digest(source)}", cache)
    assert left(cache) == []


def test_two_entries_of_one_path_are_refused(make: Make) -> None:
    source, digest, cache = make({"m.mlmodelc/model.mil": b"1", "M.mlmodelc/MODEL.mil": b"2"})
    with pytest.raises(archive.ArchiveError, match="twice"):
        materialize.materialize(source, digest, cache)


@pytest.mark.parametrize(
    "limits",
    [archive.Limits(entries=2), archive.Limits(total_bytes=5000), archive.Limits(entry_bytes=4999)],
)
def test_limits_of_count_and_size_hold(limits: archive.Limits, make: Make) -> None:
    source, digest, cache = make()
    with pytest.raises(archive.ArchiveError):
        materialize.materialize(source, digest, cache, limits=limits)
    assert left(cache) == []


def test_a_bomb_is_refused(make: Make) -> None:
    source, digest, cache = make({"m.mlmodelc/model.mil": bytes(8 * 1024 * 1024)})
    with pytest.raises(archive.ArchiveError, match="bomb"):
        materialize.materialize(source, digest, cache)
    assert left(cache) == []


def test_a_bomb_that_lies_about_its_size_writes_no_more_than_it_says(make: Make) -> None:
    source, _, cache = make({"m.mlmodelc/model.mil": bytes(8 * 1024 * 1024)})
    data = bytearray(source.read_bytes())
    at = data.rfind(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 24, 10)
    source.write_bytes(data)
    with pytest.raises(archive.ArchiveError):
        materialize.materialize(source, f"sha256:{file_digest(source)}", cache)
    assert left(cache) == []


@pytest.mark.parametrize("files", [{"readme.txt": b"no model"}, {}])
def test_an_archive_without_a_model_is_refused(files: dict[str, bytes], make: Make) -> None:
    source, digest, cache = make(files)
    with pytest.raises(BundleError):
        materialize.materialize(source, digest, cache)
    assert left(cache) == []


def test_a_truncated_archive_is_refused(make: Make) -> None:
    source, _, cache = make()
    source.write_bytes(source.read_bytes()[:-30])
    with pytest.raises(BundleError):
        materialize.materialize(source, f"sha256:{file_digest(source)}", cache)
    assert left(cache) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "another"}, "remove"),
        ({"extra": 1}, "extra"),
        ({"model_relative_path": "../../../etc"}, "record"),
        ({"model_relative_path": "/etc"}, "record"),
        ({"model_relative_path": "tree/./m.mlmodelc"}, "record"),
        ({"model_relative_path": "tree//m.mlmodelc"}, "record"),
        ({"model_relative_path": ""}, "record"),
        ({"source_digest": "sha256:" + "1" * 64}, "made from"),
        ({"materialized_digest": "sha256:" + "2" * 64}, "changed"),
    ],
)
def test_a_record_that_was_touched_is_refused(change: dict[str, object], why: str, make: Make) -> None:
    source, digest, cache = make()
    materialize.materialize(source, digest, cache)
    file = preparation.folder(cache, digest) / "materialization.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **change}))
    with pytest.raises(BundleError, match=why):
        materialize.materialize(source, digest, cache)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"x" * (64 * 1024 + 1)])
def test_a_record_that_is_none_is_refused(data: bytes, make: Make) -> None:
    source, digest, cache = make()
    materialize.materialize(source, digest, cache)
    (preparation.folder(cache, digest) / "materialization.json").write_bytes(data)
    with pytest.raises(BundleError):
        materialize.materialize(source, digest, cache)


@pytest.mark.parametrize("attack", ["byte", "file", "link", "gone", "folder link"])
def test_a_tree_that_was_touched_is_refused(attack: str, make: Make, tmp_path: Path) -> None:
    source, digest, cache = make()
    model = materialize.materialize(source, digest, cache)
    if attack == "byte":
        (model / "model.mil").write_bytes(b"Program")
    elif attack == "file":
        (model / "more").write_bytes(b"")
    elif attack == "link":
        (model / "link").symlink_to("/etc/passwd")
    else:
        moved = tmp_path / "elsewhere"
        shutil.move(model, moved)
        if attack == "folder link":
            model.symlink_to(moved)
    with pytest.raises(BundleError):
        materialize.materialize(source, digest, cache)


# --- together and after a crash --------------------------------------------------------------------------------------


def test_losing_the_race_adopts_the_winner(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, digest, cache = make()
    unpack = archive.unpack
    winner: list[Path] = []

    def slow(*args: object, **kwargs: object) -> object:
        result = unpack(*args, **kwargs)  # type: ignore[arg-type]
        if not winner:
            winner.append(Path())
            winner[0] = materialize.materialize(source, digest, cache)
        return result

    monkeypatch.setattr(archive, "unpack", slow)
    assert materialize.materialize(source, digest, cache) == winner[0]
    assert left(cache) == [preparation.folder(cache, digest).name], "the loser's folder is gone"


@pytest.mark.process
def test_processes_that_race_agree(make: Make) -> None:
    source, digest, cache = make({**COMPILED, **{f"m.mlmodelc/f{n}": b"x" * 1000 for n in range(200)}})
    code = (
        "import sys; from pathlib import Path; from engines.bundle import materialize\n"
        "print(materialize.materialize(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))"
    )
    argv = [sys.executable, "-c", code, str(source), digest, str(cache)]
    racers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    found = {racer.communicate()[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len(found) == 1 and left(cache) == [preparation.folder(cache, digest).name]


def test_what_a_crash_left_is_swept_after_a_day_and_nothing_else(make: Make) -> None:
    source, digest, cache = make()
    home = cache / "ane-coreml"
    home.mkdir(parents=True)
    old, young, done = home / ".abc.1.tmp", home / ".abc.2.tmp", home / ("f" * 64)
    for folder in (old, young, done):
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
    day = time.time() - 24 * 3600 - 60
    for folder in (old, done):
        os.utime(folder, (day, day))
    materialize.materialize(source, digest, cache)
    assert not old.exists() and young.exists() and done.exists(), "completed trees live as long as their source"


def test_a_crash_in_the_middle_leaves_nothing_that_counts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, digest, cache = make()

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(materialize, "tree_digest", die)
    with pytest.raises(KeyboardInterrupt):
        materialize.materialize(source, digest, cache)
    monkeypatch.undo()
    assert left(cache) == [] and materialize.materialize(source, digest, cache).is_dir()
