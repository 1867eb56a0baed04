"""The last calls into the native libraries, checked against the installed packages as far as it goes without a GPU."""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import onnxruntime
import pytest
from cuda.bindings import driver, runtime

from engines.bundle.checkpoint import Checkpoint
from engines.cuda import binding
from engines.cuda.faults import KEPT, STICKY, refuse
from engines.cuda.graphs.builder import Graph, Variant, WeightStore
from engines.cuda.graphs.families import build
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.engine import DeviceLost
from tests.cuda.test_graph import spec_of

SOURCE = Path(binding.__file__).read_text()
TREE = ast.parse(SOURCE)
OWNERS: dict[str, type | ModuleType] = {
    "driver": driver,
    "runtime": runtime,
    "self._rt": runtime,
    "ort": onnxruntime,
    "ort.OrtValue": onnxruntime.OrtValue,
    "options": onnxruntime.SessionOptions,
    "made": onnxruntime.InferenceSession,
    "self._session": onnxruntime.InferenceSession,
    "self._binding": onnxruntime.IOBinding,
}
"""Which installed object an expression of binding.py stands for."""


def native_calls() -> Iterator[tuple[str, str, ast.Call]]:
    for node in ast.walk(TREE):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if owner in OWNERS:
                yield owner, node.func.attr, node


CALLS = sorted({(owner, name, ast.unparse(call)) for owner, name, call in native_calls()})


def parameters(owner: str, name: str) -> inspect.Signature:
    """Return the installed callable's signature; cython and pybind callables tell it in their first doc line."""
    target = OWNERS[owner]
    if owner == "options" and name == "add_run_config_entry":
        target = onnxruntime.RunOptions
    found = getattr(target, name)
    bound = isinstance(target, type) and not isinstance(inspect.getattr_static(target, name), classmethod)
    try:
        signature = inspect.signature(found)
        values = list(signature.parameters.values())
        return signature.replace(parameters=values[1:]) if bound and values and values[0].name == "self" else signature
    except (ValueError, TypeError):
        pass
    line = (found.__doc__ or "").strip().splitlines()[0]
    inside = re.search(r"\((.*)\)", line)
    assert inside is not None, f"{name} says nothing of its parameters: {line!r}"
    names = [part.split("=")[0].split(":")[0].split()[-1] for part in inside[1].split(",") if part.strip()]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(n, kind) for n in names if n != "self"])


def test_there_are_calls_to_check() -> None:
    assert {"driver", "runtime", "self._rt", "ort", "made", "self._binding", "self._session"} <= {c[0] for c in CALLS}
    assert len(CALLS) >= 30


@pytest.mark.parametrize(("owner", "name", "text"), CALLS)
def test_arguments_fit_the_installed_signature(owner: str, name: str, text: str) -> None:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    if (owner, name) in (("ort", "SessionOptions"), ("ort", "RunOptions")):
        assert not call.args and not call.keywords
        return
    signature = parameters(owner, name)
    signature.bind(*call.args, **{str(k.arg): k.value for k in call.keywords})


@pytest.mark.parametrize("name", ["cudaStreamNonBlocking", "cudaHostAllocDefault", "cudaEventBlockingSync",
                                  "cudaEventDisableTiming", "cudaMemcpyKind"])  # fmt: skip
def test_constants_exist(name: str) -> None:
    assert name in SOURCE and hasattr(runtime, name)


def test_a_wrong_argument_would_be_noticed() -> None:
    with pytest.raises(TypeError):
        parameters("self._rt", "cudaMemcpyAsync").bind(1, 2, 3, 4)
    with pytest.raises(TypeError):
        parameters("self._binding", "bind_input").bind("name", "cpu", 0, int)
    with pytest.raises(AttributeError):
        parameters("driver", "cuDeviceGetThing")


def test_size_and_sources() -> None:
    """Small enough to be read against the vendor's pages, and every native call names its page."""
    lines = SOURCE.splitlines()
    assert len(lines) < 280
    for owner, name, call in native_calls():
        span = lines[max(0, call.lineno - 2) : call.end_lineno]
        assert any(re.search(r"\[[DRPKE]\]", line) for line in span), f"{owner}.{name} in line {call.lineno}"


def test_no_other_file_imports_a_native_library() -> None:
    for file in Path(binding.__file__).parent.rglob("*.py"):
        if file.name != "binding.py":
            assert not re.search(r"^\s*(from|import) (onnxruntime|cuda)\b", file.read_text(), re.M), file.name


# --- what can be executed without a GPU ------------------------------------------------------------------------------


def toy(checkpoints: Callable[[str], Checkpoint]) -> Graph:
    checkpoint = checkpoints("bert-mean")
    return build(spec_of(checkpoint), WeightStore(checkpoint.tensors, "f32"), Variant())


def gpu_here() -> bool:
    return bool(binding.driver_facts(0).driver_api)


@pytest.mark.skipif(gpu_here(), reason="this machine has a driver")
def test_no_driver_is_a_fact_not_an_exception() -> None:
    facts = binding.driver_facts(0)
    assert (facts.driver_api, facts.capability) == (0, None)


