"""Which engine a lane gets, and why each other choice was passed over. Pure: values in, values out.

Theory of operation of the room. The matrix says what may run where (:mod:`synapse_host.placement.matrix`), the profile
what this machine is (:mod:`synapse_host.placement.hardware`), and a floor what an engine says of it itself: its worker
is started with ``--probe-floor`` in a throw-away child, so that a driver that crashes or hangs takes nothing with it
(:mod:`synapse_host.placement.probe`; answers are kept per boot, operating system, driver and installed packages).
:func:`select` compares them: an engine fits when its hardware class holds, its own floor says yes, and the bundle has
an artifact of its format (and dtype list). The first that fits is the placement, and each other engine gets its reason.

:mod:`synapse_host.placement.assignment` does that once for every matrix lane and every model of its task, when a host
opens, and turns each placement into a LaneSpec: the command, its environment and the LOAD that follows every handshake.
Nothing is decided again later: a lane that fails is never moved to another engine, since numbers would change under the
caller. Detection blocks (files, sysctl, children side by side), so the host calls it in a thread; all else is instant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import structs

from engines.bundle.manifest import Artifact, Bundle
from engines.checkpoint.layout import INT8
from synapse_host.errors import BackendMissing, InvalidRequest

if TYPE_CHECKING:
    from synapse_host.placement.hardware import HostProfile
    from synapse_host.placement.matrix import Engine, Hardware, HardwareMatrix
    from synapse_host.placement.probe import Floor

OS_NAMES: Final = {"darwin": "macOS", "linux": "Linux", "windows": "Windows"}

_DTYPE_ORDER: Final = {"llama": ("f16", "f32", "q8_0"), "cuda": ("f16", "f32"), "ane": ("f16",)}


@dataclass(frozen=True, slots=True)
class Considered:
    """One engine of a lane: ``yes`` it is the placement, ``no`` and why, or ``not_reached``."""

    engine: str
    verdict: Literal["yes", "no", "not_reached"]
    reason: str

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form of ``synapse matrix explain``."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision about one lane; ``engine`` is None when nothing fits. ``artifact`` is None without a bundle."""

    lane: str
    engine: str | None
    artifact: Artifact | None
    considered: tuple[Considered, ...]

    def why_not(self) -> str:
        """Return one line on why nothing fits."""
        return "; ".join(f"{item.engine}: {item.reason}" for item in self.considered)


def lane_with(matrix: HardwareMatrix, task: str, engine: str) -> str:
    """Return the first lane of *task* that lists *engine*; the task's own where none does, for its error."""
    lanes = (lane.id for lane in matrix.lanes.values() if lane.task == task and engine in lane.engines)
    return next(lanes, task)


def pinned(
    matrix: HardwareMatrix, engines: Mapping[str, str], *, profile: HostProfile, bundles: Iterable[Bundle]
) -> HardwareMatrix:
    """Return the matrix with the lanes of *engines* (lane: engine) pinned to what a caller chose for them.

    Raises InvalidRequest for what is no lane, or an engine that its lane doesn't list, and BackendMissing for one that
    fits no bundle of the lane's task here; both list the engines of the lane that do.
    """
    bundles = list(bundles)
    lanes = dict(matrix.lanes)
    for lane_id, engine in engines.items():
        lane = lanes.get(lane_id)
        if lane is None:
            raise InvalidRequest(f"no lane {lane_id!r} (have: {', '.join(lanes)})", details={"known": list(lanes)})
        mine = [bundle for bundle in bundles if bundle.manifest.task == lane.task]
        tried = {id: [fit(matrix, matrix.engines[id], profile, one) for one in mine] for id in lane.engines}
        usable = [id for id, found in tried.items() if any(fits for fits, _, _ in found)]
        details = {"lane": lane_id, "engine": engine, "known": usable}
        choice = f"(fit here: {', '.join(usable) or 'none'})"
        if engine not in lane.engines:
            raise InvalidRequest(f"lane {lane_id} has no engine {engine!r} {choice}", details=details)
        if mine and engine not in usable:
            _, _, reason = tried[engine][0]
            raise BackendMissing(f"lane {lane_id}: {engine} can't be used: {reason} {choice}", details=details)
        lanes[lane_id] = structs.replace(lane, pin=engine)
    return structs.replace(matrix, lanes=lanes)


