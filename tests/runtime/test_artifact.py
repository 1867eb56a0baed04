"""The digest is verified on the descriptor that is loaded from, and what was written meanwhile is noticed."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from engines.bundle.digest import BLOCK
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Phase
from engines.runtime.artifact import ArtifactFile, open_artifact
from engines.runtime.progress import ProgressReporter, silent

CONTENT = random.Random(17).randbytes(BLOCK * 2 + 17)
HEX = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(CONTENT)
    return path


def open_verified(path: str | Path, digest: str = HEX, progress: ProgressReporter | None = None) -> ArtifactFile:
    file = open_artifact(path)
    try:
        file.verify(digest, progress or silent())
    except BaseException:
        file.close()
        raise
    return file


def refused(path: str | Path, digest: str) -> EngineError:
    with pytest.raises(EngineError) as caught:
        open_verified(path, digest)
    assert caught.value.code is ErrorCode.ARTIFACT_INVALID
    return caught.value


@pytest.mark.parametrize("digest", [HEX, f"sha256:{HEX}", HEX.upper(), f"sha256:{HEX.upper()}"])
def test_a_right_digest_returns_the_file_rewound(artifact: Path, digest: str) -> None:
    with open_verified(artifact, digest) as file:
        assert file.read() == CONTENT


@pytest.mark.parametrize("cut", [0, 1, BLOCK, len(CONTENT) - 1])
def test_a_wrong_digest_names_both(artifact: Path, cut: int) -> None:
    artifact.write_bytes(CONTENT[:cut])
    observed = hashlib.sha256(CONTENT[:cut]).hexdigest()
    assert refused(artifact, HEX).msg == f"digest mismatch: expected sha256:{HEX}, observed sha256:{observed}"


def test_what_is_no_readable_file_says_why(tmp_path: Path, artifact: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    cases = {"/no/model.gguf": "No such file", "": "empty", "a\0b": "null"}
    for path, why in {**cases, tmp_path: "not a regular file", tmp_path / "fifo": "not a regular file"}.items():
        assert why in refused(path, HEX).msg
    with open_artifact(artifact) as file:
        assert not os.get_inheritable(file.fileno())
    if os.geteuid() != 0:  # root reads everything
        artifact.chmod(0)
        assert "Permission denied" in refused(artifact, HEX).msg


@pytest.mark.parametrize("digest", ["", "sha256:", HEX[:-1], HEX + "0", "md5:" + HEX, "g" * 64, " " + HEX, HEX + "\n"])
def test_what_is_no_sha256_is_refused_before_the_file_is_read(artifact: Path, digest: str) -> None:
    progress = ProgressReporter(
        lambda completed, phase: pytest.fail("read"), phase=Phase.SETUP, clock=iter(range(100)).__next__
    )
    with open_artifact(artifact) as file, pytest.raises(EngineError, match="artifact_digest"):
        file.verify(digest, progress)


def test_one_unit_of_progress_for_each_mib_begun(artifact: Path) -> None:
    sent: list[int] = []
    ticks = iter(range(100))
    progress = ProgressReporter(lambda c, p: sent.append(c), phase=Phase.SETUP, clock=lambda: float(next(ticks)))
    open_verified(artifact, HEX, progress).close()
    assert sent == [1, 2, 3]


def overwrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


@pytest.mark.parametrize("position", [0, BLOCK, len(CONTENT) - 1])
@pytest.mark.parametrize("times", ["new", "set back"])
def test_bytes_that_changed_while_they_were_loaded_are_refused(artifact: Path, position: int, times: str) -> None:
    """The same size, and even the old time of modification."""
    changed = bytearray(CONTENT)
    changed[position] ^= 1
    with open_verified(artifact) as file:
        before = artifact.stat()
        file.recheck(silent())
        overwrite(artifact, changed)
        if times == "set back":
            os.utime(artifact, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(EngineError, match=r"written to|digest mismatch") as caught:
            file.recheck(silent())
        assert caught.value.code is ErrorCode.ARTIFACT_INVALID


def test_a_file_that_was_only_replaced_by_another_is_the_one_that_was_loaded(artifact: Path) -> None:
    with open_verified(artifact) as file:
        artifact.with_name("new").write_bytes(b"something else")
        artifact.with_name("new").rename(artifact)
        assert file.read() == CONTENT
        file.recheck(silent())
