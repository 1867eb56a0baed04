"""The only file that touches onnxruntime, the NVIDIA driver and the CUDA runtime.

Sources, one tag a call:
[D] NVIDIA CUDA driver API and [R] runtime API, as cuda-python wraps them: a tuple of status and results, and an
exception where there is no driver; [P] onnxruntime Python API reference, [K] header files of session and run option
keys, [E] CUDA execution provider page.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engines.cuda import dlpack
from engines.cuda.faults import STICKY, refuse
from engines.cuda.floor import LINUX, WINDOWS, Facts
from engines.cuda.options import CPU_OPTIMIZERS_OFF, CUDA_OPTIMIZERS_OFF, session_entries
from engines.protocol.errors import EngineError, ErrorCode

# Since 1.31 onnxruntime keeps a database of events and sends them to its maker unless this is set before its import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from engines.cuda.graphs.builder import Graph


def driver_facts(index: int) -> Facts:
    """Ask the driver about device *index*; opens no context and no artifact."""
    try:
        from cuda.bindings import driver

        if driver.cuInit(0)[0]:  # [D] cuInit: before any other driver call
            return Facts()
        version = int(driver.cuDriverGetVersion()[1])  # [D]: 1000 x major + 10 x minor
        status, device = driver.cuDeviceGet(index)  # [D]
        if status:
            return Facts(version)
        names = (f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}" for part in ("MAJOR", "MINOR"))
        kinds = [getattr(driver.CUdevice_attribute, name) for name in names]
        major, minor = (int(driver.cuDeviceGetAttribute(kind, device)[1]) for kind in kinds)  # [D] attributes 75 and 76
        name = driver.cuDeviceGetName(64, device)[1]  # [D]
    except ImportError:
        return Facts(missing="cuda-python")
    except RuntimeError:  # cuda.pathfinder's DynamicLibNotFoundError: no libcuda at all
        return Facts()
    return Facts(version, (major, minor), device=bytes(name).rstrip(b"\0 ").decode())


def machine_facts(index: int) -> Facts:
    """Return what the floor is judged by: the driver's facts and, where there is a device, the libraries."""
    facts = driver_facts(index)
    return facts if facts.capability is None else msgspec.structs.replace(facts, missing=missing_library())


def missing_library() -> str | None:
    """Return the first of the provider's libraries that can't be opened; opened here, its own lookup finds them."""
    folder, names, provider = WINDOWS if sys.platform == "win32" else LINUX
    for name in names:
        wheels = [str(path) for root in sys.path if (path := Path(root, folder, name)).is_file()]
        if not any(_opens(candidate) for candidate in (*wheels, name)):
            return name
    runtime = importlib.util.find_spec("onnxruntime")
    found = runtime is not None and runtime.origin and Path(runtime.origin).parent.joinpath("capi", provider).is_file()
    return None if found else "onnxruntime-gpu"


def _opens(library: str) -> bool:
    try:
        return bool(ctypes.CDLL(library))
    except OSError:
        return False