def select(matrix: HardwareMatrix, *, lane_id: str, profile: HostProfile, bundle: Bundle | None = None) -> Placement:
    """Return the first engine of the lane that fits. Without a bundle the format is not looked at.

    First in the matrix's order, or, where the lane says ``choose: fastest``, by the throughput that certificates of
    this bundle recorded here; engines without one come after those, in the matrix's order.
    """
    lane = matrix.lanes[lane_id]
    speeds = profile.speeds.get(bundle.digest, {}) if bundle is not None and lane.choose == "fastest" else {}
    considered: list[Considered] = []
    chosen: str | None = None
    artifact: Artifact | None = None
    for id in sorted(lane.engines, key=lambda id: -speeds.get(id, 0.0)):
        measured = f"; certified here at {speeds[id]:,.0f} tokens/s" if id in speeds else ""
        if chosen is not None:
            considered.append(Considered(id, "not_reached", f"not reached{measured}"))
        elif lane.pin is not None and id != lane.pin:
            considered.append(Considered(id, "no", f"the lane is pinned to {lane.pin}"))
        else:
            fits, found, reason = fit(matrix, matrix.engines[id], profile, bundle)
            considered.append(Considered(id, "yes" if fits else "no", reason + measured))
            if fits:
                chosen, artifact = id, found
    return Placement(lane_id, chosen, artifact, tuple(considered))


def fit(
    matrix: HardwareMatrix, engine: Engine, profile: HostProfile, bundle: Bundle | None
) -> tuple[bool, Artifact | None, str]:
    """Return whether an engine fits, the bundle's artifact that it takes, and why."""
    reason = hardware_reason(matrix.hardware[engine.requires], profile) or floor_reason(engine, profile)
    if reason is not None:
        return False, None, reason
    artifact, reason = _artifact(engine, profile, bundle)
    return bundle is None or artifact is not None, artifact, reason


def hardware_reason(hardware: Hardware, profile: HostProfile) -> str | None:
    """Return which condition of a hardware class fails on this machine, or None when all hold."""
    name = f"hardware {hardware.id}"
    if hardware.os and profile.os not in hardware.os:
        return f"{name}: os is {profile.os}, needs {' or '.join(hardware.os)}"
    if hardware.arch and profile.arch not in hardware.arch:
        return f"{name}: arch is {profile.arch}, needs {' or '.join(hardware.arch)}"
    if hardware.min_os is not None and _version(profile.os_version) < _version(hardware.min_os):
        system = OS_NAMES.get(profile.os, profile.os)
        return f"{name}: {system} is {profile.os_version}, needs {hardware.min_os}"
    missing = [feature for feature in hardware.cpu_features if feature not in profile.cpu_features]
    if missing:
        return f"{name}: cpu lacks {', '.join(missing)}"
    if hardware.neural_engine is not None and profile.neural_engine is not hardware.neural_engine:
        return f"{name}: {'no Neural Engine' if hardware.neural_engine else 'a Neural Engine is present'}"
    if hardware.min_driver_api is not None or hardware.min_compute_capability is not None:
        return _driver_reason(hardware, profile, name)
    return None


def _driver_reason(hardware: Hardware, profile: HostProfile, name: str) -> str | None:
    floor = profile.floors.get("cuda:cuda")
    if profile.driver_api is None:
        # A probe that broke, or that lacks what it asks the driver with, knows nothing of a driver.
        if floor is not None and (floor.status == "failed" or floor.code.startswith("cuda_runtime_missing")):
            return f"{name}: {floor_text(floor)}"
        return f"{name}: no NVIDIA driver"
    if hardware.min_driver_api is not None and profile.driver_api < hardware.min_driver_api:
        return f"{name}: driver API is {profile.driver_api}, needs {hardware.min_driver_api}"
    if hardware.min_compute_capability is not None:
        capability = profile.compute_capability
        if capability is None:
            return f"{name}: no device"
        if capability < _version(hardware.min_compute_capability):
            have = f"{capability[0]}.{capability[1]}"
            return f"{name}: compute capability is {have}, needs {hardware.min_compute_capability}"
    return None


def floor_reason(engine: Engine, profile: HostProfile) -> str | None:
    """Return why the engine's own probe says no, or None. A foreign worker command is not probed."""
    if engine.command is not None:
        return None
    floor = profile.floors.get(f"{engine.engine}:{engine.device_kind}")
    if floor is None:
        return "was not probed"
    return None if floor.status == "ok" else floor_text(floor)


def floor_text(floor: Floor) -> str:
    """Return a floor's answer in words."""
    if floor.status == "failed":
        return floor.why
    code, _, detail = floor.code.partition(":")
    text = _FLOOR_TEXTS.get(code, floor.code)
    if code == "cuda_driver_too_old":
        return f"{text}: API {_get(floor.observed, 'driver_api')}, needs {_get(floor.required, 'driver_api')}"
    if code == "cuda_compute_capability_too_low":
        return f"{text}: {_capability(floor.observed)}, needs {_capability(floor.required)}"
    if has_no_code(floor):
        return f"onnxruntime-gpu has no machine code for this device ({detail.removeprefix('onnxruntime-')})"
    return f"{text}: {detail}" if detail else text


