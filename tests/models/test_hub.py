"""Checkpoints by name, from a small hub on loopback that answers as the library expects."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from synapse_host.models import hub
from tests.support import toy_models

pytestmark = pytest.mark.process
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the folders of ``repositories`` (name -> folder); ``asked`` has every file that was fetched."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories = repositories
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0].strip("/").split("/")
        api = path[:2] == ["api", "models"]
        name = "/".join(path[2:4] if api else path[:2])
        folder = self.server.repositories.get(name)
        if name == "toys/portal":
            self.reply(200, b"<html>log in first", {})
        elif folder is None:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif api:
            files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
            answer: Any = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            if "tree" in path:
                answer = [{"type": "file", "path": file, "size": 1, "oid": COMMIT} for file in files]
            self.reply(200, json.dumps(answer).encode(), {})
        else:
            file = "/".join(path[4:])
            data = (folder / file).read_bytes()
            if self.command == "GET":
                self.server.asked.append(file)
            digest = hashlib.sha256(data).hexdigest()
            self.reply(200, data, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data)), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def small_hub(tmp_path: Path) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="the extra hub isn't installed")
    checkpoint = toy_models.write_bert(tmp_path / "checkpoint")
    (checkpoint / "pytorch_model.bin").write_bytes(b"a pickle")
    (checkpoint / "README.md").write_text("much")
    pickled = tmp_path / "pickled"
    toy_models.write_json(pickled / "config.json", {})
    server = Hub({"toys/bert": checkpoint, "toys/pickled": pickled})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def build(server: Hub, root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(root / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "synapse_host", "build", *words, "--json", "--quiet"],
        env={**os.environ, **surroundings, **environment}, cwd=root, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_a_name_is_fetched_and_pinned(small_hub: Hub, tmp_path: Path) -> None:
    done = build(small_hub, tmp_path, "toys/bert", "bundle", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["source"] == f"hub:toys/bert@{COMMIT}"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(small_hub.asked)
    assert not {"pytorch_model.bin", "README.md"} & set(small_hub.asked)
    assert "Bearer hf_secret" in small_hub.tokens and "hf_secret" not in done.stdout + done.stderr
    # The cache serves an offline machine.
    again = build(small_hub, tmp_path, "toys/bert", "second", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "second" / "manifest.json").read_text())["source"] == manifest["source"]


@pytest.mark.parametrize(
    ("name", "environment", "says"),
    [
        ("toys/none", {}, "the hub has no toys/none"),
        ("toys/portal", {}, "toys/portal can't be fetched"),
        ("toys/pickled", {}, "toys/pickled has no safetensors"),
        ("toys/bert", {"HF_HUB_OFFLINE": "1"}, "toys/bert is not in the cache"),
    ],
)
def test_what_can_t_be_fetched(
    small_hub: Hub, tmp_path: Path, name: str, environment: dict[str, str], says: str
) -> None:
    done = build(small_hub, tmp_path, name, "bundle", **environment)
    assert done.returncode == 2 and done.stderr == "", done.stderr
    assert says in json.loads(done.stdout)["error"]["message"]
    assert not (tmp_path / "bundle").exists()


def test_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "here").mkdir(parents=True)
    for name, is_name in (
        ("owner/name", True),
        ("owner/name@refs/pr/1", True),
        *((name, False) for name in ("owner/here", "./owner/name", "name", "a/b/c", "../b")),
    ):
        assert hub.is_name(name) is is_name, name
