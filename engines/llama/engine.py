"""The llama worker's engine: who it is, whether it can run here, and LOAD (llama-cuda.md, 4.1).

Theory of operation. Nothing here touches the native library before LOAD; HELLO is answered from package metadata and
file names alone. What only LOAD or the probe needs is imported there: a worker says HELLO some 20 ms earlier for it.

LOAD opens the file once and does everything through that descriptor: ``gguf`` reads and bounds the header, the digest
is computed and compared, ``binding`` lets llama.cpp read the tensors, and the file is checked for changes meanwhile.
What llama.cpp would answer with an abort is refused by the header checks, and weights that don't fit the free memory
before they are allocated.

A ``LlamaModel`` then serves the requests, one at a time, on the main thread. It checks lengths and ids, lets ``inputs``
cut rows into chunks, and computes each chunk in a context of ``contexts``, which checks memory before it makes one; a
small model's chunks run side by side on a thread pool, one context a thread. Generation goes through ``sequences``,
which keeps the caches of the last prompts. Pooling is done here in float32, since llama.cpp's own goes wrong silently.
Progress is reported by the code that finished a layer, a block or a token, from any thread.

Contexts are freed before their model, at UNLOAD; one whose call failed is freed at once: what it holds is in doubt.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from engines import machine
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import LLAMA_ENGINE, Load, Request
from engines.runtime.engine import SEGMENT_SERVING, Engine, EngineIdentity, Model, Probe, WorkerOptions

if TYPE_CHECKING:
    from engines.llama import gguf
    from engines.llama.binding import NativeModel
    from engines.runtime.progress import ProgressReporter

PACKAGE: Final = "llama_cpp"
DISTRIBUTION: Final = "llama-cpp-python"
BACKENDS: Final = ("cuda", "vulkan", "metal")
"""Accelerators named by the ``libggml-*`` file of a build; without one it is a CPU build."""
PROBE_TIMEOUT_S: Final = {"cpu": 30, "metal": 100}
"""Seconds for the library to load in the probe's child; Metal compiles its kernels when it is registered first."""
_LIBRARY: Final = re.compile(r"(?:lib)?ggml-([a-z]+)\.(?:so|dylib|dll)")
_X86_FEATURES: Final = {
    "SSE3": "pni", "SSSE3": "ssse3", "AVX": "avx", "AVX2": "avx2", "AVX_VNNI": "avx_vnni", "F16C": "f16c", "FMA": "fma",
    "BMI2": "bmi2", "AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8",
}  # fmt: skip
"""llama.cpp's word for a CPU feature -> the kernel's word in /proc/cpuinfo."""


class Installation(NamedTuple):
    """The installed llama-cpp-python, as its files tell."""

    folder: Path
    version: str
    backend: str
    """What it was compiled for: ``cpu``, ``metal``, ``cuda`` or ``vulkan``."""


