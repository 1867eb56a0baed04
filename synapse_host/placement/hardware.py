"""What this machine is: processor, memory, operating system, and each engine's floor.

Plain facts are read in-process (files, sysctl); anything that touches a driver is asked in a child (`probe`).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines import machine
from synapse_host.placement import places
from synapse_host.placement import probe as floors
from synapse_host.placement.places import NoHome
from synapse_host.placement.probe import Floor, FloorCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from synapse_host.placement.matrix import HardwareMatrix

_TELLING: Final = ("avx512_fp16", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")
"""Instruction sets that decide how fast an engine is, the most telling first."""
_ARCH: Final = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class HostProfile:
    """One machine as placement sees it. Sizes in bytes; ``floors`` by ``engine:device``."""

    os: str
    """linux, darwin or windows."""
    arch: str
    """x86_64 or arm64."""
    os_version: str
    os_build: str
    cpu_model: str
    cpu_features: frozenset[str]
    cores: int
    """Usable cores: after affinity and cgroup quota, rounded down, at least 1."""
    cores_total: int
    quota: float | None
    """cgroup limit in cores, None where there is none."""
    ram_total: int
    ram_free: int
    floors: dict[str, Floor] = field(default_factory=dict)
    nvidia_driver: str | None = None
    """Version of NVIDIA's kernel module (Linux): one driver API covers many of them."""
    nvidia_models: tuple[str, ...] = ()
    """The NVIDIA devices by model (Linux), sorted, each once."""

    speeds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Tokens per second that valid certificates recorded here: by bundle digest, then by engine of the matrix."""

    @property
    def driver_api(self) -> int | None:
        """CUDA driver API version, None without a driver (or before the probe)."""
        value = self._cuda().get("driver_api")
        return value if isinstance(value, int) else None

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability of the first NVIDIA device."""
        value = self._cuda().get("compute_capability")
        if isinstance(value, dict) and isinstance(value.get("major"), int) and isinstance(value.get("minor"), int):
            return value["major"], value["minor"]
        return None

    @property
    def neural_engine(self) -> bool:
        """True when the ANE worker's probe says yes."""
        floor = self.floors.get("ane:ane")
        return floor is not None and floor.status == "ok"

    def _cuda(self) -> dict[str, object]:
        floor = self.floors.get("cuda:cuda")
        return (floor.observed if floor else None) or {}

    def summary(self) -> str:
        """Return ``linux x86_64, 2 cores, avx512-bf16`` and the like."""
        parts = [f"{self.os} {self.arch}", f"{self.cores} core{'s' if self.cores != 1 else ''}"]
        best = next((name for name in _TELLING if name in self.cpu_features), "")
        if best:
            parts.append(best.replace("_", "-"))
        return ", ".join(parts)


def os_name() -> str:
    """Return linux, darwin or windows."""
    return "windows" if sys.platform == "win32" else "darwin" if sys.platform == "darwin" else "linux"


def detect(keys: Iterable[tuple[str, str]] = (), *, fresh: bool = False, limit: float | None = None) -> HostProfile:
    """Return this machine's profile with the floors of *keys* (engine, device kind).

    *fresh* asks every engine anew; otherwise answers of this boot are reused. *limit*: as of :func:`probe.ask`.
    Blocking: call it in a thread.
    """
    import psutil

    memory = psutil.virtual_memory()
    driver, models = nvidia()
    return HostProfile(
        os=os_name(),
        arch=_ARCH.get(platform.machine().lower(), platform.machine().lower()),
        os_version=_os_version(),
        os_build=os_build(),
        cpu_model=_cpu_model(),
        cpu_features=_cpu_features(),
        cores=machine.usable_cores(),
        cores_total=os.cpu_count() or 1,
        quota=machine.cpu_quota(),
        ram_total=memory.total,
        ram_free=memory.available,
        floors=floors.ask(set(keys), cache=_floor_cache(), fresh=fresh, limit=limit),
        nvidia_driver=driver,
        nvidia_models=models,
    )


def floor_keys(matrix: HardwareMatrix, engine_ids: Iterable[str]) -> set[tuple[str, str]]:
    """Return which floors the engines need: our own workers', and the driver's where a class asks about it."""
    keys: set[tuple[str, str]] = set()
    for id in engine_ids:
        engine = matrix.engines[id]
        hardware = matrix.hardware[engine.requires]
        if hardware.os and os_name() not in hardware.os:
            continue
        if engine.command is None:
            keys.add((engine.engine, engine.device_kind))
        if hardware.min_driver_api is not None or hardware.min_compute_capability is not None:
            keys.add(("cuda", "cuda"))
        if hardware.neural_engine is not None:
            keys.add(("ane", "ane"))
    return keys


def nvidia(root: Path = Path("/proc/driver/nvidia")) -> tuple[str | None, tuple[str, ...]]:
    """Return the kernel module's version and the devices' models, as its files tell them; no serial numbers."""
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", (root / "version").read_text())
        texts = [file.read_text() for file in root.glob("gpus/*/information")]
    except OSError:
        return None, ()
    models = {match.group(1).strip() for text in texts if (match := re.search(r"^Model:(.+)$", text, re.MULTILINE))}
    return found.group(1) if found else None, tuple(sorted(models))


def _floor_cache() -> FloorCache | None:
    """Return what keeps probe answers; None where this user has no place for them."""
    try:
        return FloorCache(places.cache() / "probes", machine_id())
    except NoHome:
        return None


def machine_id() -> str:
    """Return what names this boot of this operating system build and its driver; it holds no serial number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        boot = str(int(psutil.boot_time()))
    return f"{boot} {os_build()} {nvidia()[0] or ''}".rstrip()


def os_build() -> str:
    """Return the operating system's build: the Darwin build (23F79), Windows' version, or the kernel's release."""
    return (_sysctl("-n", "kern.osversion") if sys.platform == "darwin" else "") or _os_version()


def _os_version() -> str:
    if sys.platform == "darwin":
        return platform.mac_ver()[0]
    return platform.version() if sys.platform == "win32" else platform.release()


@cache
def _cpuinfo() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            return file.read(16 * 1024)
    except OSError:
        return ""


def _cpu_model() -> str:
    if sys.platform == "darwin":
        return _sysctl("-n", "machdep.cpu.brand_string") or platform.processor()
    return cpu_name(_cpuinfo()) or platform.processor() or platform.machine()


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's name; Linux on ARM gives numbers of implementer and part instead."""
    found = dict(re.findall(r"^(model name|CPU (?:implementer|part|variant))\s*:\s*(.+?)\s*$", cpuinfo, re.MULTILINE))
    if "model name" in found:
        return str(found["model name"])
    return ", ".join(f"{key} {value}" for key, value in sorted(found.items()))


def _cpu_features() -> frozenset[str]:
    """Instruction sets by their /proc/cpuinfo names; on macOS the hw.optional switches that are on."""
    if sys.platform == "darwin":
        lines = re.findall(r"^hw\.optional\.(?:arm\.)?(?:FEAT_)?(\w+): 1$", _sysctl("hw.optional"), re.MULTILINE)
        return frozenset(line.lower() for line in lines)
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def _sysctl(*arguments: str) -> str:
    try:
        command = ("/usr/sbin/sysctl", *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=2, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
