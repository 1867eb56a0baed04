"""What of the last calls into the native libraries can be executed without a GPU, and what their errors mean.

tests/rehearsal executes every call of the binding through cuda-python and onnxruntime's CUDA provider.
"""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from pathlib import Path

import pytest
from cuda.bindings import runtime

from engines.cuda import binding
from engines.cuda.faults import KEPT, STICKY, refuse
from engines.cuda.graphs.builder import Graph, Variant, WeightStore
from engines.cuda.graphs.families import build
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.engine import DeviceLost
from tests.cuda.conftest import Bundles, spec_of

NO_DRIVER = pytest.mark.skipif(bool(binding.driver_facts(0).driver_api), reason="this machine has a driver")


def test_no_other_file_imports_a_native_library() -> None:
    for file in Path(binding.__file__).parent.rglob("*.py"):
        if file.name != "binding.py":
            assert not re.search(r"^\s*(from|import) (onnxruntime|cuda)\b", file.read_text(), re.M), file.name


def toy(bundles: Bundles) -> Graph:
    spec, tensors = spec_of(bundles("bert-mean"))
    return build(spec, WeightStore(tensors, "f32"), Variant())


@NO_DRIVER
def test_no_driver_is_a_fact_where_it_is_asked_for_and_an_error_where_it_is_needed() -> None:
    facts = binding.machine_facts(0)
    assert (facts.driver_api, facts.capability) == (0, None)
    with pytest.raises(EngineError, match="CUDA error 35: cudaErrorInsufficientDriver"):
        binding.Cuda(0)


@NO_DRIVER
def test_never_a_cpu_session_in_place_of_a_gpu_one(bundles: Bundles, capfd: pytest.CaptureFixture[str]) -> None:
    """onnxruntime would hand out a CPU session without an exception; ours is refused."""
    with pytest.raises(EngineError) as caught:
        binding.session(toy(bundles), threads=1, cuda={"device_id": "0"})
    assert caught.value.code is ErrorCode.BACKEND_MISSING
    capfd.readouterr()


def test_a_failed_run_is_typed(bundles: Bundles) -> None:
    bound = binding.Binding(binding.session(toy(bundles), threads=1), "cpu", 0)
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

    kept, session = len(KEPT), Session()
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