class LlamaEngine(Engine):
    """llama.cpp in a worker process; any number of models."""

    name: ClassVar[str] = LLAMA_ENGINE
    serves: ClassVar[frozenset[type[Request]]] = SEGMENT_SERVING
    ref_prefix: ClassVar[str] = "llama"

    def __init__(self, options: WorkerOptions) -> None:
        self._installation = find_installation()
        compiled = self._installation.backend if self._installation is not None else "cpu"
        wanted = options.device.partition(":")[0]
        # What isn't compiled in can't be promised: HELLO then says cpu, and the host refuses the lane by name.
        self.backend = wanted if wanted in ("cpu", compiled) else "cpu"
        self.device = options.device if self.backend == wanted else "cpu"

    def identity(self) -> EngineIdentity:
        """Return name, version and build flags, from package metadata."""
        found = self._installation
        return EngineIdentity(
            engine=self.name,
            version=f"{DISTRIBUTION}-{found.version if found is not None else 'missing'}",
            build_flags={
                "device": self.device,
                "backend": self.backend,
                "compiled_backend": found.backend if found is not None else "none",
                "risk_class": "abort_capable",
            },
        )

    def probe_floor(self) -> Probe:
        """Return ``ok``, ``llama_missing`` or ``cpu_unsupported``; the library is tried in a child."""
        import platform
        import signal
        import subprocess

        required: dict[str, object] = {"package": DISTRIBUTION}
        found = self._installation
        if found is None:
            return Probe("refused", "llama_missing", required, None)
        observed: dict[str, object] = {
            "version": found.version,
            "compiled_backend": found.backend,
            "machine": platform.machine(),
        }
        self._keep_off_the_gpu()
        # The library is compiled for one CPU and dies of an illegal instruction on a lesser one, so a child tries it.
        home = Path(__file__).parents[2]
        command = [sys.executable, "-c", "from engines.llama.binding import system_info as s; print(s())"]
        limit = PROBE_TIMEOUT_S.get(self.backend, 30)

        def refused(code: str, **seen: object) -> Probe:
            return Probe("refused", code, required, observed | seen)

        try:
            child = subprocess.run(command, capture_output=True, timeout=limit, check=False, cwd=home)  # noqa: S603
        except subprocess.TimeoutExpired:
            return refused("llama_missing", error=f"the library did not load within {limit} s")
        if child.returncode in (-getattr(signal, "SIGILL", 4), 0xC000001D):
            why = f"illegal instruction: {DISTRIBUTION} was built for another CPU, rebuild it here"
            return refused("cpu_unsupported", error=why)
        if child.returncode != 0:
            lines = child.stderr.decode("utf-8", "replace").strip().splitlines()
            return refused("llama_missing", error=lines[-1] if lines else f"exit status {child.returncode}")
        features = compiled_features(child.stdout.decode("utf-8", "replace"))
        required["cpu_features"] = sorted(features & set(_X86_FEATURES))
        if missing := missing_features(features):
            return refused("cpu_unsupported", missing_cpu_features=missing)
        return Probe("ok", "ok", required, observed)

    def load(self, request: Load, *, progress: ProgressReporter) -> Model:
        """Check configuration, header and digest, then load from the same descriptor.

        Unit of progress: a MiB hashed, then a tensor read. Raises EngineError ``config_invalid``, ``backend_missing``,
        ``artifact_invalid``, ``model_unsupported`` or ``oom``; all or nothing.
        """
        from engines.llama import config, gguf
        from engines.runtime.artifact import expected_digest, open_artifact

        if request.format != "gguf":
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID, f"format is {request.format[:40]!r}, the llama worker only loads gguf"
            )
        self._keep_off_the_gpu()
        settings = config.parse(request.runtime_config, backend=self.backend, cores=machine.usable_cores())
        expected_digest(request.artifact_digest)
        if self._installation is None:
            raise EngineError(ErrorCode.BACKEND_MISSING, f"{DISTRIBUTION} is not installed: install the 'llama' extra")
        with open_artifact(request.artifact_path) as file:
            header = gguf.read_header(file.fileno())
            file.verify(request.artifact_digest, progress)
            native = self._load_native(file.fileno(), header, settings.gpu_layers, progress)
            try:
                from engines.llama.model import LlamaModel

                model = LlamaModel(native, header, settings, typeless=loses_token_types(file.fileno(), header))
                file.recheck(progress)
                return model
            except BaseException:
                native.close()
                raise

    def _keep_off_the_gpu(self) -> None:
        """Register no Metal device in a CPU worker: llama.cpp would compile all its kernels for it."""
        if self.backend == "cpu":
            os.environ.setdefault("GGML_METAL_DEVICES", "0")

    def _load_native(
        self, descriptor: int, header: gguf.Header, gpu_layers: int, progress: ProgressReporter
    ) -> NativeModel:
        from engines.llama.binding import NativeModel, supports_offload

        if self.backend != "cpu" and not supports_offload():
            raise EngineError(
                ErrorCode.BACKEND_MISSING, f"backend_unavailable: llama.cpp offers no {self.backend} on this machine"
            )
        _require_memory(header)
        try:
            return NativeModel(descriptor, gpu_layers=gpu_layers, on_tensor=progress.advance)
        except EngineError:
            _require_memory(header)  # llama.cpp gives no reason, so a sound file and too little room means room
            raise


def find_installation() -> Installation | None:
    """Return the installed llama-cpp-python without importing it, or None when it or its library is missing."""
    for entry in sys.path:
        folder = Path(entry or os.curdir, PACKAGE)
        names = [path.name for path in (folder / "lib").glob("*ggml*")]
        if names and (folder / "__init__.py").is_file():
            break
    else:
        return None
    found = {match.group(1) for name in names if (match := _LIBRARY.fullmatch(name))}
    backend = next((backend for backend in BACKENDS if backend in found), "cpu")
    return Installation(folder, machine.installed_version(DISTRIBUTION.replace("-", "_")) or "unknown", backend)


def compiled_features(system_info: str) -> set[str]:
    """Return the CPU features llama.cpp says it was compiled for, in its own words."""
    return set(re.findall(r"(\w+) = 1\b", system_info))


def missing_features(features: set[str], *, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return which *features* this CPU lacks; nothing where the kernel doesn't list x86 flags."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return []
    if flags is None:
        return []
    have = set(flags.group(1).split())
    return sorted(name for name, flag in _X86_FEATURES.items() if name in features and flag not in have)


def loses_token_types(descriptor: int, header: gguf.Header) -> bool:
    """Return whether a BERT cross-encoder was trained with two token types that llama.cpp would not feed.

    llama.cpp adds type 0 to every token. That is harmless with one type or two equal ones, or where the vocabulary is
    split so that the shifted ids carry type 1.
    """
    if not header.has_rank_head or header.token_type_vocab_offset is not None:
        return False
    table = header.tensors.get("token_types.weight")
    if table is None or len(table.shape) != 2 or table.shape[1] < 2:
        return False
    from engines.llama import gguf

    rows = gguf.read_rows(descriptor, header, "token_types.weight")
    return rows is None or bool((rows[0] != rows[1]).any())


def _require_memory(header: gguf.Header) -> None:
    free = machine.free_memory()
    if header.tensor_bytes > free:
        raise EngineError(
            ErrorCode.OOM, f"the weights take {header.tensor_bytes} bytes, {free} bytes are free on this machine"
        )