@pytest.mark.skipif(gpu_here(), reason="this machine has a driver")
def test_never_a_cpu_session_in_place_of_a_gpu_one(
    checkpoints: Callable[[str], Checkpoint], capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime would hand out a CPU session without an exception; ours is refused."""
    with pytest.raises(EngineError) as caught:
        binding.session(toy(checkpoints), threads=1, cuda={"device_id": "0"})
    assert caught.value.code is ErrorCode.BACKEND_MISSING
    capfd.readouterr()


@pytest.mark.skipif(gpu_here(), reason="this machine has a driver")
def test_cuda_calls_without_a_driver_are_typed() -> None:
    with pytest.raises(EngineError) as caught:
        binding.Cuda(0)
    assert caught.value.code is ErrorCode.INFERENCE_FAILED


def test_the_cpu_session_stays_on_the_cpu(checkpoints: Callable[[str], Checkpoint]) -> None:
    made = binding.session(toy(checkpoints), threads=2)
    assert made.get_providers() == ["CPUExecutionProvider"]
    assert {part.ep_name for part in made.get_provider_graph_assignment_info()} == {"CPUExecutionProvider"}


def test_a_failed_run_is_typed(checkpoints: Callable[[str], Checkpoint]) -> None:
    bound = binding.Binding(binding.session(toy(checkpoints), threads=1), "cpu", 0)
    with pytest.raises(EngineError) as caught:
        bound.run({})
    assert caught.value.code is ErrorCode.INFERENCE_FAILED


# --- what a native message means -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "lost"),
    [
        ("Failed to allocate memory for requested buffer of size 123", ErrorCode.OOM, False),
        ("CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; expr=cudaMalloc(&p, n);", ErrorCode.OOM, False),
        ("CUDA error 2: cudaErrorMemoryAllocation", ErrorCode.OOM, False),
        ("std::bad_alloc", ErrorCode.OOM, False),
        (
            "bfc_arena.cc:360 Available memory of 1048576 is smaller than requested bytes of 4194304",
            ErrorCode.OOM,
            False,
        ),
        (
            "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=h ; expr=cublasCreate(&c)",
            ErrorCode.OOM,
            False,
        ),
        ("CUDA error cudaErrorMemoryAllocation:out of memory", ErrorCode.OOM, False),
        (
            "CUDA error cudaErrorIllegalAddress:an illegal memory access was encountered",
            ErrorCode.INFERENCE_FAILED,
            True,
        ),
        ("CUDA error 999: cudaErrorUnknown", ErrorCode.INFERENCE_FAILED, True),
        ("CUDA error cudaErrorAssert:device-side assert triggered", ErrorCode.INFERENCE_FAILED, True),
        ("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED", ErrorCode.INFERENCE_FAILED, False),
        ("CUDA failure 700: an illegal memory access was encountered", ErrorCode.INFERENCE_FAILED, True),
        ("CUDA error 719: cudaErrorLaunchFailure", ErrorCode.INFERENCE_FAILED, True),
        ("CUDA error 714: cudaErrorHardwareStackError", ErrorCode.INFERENCE_FAILED, True),
        ("CUDA failure 35: insufficient driver", ErrorCode.INFERENCE_FAILED, False),
        ("Non-zero status code returned while running MatMul node", ErrorCode.INFERENCE_FAILED, False),
        ("shape {2,700} and {2,719}", ErrorCode.INFERENCE_FAILED, False),
    ],
)
def test_messages(text: str, code: ErrorCode, lost: bool) -> None:
    with pytest.raises(EngineError) as caught:
        refuse(RuntimeError(text))
    assert caught.value.code is code
    assert isinstance(caught.value, DeviceLost) is lost
    assert len(caught.value.msg) < 1000


def test_every_error_that_ends_the_process_counts_as_a_lost_device() -> None:
    """NVIDIA's own reference, as cuda-python carries it: numbers of the names, and what has the process terminated."""
    for name, number in STICKY.items():
        assert getattr(runtime.cudaError_t, name) == number
    final = {e.name for e in runtime.cudaError_t if "must be terminated" in " ".join((e.__doc__ or "").split())}
    assert len(final) >= 8 and final <= STICKY.keys()


def test_what_a_lost_device_was_doing_is_kept() -> None:
    """Destroying a session with recorded launches on a lost device aborts the process before it has answered."""

    class Session:
        pass

    def forward(session: Session) -> None:
        refuse(RuntimeError("CUDA error 700: cudaErrorIllegalAddress"))

    kept = len(KEPT)
    session = Session()
    alive = weakref.ref(session)
    with contextlib.suppress(DeviceLost):
        forward(session)
    del session
    gc.collect()
    assert alive() is not None
    del KEPT[kept:]


def test_a_session_that_cannot_be_made_is_a_missing_backend() -> None:
    with pytest.raises(EngineError) as caught:
        refuse(RuntimeError("This session contains graph nodes that are assigned to the default CPU EP"), creating=True)
    assert caught.value.code is ErrorCode.BACKEND_MISSING
