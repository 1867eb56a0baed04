"""The owned worker: identity, hardware floor, LOAD. Nothing heavy is imported before LOAD.

How the room works. A CudaEngine is made when the process starts. HELLO says what numbers this worker would compute:
the manifest's digest and a kernel revision, made of the sources of the graphs and of the session options, the runtime's
version, the kind of device and the precision. Only the driver is asked, no context is opened.

LOAD (``load``) checks the request, the manifest and the settings, then the hardware floor (``floor``, with facts from
``binding``), then the artifact: header, digest, weights. ``assembly`` builds the family's graphs (``graphs``), makes a
session of each, puts them behind a device (``devices``) and runs them once. On the GPU one ``binding.Cuda`` owns the
stream, all memory and the weights, which all sessions share; whatever fails, it is closed last and nothing is left.

A request (``model``) is checked against the manifest, then ``buckets`` plans it: rows sorted by length and cut into
buckets. ``pipeline`` takes the buckets through the device one after the other: ``staging`` fills a slot of host memory
with the token rows, the device submits it, and its rows are collected later. Two slots on the GPU, one a thread on the
CPU: the host prepares a slot while the device works on another.

One request at a time, on the worker's main thread. The CPU device has a pool whose threads only run sessions. A native
error becomes a typed one in ``faults``: out of memory halves the bucket once, a lost device ends the process after the
answer, everything else fails the request. Only ``binding`` calls onnxruntime and CUDA.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from engines.bundle import manifest as bundles
from engines.bundle.manifest import Bundle, BundleError
from engines.cuda import floor
from engines.cuda.settings import PRECISION_VARIABLE
from engines.machine import installed_version
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Request
from engines.runtime.engine import OWNED_SERVING, Engine, EngineIdentity, Probe, WorkerOptions

if TYPE_CHECKING:
    from engines.cuda.graphs.builder import Precision
    from engines.protocol.messages import Load
    from engines.runtime.engine import Model
    from engines.runtime.progress import ProgressReporter


class CudaEngine(Engine):
    """onnxruntime on the GPU, or with ``--device cpu`` the portable onnx-cpu lane: same graphs, same loop."""

    name: ClassVar[str] = "owned-cuda"
    serves: ClassVar[frozenset[type[Request]]] = OWNED_SERVING
    max_models: ClassVar[int | None] = 1
    ref_prefix: ClassVar[str] = "owned-cuda"

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.on_cpu = options.device == "cpu"
        self.precision: Precision = self._precision()
        self._bundle: Bundle | None = None
        self._bundle_error = "the worker was started without --manifest"
        if options.manifest is not None:
            try:
                self._bundle = bundles.read(options.manifest)
            except BundleError as exc:
                # HELLO goes out without a digest: a deployment error for the host. Dying here would be a strike.
                self._bundle_error = str(exc)

    def identity(self) -> EngineIdentity:
        """Return what HELLO says, from metadata, the manifest, this package's source and the driver's word on a GPU."""
        version = runtime_version()
        flags = {
            "backend": "cpu" if self.on_cpu else "cuda", "family": "worker", "dtype": self.precision,
            "device": self.options.device, "risk_class": "abort_capable",
        }  # fmt: skip
        if self.on_cpu:
            flags["hardware_floor"] = "skipped"
        else:
            flags["minimum_cuda_driver_api"] = str(floor.MIN_DRIVER_API)
            flags["minimum_device_cc"] = "{}.{}".format(*floor.MIN_CAPABILITY)
        return EngineIdentity(
            engine=self.name, version=f"onnxruntime-{version}", build_flags=flags,
            manifest_digest=self._bundle.digest if self._bundle is not None else None,
            kernel_revision=kernel_revision(version, self.options.device, self.precision, self._capability()),
        )  # fmt: skip

    def probe_floor(self) -> Probe:
        """Return the floor's verdict; on the CPU only the runtime must be there."""
        if self.on_cpu:
            return floor.skipped(missing_package())
        from engines.cuda import binding

        return floor.judge(binding.machine_facts(self._index()))

    def load(self, request: Load, *, progress: ProgressReporter) -> Model:
        """Verify and load one package; see :mod:`engines.cuda.load`."""
        from engines.cuda.load import load

        if self._bundle is None:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, self._bundle_error)
        return load(
            request, self._bundle, device=self.options.device, precision=self.precision, probe=self.probe_floor,
            progress=progress,
        )  # fmt: skip

    def _index(self) -> int:
        return int(self.options.device.partition(":")[2] or 0)

    def _capability(self) -> tuple[int, int] | None:
        """Ask the driver for the compute capability, without a context; None on the CPU or without a driver."""
        if self.options.device.partition(":")[0] != "cuda":
            return None
        from engines.cuda import binding

        return binding.driver_facts(self._index()).capability

    def _precision(self) -> Precision:
        allowed = ("f32",) if self.on_cpu else ("f16", "f32")
        text = os.environ.get(PRECISION_VARIABLE, allowed[0])
        if text not in allowed:
            wrong = f"{PRECISION_VARIABLE}={text!r} must be {' or '.join(allowed)} on {self.options.device}"
            print(wrong, file=sys.stderr)
            raise SystemExit(2)
        return cast("Precision", text)


def kernel_revision(version: str, device: str, precision: str, capability: tuple[int, int] | None = None) -> str:
    """Name the numerics: graphs and options, runtime version, kind of device, precision (protocol-v3, 2).

    On a GPU also its compute capability, by which onnxruntime and cuBLAS choose their kernels.
    """
    kind = device.partition(":")[0] + ("-sm_{}{}".format(*capability) if capability else "")
    return f"graph-{source_revision()}/onnxruntime-{version}/{kind}/{precision}"


def source_revision() -> str:
    """Return 12 hex digits over the sources that decide the numbers: the graphs, session and provider options."""
    import hashlib

    here, digest = Path(__file__).parent, hashlib.sha256()
    for path in (*sorted(here.joinpath("graphs").glob("*.py")), here / "options.py"):
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:12]


def missing_package() -> str | None:
    """Return the first Python package that building and running a graph lacks, without importing any."""
    from importlib.util import find_spec

    return next((name for name in ("onnxruntime", "onnx") if find_spec(name) is None), None)


def runtime_version() -> str:
    """Return the installed onnxruntime's version; the library isn't imported for HELLO."""
    return installed_version("onnxruntime_gpu", "onnxruntime") or "missing"