def session(
    graph: Graph, *,
    threads: int, spin: bool = False, cpus: str = "",
    cuda: dict[str, str] | None = None, shared: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Create a session, by *cuda* on the GPU only (EngineError); *cpus*: of its threads but the caller's, from 1.

    *shared*: weights by name that lie on the device already (:meth:`Cuda.upload`); the session makes no copy of them.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()  # [P] SessionOptions
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False  # [P]: patterns are cached per input shape, and shapes vary here
    options.log_severity_level = 3
    for key, value in session_entries(cuda=cuda is not None, spin=spin, cpus=cpus).items():
        options.add_session_config_entry(key, value)  # [K]
    values = [ort.OrtValue.ortvalue_from_numpy(array) for array in graph.weights.values()]  # [P]: no copy on the CPU
    options.add_external_initializers(list(graph.weights), values)  # [P]: what graph optimisation may look into
    for name, tensor in (shared or {}).items():
        if name in graph.weights:
            options.add_initializer(name, tensor)  # [P]: what runs
    wanted = "CPUExecutionProvider" if cuda is None else "CUDAExecutionProvider"
    off = list(CPU_OPTIMIZERS_OFF if cuda is None else CUDA_OPTIMIZERS_OFF)
    providers = [(wanted, cuda or {})]  # [E] options
    try:
        made = ort.InferenceSession(graph.model, options, providers, enable_fallback=0, disabled_optimizers=off)  # [P]
    except Exception as exc:  # onnxruntime's classes share no base below Exception
        refuse(exc, creating=True)
    # [P] get_provider_graph_assignment_info: which provider every node went to, after graph optimisation
    elsewhere = {part.ep_name for part in made.get_provider_graph_assignment_info()} - {wanted}
    if made.get_providers()[0] != wanted or elsewhere:  # [P]
        raise EngineError(
            ErrorCode.BACKEND_MISSING, f"nodes ran on {sorted(elsewhere) or 'another provider'}, not {wanted}"
        )
    made.disable_fallback()  # [P]: run() must not retry on the CPU either
    return made


class Binding:
    """Inputs and output of one shape, by address: nothing is copied or allocated by onnxruntime."""

    def __init__(self, made: Any, device: str, index: int) -> None:
        import numpy as np

        self._np, self._session, self._device, self._index = np, made, device, index
        self._binding = made.io_binding()  # [P] InferenceSession.io_binding

    def input(self, name: str, shape: tuple[int, ...], address: int, *, host: bool = False) -> None:
        """Bind an int32 input; *host*: an operator reads it on the CPU side, also on the GPU."""
        where, index = ("cpu", 0) if host else (self._device, self._index)
        self._binding.bind_input(name, where, index, self._np.int32, shape, address)  # [P] IOBinding.bind_input

    def output(self, name: str, shape: tuple[int, ...], address: int) -> None:
        """Bind the float32 output."""
        self._binding.bind_output(name, self._device, self._index, self._np.float32, shape, address)  # [P]

    def run(self, entries: dict[str, str]) -> None:
        """Run with run option *entries*. On the GPU this submits and returns. Raises EngineError."""
        import onnxruntime as ort

        options = ort.RunOptions()  # [P] RunOptions
        for key, value in entries.items():
            options.add_run_config_entry(key, value)  # [K]
        try:
            self._session.run_with_iobinding(self._binding, options)  # [P]
        except Exception as exc:  # as in session(): no common base class
            refuse(exc)


class Cuda:
    """One device's stream, memory and events; no arithmetic happens here. Owns all it makes until :meth:`close`."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        from cuda.bindings import runtime

        self._rt, self.index = runtime, index
        self._owned: list[tuple[Callable[[Any], Any], Any]] = []
        self._call(runtime.cudaSetDevice(index))  # [R]: makes the primary context, the one onnxruntime uses, current
        made = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)  # [R]
        self.stream = self._own(made, runtime.cudaStreamDestroy)  # [R]

    def _own(self, result: Any, release: Callable[[Any], Any]) -> Any:
        value = self._call(result)
        self._owned.append((release, value))
        return value

    def _call(self, result: Any) -> Any:
        status = int(result[0])
        if status:
            refuse(RuntimeError(f"CUDA error {status}: {result[0].name}"))
        return result[1] if len(result) == 2 else result[1:]

    def pinned(self, size: int) -> tuple[npt.NDArray[Any], int]:
        """Return (uint8 array, address) of page-locked host memory."""
        import numpy as np

        made = self._rt.cudaHostAlloc(size, self._rt.cudaHostAllocDefault)  # [R]
        address = int(self._own(made, self._rt.cudaFreeHost))  # [R]
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)), address

    def memory(self, size: int) -> int:
        """Return the address of device memory."""
        return int(self._own(self._rt.cudaMalloc(size), self._rt.cudaFree))  # [R]

    def upload(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
        """Return *arrays* as tensors on the device, in one block of memory, for any number of sessions."""
        import onnxruntime as ort

        sizes = [-(-array.nbytes // 256) * 256 for array in arrays.values()]
        address, tensors = self.memory(max(sum(sizes), 1)), {}
        for (name, array), size in zip(arrays.items(), sizes, strict=True):
            if array.nbytes:
                self.copy(address, array.ctypes.data, array.nbytes, up=True)
            tensors[name] = ort.OrtValue.from_dlpack(dlpack.capsule(address, array, self.index))  # [P]
            address += size
        self._call(self._rt.cudaStreamSynchronize(self.stream))  # [R]
        return tensors

    def event(self) -> Any:
        """Return an event whose waiter sleeps instead of spinning."""
        flags = self._rt.cudaEventBlockingSync | self._rt.cudaEventDisableTiming
        return self._own(self._rt.cudaEventCreateWithFlags(flags), self._rt.cudaEventDestroy)  # [R]

    def copy(self, target: int, source: int, size: int, *, up: bool) -> None:
        """Queue a copy between host and device memory; only page-locked host memory lets the host go on meanwhile."""
        kinds = self._rt.cudaMemcpyKind
        kind = kinds.cudaMemcpyHostToDevice if up else kinds.cudaMemcpyDeviceToHost
        self._call(self._rt.cudaMemcpyAsync(target, source, size, kind, self.stream))  # [R]

    def record(self, event: Any) -> None:
        """Mark the queue's current end."""
        self._call(self._rt.cudaEventRecord(event, self.stream))  # [R]

    def wait(self, event: Any) -> None:
        """Sleep until everything before *event* has finished."""
        self._call(self._rt.cudaEventSynchronize(event))  # [R]

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        free, total = self._call(self._rt.cudaMemGetInfo())  # [R]
        return int(free), int(total)

    def settle(self) -> None:
        """Wait until nothing is queued. Raises DeviceLost; any other error belongs to a run that has reported it.

        For use after a failed run: its copies may still read a slot, and neither onnxruntime nor cuBLAS always reports
        a lost device as such.
        """
        if not self._owned:  # closed: the stream is gone
            return
        result = self._rt.cudaStreamSynchronize(self.stream)  # [R]
        if int(result[0]) in STICKY.values():
            self._call(result)

    def close(self) -> None:
        """Release everything made here, the newest first, the stream last. Idempotent.

        A failure doesn't keep the rest from being released; the first one is raised at the end.
        """
        failed = None
        while self._owned:
            release, value = self._owned.pop()
            result = release(value)
            failed = failed or (result if int(result[0]) else None)
        if failed is not None:
            self._call(failed)
