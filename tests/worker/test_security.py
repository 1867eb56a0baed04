"""The boundary around workers: who may connect, what a worker inherits, what is said before it is trusted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from engines.bundle.manifest import parse_strict
from synapse_host.placement import probe
from synapse_host.placement.child import ENVIRONMENT, ENVIRONMENT_PREFIXES, worker_environment
from tests.support.lanes import CUDA, crash, on, serve

posix = pytest.mark.skipif(os.name != "posix", reason="Unix permissions and descriptors")
ROOT = Path(__file__).resolve().parents[2]


# --- what a worker inherits ------------------------------------------------------------------------------------------

LISTED = """SYNAPSE_WORKER_ID, PATH, HOME, USER, LANG, LC_*, TMPDIR, SYSTEMROOT, LD_LIBRARY_PATH, DYLD_*, CUDA_*,
NVIDIA_*, OMP_NUM_THREADS, GGML_*"""
"""interfaces.md: a worker's environment."""


def test_the_environment_is_the_list_of_interfaces_md():
    listed = set(re.findall(r"[A-Z_]+\*?", LISTED))
    ours = set(ENVIRONMENT) | {f"{prefix}*" for prefix in ENVIRONMENT_PREFIXES} | {"SYNAPSE_WORKER_ID"}
    assert ours == listed
    # Elsewhere than on Windows another case is another variable; the host's own word for the id wins.
    source = {"path": "/evil", "home": "/evil", "lc_all": "x", "cuda_x": "1", "PATH": "/bin"}
    got = worker_environment("w", {"SYNAPSE_WORKER_ID": "x"}, source=source)
    assert os.name == "nt" or got == {"PATH": "/bin", "SYNAPSE_WORKER_ID": "w"}


@pytest.mark.process
@posix
async def test_a_worker_gets_its_arguments_its_socket_and_its_streams_and_nothing_else(make, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("LD_PRELOAD", "")
    report, manifest = tmp_path / "report", tmp_path / "manifest.json"
    manifest.write_text('{"any":"object"}')
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        lane = make(
            {"engine": "owned-cuda", "ready": [{"report": str(report)}]},
            **CUDA,
            env={"GGML_EXTRA": "1"},
            manifest_path=manifest,
            manifest_digest=hashlib.sha256(parse_strict(manifest.read_bytes())[1]).hexdigest(),
            packed_widths=(128, 256),
        )
        await serve(lane)
    told = json.loads(report.read_text())
    # 0, 1, 2, the connection, the script's own copy of stdout, and the listing itself.
    assert len(told["descriptors"]) <= 6, told["descriptors"]
    allowed = re.compile("|".join(name.replace("*", ".*") for name in re.findall(r"[A-Z_]+\*?", LISTED)))
    # Python itself may add LC_CTYPE (PEP 538).
    assert all(allowed.fullmatch(name) for name in told["environment"]), sorted(told["environment"])
    assert told["environment"]["SYNAPSE_WORKER_ID"] == "toy-1"
    assert told["environment"]["GGML_EXTRA"] == "1"
    assert told["session"] == told["pid"] == lane.health()["worker_pid"], "a worker leads its own session"
    argv = told["argv"][told["argv"].index("--socket") :]
    assert argv[::2] == ["--socket", "--nonce", "--device", "--manifest", "--packed"]
    assert Path(argv[1]).name == "toy-1.sock" and re.fullmatch("[0-9a-f]{16}", argv[3])
    assert argv[5:10:2] == ["cpu", str(manifest), "128,256"]


@pytest.mark.process
def test_a_probe_sees_what_a_worker_would_see(tmp_path, monkeypatch):
    """Another environment would be another answer, and a foreign command's probe is as foreign as its worker."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("LC_ALL", "C")
    seen = tmp_path / "seen"
    code = (
        f"import json, os; open({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)));"
        'print(\'{"status": "ok", "code": "ok", "required": {}, "observed": {}}\')'
    )
    assert probe.probe((sys.executable, "-c", code)).status == "ok"
    environment = json.loads(seen.read_text())
    assert "AWS_SECRET_ACCESS_KEY" not in environment and environment["LC_ALL"] == "C"


# --- the nonce -------------------------------------------------------------------------------------------------------


@pytest.mark.process
async def test_the_nonce_is_new_for_each_spawn_and_never_told(make, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    report = tmp_path / "report"
    dies = {"rules": [on("EMBED_BATCH", {"stderr": "bye"}, {"signal": "SIGKILL"})]}
    lane = make({**dies, "ready": [{"report": str(report)}]})
    nonces, told = [], []
    for _ in range(2):
        error = await crash(lane)
        argv = json.loads(report.read_text())["argv"]
        nonces.append(argv[argv.index("--nonce") + 1])
        told.append(json.dumps(error.to_dict()))
    told.append(json.dumps(lane.health()))
    assert len(set(nonces)) == 2 and all(re.fullmatch("[0-9a-f]{16}", nonce) for nonce in nonces)
    everything = "\n".join([*told, caplog.text])
    assert not any(nonce in everything for nonce in nonces)
