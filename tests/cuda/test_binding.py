"""The last calls into the native libraries, executed as far as it goes without a GPU.

cuda-python runs for real here: it takes the arguments, and the CUDA runtime answers that there is no driver (error 35).
"""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver, runtime

from engines.checkpoint.read import Checkpoint
from engines.cuda import binding
from engines.cuda.faults import KEPT, STICKY, refuse
from engines.cuda.graphs.builder import Graph, Variant, WeightStore
from engines.cuda.graphs.families import build
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.engine import DeviceLost
from tests.cuda.test_graph import spec_of

GPU = bool(binding.driver_facts(0).driver_api)
NO_DRIVER = pytest.mark.skipif(GPU, reason="this machine has a driver")
INSUFFICIENT_DRIVER = 35
"""cudaErrorInsufficientDriver: what the CUDA runtime answers where there is no driver."""
Calls = dict[str, list[int]]


def executed(monkeypatch: pytest.MonkeyPatch, module: ModuleType, answers: dict[str, tuple[Any, ...]]) -> Calls:
    """Let every function of cuda-python's *module* run for real and note its status.

    What a function in *answers* returned is then replaced, so that the call after it is reached without a driver.
    """
    calls: Calls = {}

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                result = function(*arguments)  # a wrong number or kind of arguments raises TypeError
            except RuntimeError:  # cuda.pathfinder: there is no libcuda
                result = (INSUFFICIENT_DRIVER,)
            calls.setdefault(name, []).append(int(result[0]))
            return answers.get(name, result)

        return call

    for name, function in vars(module).items():
        if re.match(r"cu(da)?[A-Z]", name) and callable(function) and not isinstance(function, type):
            monkeypatch.setattr(module, name, wrapped(name, function))
    return calls


MADE: dict[str, tuple[Any, ...]] = {
    "cudaSetDevice": (runtime.cudaError_t.cudaSuccess,),
    "cudaStreamCreateWithFlags": (runtime.cudaError_t.cudaSuccess, runtime.cudaStream_t(0)),
}
WEIGHT = {"weight": np.ones((2, 3), np.float16)}


