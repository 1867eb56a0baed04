"""What the stub libraries say is never evidence of a GPU, and the rehearsal itself can fail."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from synapse_host import HostConfig
from synapse_host.certification.run import Order, certify
from synapse_host.placement.matrix import load
from tests.hardware import cuda_evidence
from tests.rehearsal.conftest import Bundles, Environment, case
from tests.rehearsal.libraries import STAND_IN
from tests.support.sabotage import embed_arrays, give_fixtures

ROOT = Path(__file__).parents[2]


def test_the_stubs_call_themselves_by_their_own_name(environment: Environment) -> None:
    code = "from engines.cuda import binding; print(binding.driver_facts(0).device)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == STAND_IN


@pytest.mark.parametrize("device", [STAND_IN, "", "llvmpipe"])
def test_a_stand_in_writes_no_evidence(device: str) -> None:
    for gpu in ("NVIDIA H200", "Tesla T4", "NVIDIA GeForce RTX 4090"):
        cuda_evidence.require_gpu(gpu)
    with pytest.raises(AssertionError, match="never evidence"):
        cuda_evidence.require_gpu(device)


WITHOUT_NUMBERS = ("test_the_floor", "test_every_node_runs_on_the_gpu", "test_attention_kernels")
"""Hardware tests that judge what the provider's host code decides: they must pass here."""


def test_a_hardware_run_on_the_stubs_is_complete_up_to_the_numbers(environment: Environment, tmp_path: Path) -> None:
    """`make hw-cuda` itself: no test fails before it judges its numbers, and none leaves evidence.

    Certification is left out: test_certification_on_the_stubs_is_refused takes its way with a bundle of its own.
    """
    before = set((ROOT / "evidence").glob("*"))
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.rehearsal.small_shapes"]
    command += ["--hw=cuda", "-k", "not certification", f"--junitxml={report}", "tests/hardware/test_cuda.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1, done.stdout[-2000:]
    said: dict[str, dict[str, str]] = {}
    for test in ElementTree.parse(report).getroot().iter("testcase"):
        said.setdefault(test.attrib["name"], {}).update({part.tag: part.get("message", "") for part in test})
    assert len(said) > 40
    for name, parts in said.items():
        assert "never evidence" in parts.pop("error", ""), f"{name} was accepted as evidence"
        numbers = parts.pop("failure", None)
        assert numbers is None or numbers.startswith("tests.hardware.cuda_evidence.NumbersMissed: "), (name, numbers)
        assert numbers is None or not name.startswith(WITHOUT_NUMBERS), (name, numbers)
    assert set((ROOT / "evidence").glob("*")) == before


def test_certification_on_the_stubs_is_refused(
    bundles: Bundles, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that do nothing agree with no reference, whatever the worker says of its device."""
    bundle = bundles("certified", case("bert-mean"))
    random = np.random.default_rng(1)
    rows = [random.integers(5, 120, int(random.integers(3, 14))).tolist() for _ in range(260)]
    vectors = random.normal(size=(len(rows), 64))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    give_fixtures(bundle.root, "embed", [None] * len(rows), embed_arrays(rows, vectors))
    env = {key: environment()[key] for key in ("PYTHONPATH", "CUDASHIM", "LD_PRELOAD")}
    monkeypatch.setenv("LD_LIBRARY_PATH", environment()["LD_LIBRARY_PATH"])
    engine = {"engine": "cuda", "device": "cuda", "format": "safetensors-package", "requires": "any", "env": env}
    path = tmp_path / "matrix.yaml"
    lanes = {"embed": {"task": "embed", "engines": ["cuda"]}}
    path.write_text(json.dumps({"version": 1, "hardware": {"any": {}}, "engines": {"cuda": engine}, "lanes": lanes}))
    order = Order("embed", "toy", bundle.root, "cuda")
    document = asyncio.run(certify(order, load(path), HostConfig(runtime_dir=tmp_path / "run")))
    assert document.engine.kernel_revision is not None and "cuda-sm_90" in document.engine.kernel_revision
    assert document.verdict == "uncertified", document.gates


# --- each gate of the rehearsal can fail -----------------------------------------------------------------------------

OFF_THE_GPU = """
import json, sys
import onnx, onnxruntime as ort
from onnx import helper, TensorProto
from tests.rehearsal.probe import watch
sessions = []
watch(sessions)
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy")
nodes = [helper.make_node("Add", ["x", "x"], ["a"]), helper.make_node("Unique", ["a"], ["u"])]
nodes += [helper.make_node("Add", ["u", "u"], ["y"])]
model = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 20)])
model.ir_version = 10
options = ort.SessionOptions()
options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
ort.InferenceSession(model.SerializeToString(), options, [("CUDAExecutionProvider", {"enable_cudnn": "0"})])
print(json.dumps(sessions))
"""


def test_a_node_off_the_gpu_and_its_copies_are_seen(environment: Environment) -> None:
    command = [sys.executable, "-c", OFF_THE_GPU]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    (session,) = json.loads(done.stdout.splitlines()[-1])
    assert session["nodes"] == {"CUDAExecutionProvider": 2, "CPUExecutionProvider": 1} and session["memcpy"] == 2


RULES = """
import ctypes, json, sys
from ctypes import byref, c_void_p as P
from pathlib import Path
cuda = ctypes.CDLL("libcudart.so.13")
def made(function, *arguments):
    p = P()
    getattr(cuda, function)(byref(p), *arguments)
    return p
def at(p, offset):
    return P(p.value + offset)
stream, event = made("cudaStreamCreate"), made("cudaEventCreate")
device, host = made("cudaMalloc", 1024), made("cudaMallocHost", 64)
UP, DOWN = 1, 2
def beyond_device(): cuda.cudaMemcpyAsync(at(device, 1000), host, 64, UP, stream)
def beyond_pinned(): cuda.cudaMemcpyAsync(host, device, 128, DOWN, stream)
def direction(): cuda.cudaMemcpyAsync(device, host, 64, DOWN, stream)
def free_inside(): cuda.cudaFree(at(device, 512))
def unrecorded(): cuda.cudaEventSynchronize(event)
def changed():
    cuda.cudaMemcpyAsync(device, host, 64, UP, stream)
    ctypes.memset(host, 7, 1)
    cuda.cudaStreamSynchronize(stream)
def captured(body):
    cuda.cudaStreamBeginCapture(stream, 0)
    body()
    cuda.cudaStreamEndCapture(stream, byref(P()))
def malloc(): captured(lambda: made("cudaMalloc", 64))
def wait(): captured(lambda: cuda.cudaStreamSynchronize(stream))
def upload(): captured(lambda: cuda.cudaMemcpyAsync(device, host, 64, UP, stream))
{name}()
cuda.cudashim_report(b"/dev/stdout")
"""


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("beyond_device", "cudaMemcpyAsync of 64 bytes beyond a live block (pinned to device)"),
        ("beyond_pinned", "cudaMemcpyAsync of 128 bytes beyond a live block (device to pinned)"),
        ("direction", "cudaMemcpyAsync kind 2 but pinned to device"),
        ("free_inside", "free of a pointer inside a device block"),
        ("unrecorded", "a wait for an event that was never recorded"),
        ("changed", "host memory changed while its upload was still queued"),
        ("malloc", "cudaMalloc while a stream is capturing"),
        ("wait", "cudaStreamSynchronize while a stream is capturing"),
        ("upload", "a recorded launch copies pinned memory to device"),
    ],
)
def test_a_broken_rule_is_seen(name: str, rule: str, environment: Environment) -> None:
    command = [sys.executable, "-c", RULES.replace("{name}", name)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["violations"] == [rule]