def has_no_code(floor: Floor) -> bool:
    """Tell whether the CUDA runtime has no machine code for the device, which nothing to install would bring."""
    return floor.code.startswith("cuda_runtime_missing:onnxruntime-sm_")


_FLOOR_TEXTS: Final = {
    "ok": "fits",
    "cuda_no_driver": "no NVIDIA driver",
    "cuda_driver_too_old": "the NVIDIA driver is too old",
    "cuda_compute_capability_too_low": "the NVIDIA device is too old",
    "cuda_runtime_missing": "a library is missing",
    "model_unsupported": "the model is not supported",
    "os_unsupported": "needs macOS",
    "os_too_old": "needs macOS 14.4",
    "arch_unsupported": "needs Apple silicon",
    "bindings_missing": "PyObjC's Core ML bindings are not installed",
    "no_neural_engine": "no Neural Engine",
    "llama_missing": "llama-cpp-python is not installed",
    "cpu_unsupported": "llama-cpp-python was built for another CPU",
}


def _get(values: dict[str, Any] | None, key: str) -> Any:
    return (values or {}).get(key, "unknown")


def _capability(values: dict[str, Any] | None) -> str:
    value = _get(values, "compute_capability")
    return f"{value.get('major')}.{value.get('minor')}" if isinstance(value, dict) else str(value)


def _artifact(engine: Engine, profile: HostProfile, bundle: Bundle | None) -> tuple[Artifact | None, str]:
    if bundle is None:
        return None, f"{engine.device} is usable; the bundle needs format {engine.format}"
    name = bundle.manifest.model_id
    found = bundle.artifacts(engine.format)
    if not found:
        have = ", ".join(sorted({artifact.format for artifact in bundle.manifest.artifacts}))
        return None, f"bundle {name} has no format {engine.format} (has: {have})"
    ranked = dtype_order(engine, profile, [artifact.dtype for artifact in found])
    if not ranked:
        have = ", ".join(artifact.dtype for artifact in found)
        takes = ", ".join(engine.dtype) or f"{INT8} only where its dtype list says so"
        if INT8 in engine.dtype and engine.device_kind != "cpu":
            takes += f" ({INT8} on a CPU only)"
        return None, f"bundle {name} has {engine.format} in {have}, the engine takes {takes}"
    artifact = next(item for item in found if item.dtype == ranked[0])
    reason = f"bundle {name} has format {engine.format} ({artifact.dtype})"
    if engine.engine == "llama" and engine.device_kind == "cpu" and artifact.dtype == fastest_dtype(profile):
        reason += "; cpu has avx512-bf16" if artifact.dtype == "bf16" else "; fastest on a cpu with avx512-fp16"
    return artifact, reason


def fastest_dtype(profile: HostProfile) -> str | None:
    """Return the GGUF dtype llama.cpp multiplies fastest on this processor, or None where its usual order holds.

    With AVX512-BF16 alone (AMD EPYC, MiniLM, 256 mixed texts) bf16 did 248 texts/s and f16 190. Intel's processors that
    have AVX512-FP16 too execute bf16 products at half the rate of f32 ones: docs/performance.md, section 2.
    """
    if "avx512_fp16" in profile.cpu_features:
        return "f32"
    return "bf16" if "avx512_bf16" in profile.cpu_features else None


def dtype_order(engine: Engine, profile: HostProfile, dtypes: list[str]) -> list[str]:
    """Return the dtypes an engine takes, best first.

    The matrix's list is both order and limit. Without one: the engine's own order, then the others as the manifest has
    them. bf16 on a processor without avx512_bf16 goes to the end. int8 is approximate: it is taken on a CPU only, and
    only where the list names it.
    """
    on_cpu = engine.device_kind == "cpu"
    if not (on_cpu and INT8 in engine.dtype):
        dtypes = [dtype for dtype in dtypes if dtype != INT8]
    if engine.dtype:
        ranked = [dtype for dtype in engine.dtype if dtype in dtypes]
    else:
        own = _DTYPE_ORDER[engine.engine]
        if engine.engine == "cuda" and on_cpu:
            own = ("f32", "f16")
        if engine.engine == "llama" and on_cpu and (fastest := fastest_dtype(profile)):
            own = (fastest, *own)
        ranked = list(dict.fromkeys([dtype for dtype in own if dtype in dtypes] + dtypes))
    if on_cpu and "avx512_bf16" not in profile.cpu_features and "bf16" in ranked:
        ranked = [dtype for dtype in ranked if dtype != "bf16"] + ["bf16"]
    return ranked


def _version(text: str) -> tuple[int, ...]:
    """Return a version's leading numbers without trailing zeros: ``6.1.0-rc1`` is (6, 1)."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
