"""Runs the real command in a child process, with scripted workers behind it, and looks for what it leaves."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from synapse_host.cli import main
from tests.support.small_bundle import write_bundle, write_matrix

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """One finished command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout as the one JSON document it must be."""
        document: dict[str, Any] = json.loads(self.out)
        return document


@dataclass
class Command:
    """``cli(...)`` runs ``synapse …``; orphans and temporary runtime directories fail the test."""

    root: Path
    matrix: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def setup(self, script: dict[str, Any] | None = None, **options: Any) -> Command:
        self.matrix = write_matrix(self.root, script, **options)
        return self

    def bundle(self, name: str, **options: Any) -> Command:
        write_bundle(self.root / "models" / name, model_id=name, **options)
        return self

    @contextmanager
    def bent_matrix(self) -> Iterator[dict[str, Any]]:
        """Yield the matrix as plain data, to be changed; it is written back."""
        assert self.matrix is not None
        plain = json.loads(self.matrix.read_text())
        yield plain
        self.matrix.write_text(json.dumps(plain))

    def arguments(self, *words: str) -> list[str]:
        common = ["--models-dir", str(self.root / "models")]
        if self.matrix is not None:
            common += ["--matrix", str(self.matrix)]
        return [words[0], *common, *words[1:]]

    def spawn(
        self, *words: str, prefix: Sequence[str] = (), streams: int = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a command; *prefix*: the program that runs it."""
        (self.root / "tmp").mkdir(exist_ok=True)
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.root / "tmp")}
        own |= {"XDG_CACHE_HOME": str(self.root / "cache"), "XDG_DATA_HOME": str(self.root / "data")}
        inherited = {name: value for name, value in os.environ.items() if name != "SYNAPSE_MATRIX"}
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "synapse_host", *self.arguments(*words)], text=True, cwd=self.root,
            env={**inherited, **own, **self.environment, **environment}, stdin=streams, stdout=streams, stderr=streams,
            start_new_session=True,
        )  # fmt: skip

    def __call__(self, *words: str, stdin: str = "", prefix: Sequence[str] = (), **environment: str) -> Done:
        """Run a command to its end."""
        done = finished(self.spawn(*words, prefix=prefix, **environment), stdin)
        self.check_clean()
        return done

    @contextmanager
    def started(self, *words: str, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
        """Start a command and yield its process; it has ended, and left nothing, when the block is left."""
        with self.spawn(*words, prefix=prefix) as process:
            try:
                yield process
            finally:
                process.kill()
        self.check_clean()

    def on_terminal(self, *words: str, ends: str = "", **environment: str) -> tuple[int, str]:
        """Run a command whose three streams are one terminal of 200 columns; return its exit code and the screen.

        One that doesn't end by itself gets SIGTERM when its screen shows *ends*.
        """
        master, slave = pty.openpty()
        terminal = {"TERM": "xterm-256color", "COLUMNS": "200", "NO_COLOR": "", **environment}
        process = self.spawn(*words, streams=slave, **terminal)
        os.close(slave)
        seen = bytearray()

        def read() -> None:
            # The read fails when the other end is closed.
            with suppress(OSError):
                while data := os.read(master, 65536):
                    seen.extend(data)

        reader = threading.Thread(target=read)
        reader.start()
        while ends and ends.encode() not in seen and reader.is_alive():
            time.sleep(0.01)
        if ends:
            process.terminate()
        code = process.wait(60)
        reader.join(60)
        os.close(master)
        return code, seen.decode()

    @contextmanager
    def held(self, *words: str, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
        """Start a command whose worker holds its first EMBED_BATCH; ``go`` in the folder lets it answer."""
        started = self.root / "started"
        do = [{"touch": str(started)}, {"wait_for": str(self.root / "go")}]
        self.setup({"rules": [{"on": "EMBED_BATCH", "do": do}]})
        with self.started(*words, prefix=prefix) as process:
            while not started.exists() and process.poll() is None:
                time.sleep(0.01)
            yield process

    def workers(self) -> list[int]:
        """Return the pids of this test's workers; a worker's socket argument names the test's folder."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            line = process.info["cmdline"] or []
            if "--socket" in line and any(str(self.root) in word for word in line):
                found += [process.info["pid"]] if process.info["status"] != psutil.STATUS_ZOMBIE else []
        return found

    def check_clean(self) -> None:
        left = [path.name for path in (self.root / "tmp").iterdir() if path.name.startswith("synapse-")]
        assert (left, self.workers()) == ([], []), "runtime directories, workers"


def finished(process: subprocess.Popen[str], stdin: str | None = None) -> Done:
    """Wait until a command has ended."""
    with process:
        try:
            out, err = process.communicate(stdin, timeout=120)
        finally:
            process.kill()
    assert "Traceback" not in err and "Exception ignored" not in err, err
    return Done(process.returncode, out, err)


def entered(words: Sequence[str]) -> Done:
    """Run the command's own entry in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(words))
    said = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    assert "Traceback" not in said[1], said[1]
    return Done(code, *said)


Here = Callable[..., Done]


@pytest.fixture
def here(cli: Command, monkeypatch: pytest.MonkeyPatch) -> Here:
    """Return what runs the command's own entry in this process: for what starts no worker and needs no signal."""
    monkeypatch.chdir(cli.root)
    (cli.root / "tmp").mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(cli.root / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cli.root / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(cli.root / "data"))
    monkeypatch.delenv("SYNAPSE_MATRIX", raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))

    def run(*words: str, bare: bool = False) -> Done:
        done = entered(words if bare else cli.arguments(*words))
        assert not [path for path in (cli.root / "tmp").iterdir() if path.name.startswith("synapse-")]
        return done

    return run


@pytest.fixture
def cli(tmp_path: Path) -> Command:
    """Return a command over bundle `toy` and a well-behaved scripted worker."""
    return Command(tmp_path).setup().bundle("toy")
