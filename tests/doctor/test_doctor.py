from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from synapse_host import doctor
from synapse_host.certificates import binding, standing
from synapse_host.doctor import engines, machine, models
from synapse_host.placement import hardware
from synapse_host.placement.matrix import load
from synapse_host.placement.probe import Floor
from synapse_host.worker import runtime_dir as remains
from synapse_host.worker.listener import SUN_PATH
from tests.placement.test_select import LINUX
from tests.support.certified import document, toy
from tests.support.killed import kill_one
from tests.support.small_bundle import write_bundle, write_matrix


def report(status: Any, floor: dict[str, object] | None = None, id: str = "toy") -> doctor.EngineReport:
    return doctor.EngineReport(id, status, "what", "cpu", {}, floor, "")


def test_two_onnxruntimes_clash() -> None:
    assert list(machine.onnxruntime_findings({"onnxruntime-gpu": "1"})) == []
    (finding,) = machine.onnxruntime_findings({"onnxruntime": "1", "onnxruntime-gpu": "1"})
    assert finding.severity == "failure"
    assert (
        finding.fix == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install --force-reinstall onnxruntime-gpu"
    )


def test_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = machine.GIB
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=4 * gib))
    assert list(machine.resource_findings(4 * gib, tmp_path / "m")) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=0))
    found = list(machine.resource_findings(gib // 2, tmp_path / "m"))
    assert [finding.id for finding in found] == ["memory.low", "disk.low"]
    # A read-only file system has no free block either: what is wrong is told, not the number.
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    (finding,) = machine.resource_findings(4 * gib, tmp_path / "m")
    assert finding.id == "models.unwritable" and f"{tmp_path} can't be written" in finding.what
    assert list(machine.resource_findings(4 * gib, None)) == []
    assert list(machine.descriptor_findings(None)) == list(machine.descriptor_findings(1024)) == []
    assert [finding.fix for finding in machine.descriptor_findings(64)] == ["ulimit -n 1024"]


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="Unix only")
def test_a_killed_hosts_directory_is_told_once_and_how_to_remove_it(runtime_dir: Path) -> None:
    abandoned_dir, _ = kill_one(runtime_dir)
    (finding,) = machine.abandoned_findings([runtime_dir])
    assert finding.id == "runtime.abandoned" and finding.fix == f"rm -r {abandoned_dir}"
    assert abandoned_dir.exists()
    remains.sweep(runtime_dir)
    assert list(machine.abandoned_findings([runtime_dir])) == []


@pytest.mark.parametrize(
    ("engine", "status", "code", "severity", "fix"),
    [
        ("llama-cpu", "failed", "probe_timeout", "failure", "--probe-floor"),
        ("llama-cpu", "refused", "llama_missing", "warning", "synapse-workers[llama]"),
        ("llama-cpu", "refused", "cpu_unsupported", "failure", "--no-binary"),
        ("cuda", "refused", "cuda_runtime_missing:libcudnn.so.9", "warning", "synapse-workers[cuda,cuda-libraries]"),
    ],
)
def test_engines_that_can_be_mended(engine: str, status: str, code: str, severity: str, fix: str) -> None:
    floor = {"status": status, "code": code}
    others = [report("passed_over", id="cuda"), report("ok", id="onnx-cpu")]
    (finding,) = engines.engine_findings(load(), [report("failed", floor, id=engine), *others])
    assert (finding.id, finding.severity) == (f"engine.{engine}.{code.partition(':')[0]}", severity)
    assert fix in finding.fix


@pytest.mark.parametrize(("missing", "status"), [("libcublas.so.13", "failed"), ("onnxruntime-sm_100", "passed_over")])
def test_only_what_can_be_installed_is_advised(missing: str, status: str) -> None:
    """No package brings machine code for a GPU's architecture that the runtime wasn't built for."""
    matrix = load()
    floor = Floor("refused", f"cuda_runtime_missing:{missing}")
    assert engines.report_on(matrix, matrix.engines["onnx-cpu"], LINUX, floor, "").status == status


def test_lanes_that_nothing_serves() -> None:
    matrix = load()
    some = [report("ok", id="llama-cpu"), report("passed_over", id="cuda")]
    assert list(engines.lane_findings(matrix, some)) == []
    none = list(engines.lane_findings(matrix, [report("failed", id="llama-cpu")]))
    assert {finding.id for finding in none} == {f"lane.{lane}.no_engine" for lane in matrix.lanes}
    # A broken engine has its own finding with what to do; explain wouldn't say more.
    assert {finding.fix for finding in none} == {"see the findings above: llama-cpu"}
    passed = list(engines.lane_findings(matrix, [report("passed_over", id="llama-cpu")]))
    assert {finding.fix for finding in passed} == {f"synapse matrix explain {lane}" for lane in matrix.lanes}


def test_bundles_are_hashed_again(tmp_path: Path) -> None:
    write_bundle(tmp_path / "good")
    write_bundle(tmp_path / "bad")
    (tmp_path / "bad" / "model.gguf.f16").write_bytes(b"tampered with")
    (tmp_path / "ugly").mkdir()
    (tmp_path / "ugly" / "manifest.json").write_text("{")
    found = {finding.id: finding for finding in models.bundle_findings(tmp_path)}
    assert set(found) == {"model.good.ok", "model.bad.invalid", "model.ugly.invalid"}
    assert "digest" in found["model.bad.invalid"].what
    assert list(models.bundle_findings(tmp_path / "nothing")) == []


@pytest.mark.process
def test_a_probe_child_that_hangs_crashes_or_babbles_is_a_finding(tmp_path: Path) -> None:
    bodies = {"hang": "import time; time.sleep(60)", "crash": "import os; os.abort()", "babble": "print('hello')"}
    document = json.loads(write_matrix(tmp_path).read_text())
    engine = document["engines"]["scripted"]
    document["engines"] = {
        name: {**engine, "worker": {"command": [sys.executable, "-c", body]}} for name, body in bodies.items()
    }
    document["lanes"] = {"embed": {"task": "embed", "engines": list(bodies)}}
    (tmp_path / "matrix.yaml").write_text(json.dumps(document))
    found = doctor.examine(load(tmp_path / "matrix.yaml"), models_dir=tmp_path, probe_limit=2.0)
    ids = {finding.id for finding in found.findings if finding.severity == "failure"}
    assert ids == {
        "engine.hang.probe_timeout", "engine.crash.probe_crashed", "engine.babble.probe_rubbish",
        "lane.embed.no_engine",
    }  # fmt: skip
    assert found.count("failure") == 4
    assert set(found.to_dict()) == {"findings", "engines", "host"}


@pytest.mark.process
def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = doctor.examine(load(), models_dir=tmp_path)
    assert {engine.id for engine in found.engines} == set(load().engines)
    assert not [finding for finding in found.findings if "Traceback" in finding.what]
    assert found.host["cores"] >= 1
    name = "/synapse-12345678/synapse/workers/generate-1000.sock"
    assert found.host["socket_path_room"] == SUN_PATH - 1 - len(tempfile.gettempdir() + name)
    assert found.host["disk_free_bytes"] > 0 and found.host["descriptor_limit"] != 0


def test_certificates_hold_or_say_what_voided_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    bundle = toy(tmp_path / "models" / "toy")
    matrix = load(write_matrix(tmp_path))
    profile = hardware.detect()
    line = "scripted-worker 0.3.0 protocol=3 engine=llama.cpp-worker engine_version=scripted-1 device=cpu"
    made = document(matrix, "scripted", bundle, identity=binding.identity_of(line))
    standing.settle(made, matrix)

    def findings(version: str = line, **bent: object) -> list[tuple[str, str, str, str]]:
        now = dataclasses.replace(profile, **bent)
        found = models.certificate_findings(matrix, now, {"scripted": version}, tmp_path / "models")
        return [(one.id, one.severity, one.what, one.fix) for one in found]

    ((id, severity, what, fix),) = findings()
    assert (id, severity, fix) == ("certificate.embed.scripted.toy.valid", "info", "")
    ((id, severity, what, fix),) = findings(os_build="22A1")
    assert (id, severity) == ("certificate.embed.scripted.toy.void", "warning")
    assert "the operating system build changed" in what and "→ 22A1" in what
    assert fix == "synapse certify embed --model toy --engine scripted"
    for silent in ("", line.replace("scripted-1", "scripted-2")):
        ((id, severity, what, fix),) = findings(version=silent)
        assert severity == "warning" and fix, what
    (tmp_path / "data" / "synapse" / "certificates" / "scripted" / "bad.json").write_text("{")
    assert [one[1] for one in findings()] == ["info", "warning"]
    shutil.rmtree(tmp_path / "models")
    assert findings()[0][0].endswith("unused")
