"""The hardware floor: what a machine needs before Core ML is even imported (interfaces.md, floor codes)."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engines.runtime.engine import Probe

MIN_MACOS: Final = (14, 4)
"""MLComputePlan and optimisation hints; below it there is no placement to gate on."""
VERSION_FILE: Final = Path("/System/Library/CoreServices/SystemVersion.plist")


def mac_version() -> str:
    """Return the macOS version, empty elsewhere."""
    return platform.mac_ver()[0]


def floor(system: str | None = None, version: str | None = None, machine: str | None = None) -> str:
    """Return ``ok`` or the code of the first requirement that fails; imports nothing. Arguments are for tests."""
    if (platform.system() if system is None else system) != "Darwin":
        return "os_unsupported"
    parts = (mac_version() if version is None else version).split(".")[:2]
    if tuple(int(part) for part in parts if part.isdecimal()) < MIN_MACOS:
        return "os_too_old"
    if (platform.machine() if machine is None else machine) != "arm64":
        return "arch_unsupported"
    if any(find_spec(name) is None for name in ("objc", "CoreML", "Foundation")):
        return "bindings_missing"
    return "ok"


def os_build() -> str:
    """Return the OS build, such as 24A335; ``none`` off macOS."""
    if platform.system() != "Darwin":
        return "none"
    import plistlib

    return str(plistlib.loads(VERSION_FILE.read_bytes())["ProductBuildVersion"])


def probe() -> Probe:
    """Return the ``--probe-floor`` verdict. It runs in a process of its own, so it may ask the framework for
    devices."""
    required: dict[str, object] = {"os": "Darwin", "arch": "arm64", "min_os": ".".join(map(str, MIN_MACOS))}
    observed: dict[str, object] = {"os": platform.system(), "arch": platform.machine(), "os_version": mac_version()}
    code = floor()
    if code == "ok":
        from engines.ane.binding import devices

        try:
            found = devices()
        except ImportError as exc:  # parts of different releases, or built for another Python
            code, observed["bindings"] = "bindings_missing", str(exc)[:300]
        else:
            observed["devices"] = found
            code = "ok" if any("NeuralEngine" in name for name in found) else "no_neural_engine"
    return Probe("ok" if code == "ok" else "refused", code, required, observed)
