"""The production backend: what a machine needs for Core ML, then :mod:`engines.ane.binding`."""

from __future__ import annotations

import platform
import plistlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines.ane import binding
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import ANE_ENGINE
from engines.runtime.engine import Probe

if TYPE_CHECKING:
    from engines.ane.backend import Source

MIN_MACOS: Final = (14, 4)
"""MLComputePlan and optimisation hints; below it there is no placement to gate on."""
MULTI_FUNCTION_MACOS: Final = 15
"""Since when one package may hold several functions (MLModelConfiguration.functionName)."""
VERSION_FILE: Final = Path("/System/Library/CoreServices/SystemVersion.plist")


def mac_version() -> str:
    """Return the macOS version, empty elsewhere."""
    return platform.mac_ver()[0]


def floor() -> str:
    """Return ``ok`` or the code of the first requirement that fails; imports nothing."""
    if platform.system() != "Darwin":
        return "os_unsupported"
    if tuple(int(part) for part in mac_version().split(".")[:2] if part.isdecimal()) < MIN_MACOS:
        return "os_too_old"
    if platform.machine() != "arm64":
        return "arch_unsupported"
    if any(find_spec(name) is None for name in ("objc", "CoreML", "Foundation")):
        return "bindings_missing"
    return "ok"


def probe() -> Probe:
    """Return ``--probe-floor``'s verdict. It has a process of its own, so the framework may be asked for devices."""
    required: dict[str, object] = {"os": "Darwin", "arch": "arm64", "min_os": ".".join(map(str, MIN_MACOS))}
    observed: dict[str, object] = {"os": platform.system(), "arch": platform.machine(), "os_version": mac_version()}
    code = floor()
    if code == "ok":
        try:
            found = binding.devices()
        except ImportError as exc:  # parts of different releases, or built for another Python
            code, observed["bindings"] = "bindings_missing", str(exc)[:300]
        else:
            observed["devices"] = found
            code = "ok" if any("NeuralEngine" in name for name in found) else "no_neural_engine"
    return Probe("ok" if code == "ok" else "refused", code, required, observed)


class CoreML:
    """Opens compiled bundles with MLModel; see :class:`engines.ane.backend.Backend`."""

    engine = ANE_ENGINE

    def __init__(self) -> None:
        self.runtime = f"coreml-macos-{mac_version() or 'none'}"

    def require(self) -> None:
        """Raise EngineError backend_missing where the floor isn't met."""
        code = floor()
        if code != "ok":
            raise EngineError(ErrorCode.BACKEND_MISSING, f"Core ML on the Neural Engine can't run here: {code}")

    def os_build(self) -> str:
        """Return the OS build, such as 24A335."""
        return str(plistlib.loads(VERSION_FILE.read_bytes())["ProductBuildVersion"])

    def open(self, source: Source, *, units: str) -> binding.Handle:
        """Load one function with the configuration that its plan is made with too."""
        if source.multi and int(mac_version().partition(".")[0] or 0) < MULTI_FUNCTION_MACOS:
            why = f"{source.path.name} holds several functions, which needs macOS {MULTI_FUNCTION_MACOS}"
            what = f"this is {mac_version()}: build it again with `python -m engines.ane build --target macos14`"
            raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"{why} and {what}")
        try:
            return binding.Handle(source, units)
        except ImportError as exc:
            why = f"PyObjC is installed and can't be imported ({exc})"
            what = "install the extra 'ane' again, which pins its parts to one release"
            raise EngineError(ErrorCode.BACKEND_MISSING, f"{why}: {what}") from exc