@NO_DRIVER
@pytest.mark.parametrize(
    ("method", "use"),
    [
        ("cudaHostAlloc", lambda cuda: cuda.pinned(64)),
        ("cudaMalloc", lambda cuda: cuda.memory(64)),
        ("cudaMalloc", lambda cuda: cuda.upload(WEIGHT)),
        ("cudaEventCreateWithFlags", lambda cuda: cuda.event()),
        ("cudaMemcpyAsync", lambda cuda: cuda.copy(0, 0, 64, up=True)),
        ("cudaMemcpyAsync", lambda cuda: cuda.copy(0, 0, 64, up=False)),
        ("cudaEventRecord", lambda cuda: cuda.record(runtime.cudaEvent_t(0))),
        ("cudaEventSynchronize", lambda cuda: cuda.wait(runtime.cudaEvent_t(0))),
        ("cudaMemGetInfo", lambda cuda: cuda.memory_info()),
        ("cudaStreamDestroy", lambda cuda: cuda.close()),
    ],
)
def test_a_call_without_a_driver_is_a_typed_error(
    method: str, use: Callable[[binding.Cuda], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = executed(monkeypatch, runtime, MADE)
    cuda = binding.Cuda(0)
    with pytest.raises(EngineError, match="CUDA error 35: cudaErrorInsufficientDriver") as caught:
        use(cuda)
    assert caught.value.code is ErrorCode.INFERENCE_FAILED
    assert calls[method] == [INSUFFICIENT_DRIVER] == calls["cudaSetDevice"] == calls["cudaStreamCreateWithFlags"]


@NO_DRIVER
def test_every_call_of_the_binding_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the first call of a method hides: every function that binding.py names runs, releases included."""
    success = runtime.cudaError_t.cudaSuccess
    room = np.zeros(4096, np.uint8)
    answers = MADE | dict.fromkeys(("cudaHostAlloc", "cudaMalloc"), (success, room.ctypes.data))
    answers |= dict.fromkeys(("cudaMemcpyAsync", "cudaStreamSynchronize", "cudaEventRecord"), (success,))
    answers |= {"cudaEventCreateWithFlags": (success, runtime.cudaEvent_t(0)), "cudaEventSynchronize": (success,)}
    answers |= dict.fromkeys(("cudaStreamDestroy", "cudaFreeHost", "cudaFree", "cudaEventDestroy"), (success,))
    calls = executed(monkeypatch, runtime, answers | {"cudaMemGetInfo": (success, 3, 4)})
    cuda = binding.Cuda(0)
    array, address = cuda.pinned(64)
    assert (len(array), address) == (64, room.ctypes.data)
    (tensor,) = cuda.upload(WEIGHT).values()
    assert (tensor.shape(), tensor.device_name()) == ([2, 3], "cuda")
    event = cuda.event()
    cuda.copy(address, address, 64, up=False)
    cuda.record(event)
    cuda.wait(event)
    assert cuda.memory_info() == (3, 4)
    cuda.settle()
    cuda.close()
    named = set(re.findall(r"(?:_rt|runtime)\.(cuda[A-Z]\w+)", Path(binding.__file__).read_text()))
    functions = {name for name in named if callable(getattr(runtime, name)) and name != "cudaMemcpyKind"}
    assert functions == set(calls) and len(functions) >= 14
    assert {status for statuses in calls.values() for status in statuses} == {INSUFFICIENT_DRIVER}
    for name in functions:  # each would have noticed a wrong number of arguments
        with pytest.raises(TypeError):
            getattr(runtime, name)(*range(9))


@NO_DRIVER
def test_every_call_to_the_driver_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = b"no GPU".ljust(64, b"\0")
    answers = {"cuInit": (0,), "cuDriverGetVersion": (0, 13000), "cuDeviceGet": (0, driver.CUdevice(0))}
    answers |= {"cuDeviceGetAttribute": (0, 9), "cuDeviceGetName": (0, name)}
    calls = executed(monkeypatch, driver, answers)
    facts = binding.driver_facts(0)
    assert (facts.driver_api, facts.capability, facts.device) == (13000, (9, 9), "no GPU")
    assert set(calls) == set(re.findall(r"driver\.(cu[A-Z]\w+)\(", Path(binding.__file__).read_text())) == set(answers)
    assert 0 not in {status for statuses in calls.values() for status in statuses}
    for name in calls:
        with pytest.raises(TypeError):
            getattr(driver, name)(*range(9))


def test_no_other_file_imports_a_native_library() -> None:
    for file in Path(binding.__file__).parent.rglob("*.py"):
        if file.name != "binding.py":
            assert not re.search(r"^\s*(from|import) (onnxruntime|cuda)\b", file.read_text(), re.M), file.name


# --- what can be executed without a GPU ------------------------------------------------------------------------------


def toy(checkpoints: Callable[[str], Checkpoint]) -> Graph:
    checkpoint = checkpoints("bert-mean")
    return build(spec_of(checkpoint), WeightStore(checkpoint.tensors, "f32"), Variant())


@NO_DRIVER
def test_no_driver_is_a_fact_not_an_exception() -> None:
    facts = binding.driver_facts(0)
    assert (facts.driver_api, facts.capability) == (0, None)


@NO_DRIVER
def test_never_a_cpu_session_in_place_of_a_gpu_one(
    checkpoints: Callable[[str], Checkpoint], capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime would hand out a CPU session without an exception; ours is refused."""
    with pytest.raises(EngineError) as caught:
        binding.session(toy(checkpoints), threads=1, cuda={"device_id": "0"})
    assert caught.value.code is ErrorCode.BACKEND_MISSING
    capfd.readouterr()


def test_a_failed_run_is_typed(checkpoints: Callable[[str], Checkpoint]) -> None:
    bound = binding.Binding(binding.session(toy(checkpoints), threads=1), "cpu", 0)
    with pytest.raises(EngineError) as caught:
        bound.run({})
    assert caught.value.code is ErrorCode.INFERENCE_FAILED


# --- what a native message means -------------------------------------------------------------------------------------


OOM, FAILED, LOST = (ErrorCode.OOM, False), (ErrorCode.INFERENCE_FAILED, False), (ErrorCode.INFERENCE_FAILED, True)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("Failed to allocate memory for requested buffer of size 123", OOM),
        ("CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; expr=cudaMalloc(&p, n);", OOM),
        ("CUDA error 2: cudaErrorMemoryAllocation", OOM),
        ("std::bad_alloc", OOM),
        ("bfc_arena.cc:360 Available memory of 1048576 is smaller than requested bytes of 4194304", OOM),
        ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=h ; expr=cublasCreate(&c)", OOM),
        ("CUDA error cudaErrorMemoryAllocation:out of memory", OOM),
        ("CUDA error cudaErrorIllegalAddress:an illegal memory access was encountered", LOST),
        ("CUDA error 999: cudaErrorUnknown", LOST),
        ("CUDA error cudaErrorAssert:device-side assert triggered", LOST),
        ("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED", FAILED),
        ("CUDA failure 700: an illegal memory access was encountered", LOST),
        ("CUDA error 719: cudaErrorLaunchFailure", LOST),
        ("CUDA error 714: cudaErrorHardwareStackError", LOST),
        ("CUDA failure 35: insufficient driver", FAILED),
        ("Non-zero status code returned while running MatMul node", FAILED),
        ("shape {2,700} and {2,719}", FAILED),
    ],
)
def test_messages(text: str, meaning: tuple[ErrorCode, bool]) -> None:
    with pytest.raises(EngineError) as caught:
        refuse(RuntimeError(text))
    assert (caught.value.code, isinstance(caught.value, DeviceLost)) == meaning
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
