"""The production backend: the floor first, then :mod:`engines.ane.binding`. Importing it touches no framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines.ane.floor import floor, mac_version, os_build
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import ANE_ENGINE

if TYPE_CHECKING:
    from engines.ane.backend import Source
    from engines.ane.binding import Handle
    from engines.ane.package import PackageSpec


MULTI_FUNCTION_MACOS: Final = 15
"""Since when one package may hold several functions (MLModelConfiguration.functionName)."""


class CoreML:
    """Opens compiled bundles with MLModel; see :class:`engines.ane.backend.Backend`."""

    engine = ANE_ENGINE
    formats = frozenset({"mlmodelc", "coreml"})
    reads_packages = False

    def __init__(self) -> None:
        self.runtime = f"coreml-macos-{mac_version() or 'none'}"

    def require(self) -> None:
        """Raise EngineError backend_missing where the floor isn't met."""
        code = floor()
        if code != "ok":
            raise EngineError(ErrorCode.BACKEND_MISSING, f"Core ML on the Neural Engine can't run here: {code}")

    def os_build(self) -> str:
        """Return the OS build that specialisation belongs to."""
        return os_build()

    def specs(self, path: Path) -> PackageSpec | None:
        """Compiled bundles don't carry their signature in a documented form: the preparer's record does."""
        return None

    def open(self, source: Source, *, units: str) -> Handle:
        """Load one function with the configuration that its plan is made with too."""
        self.require()
        if source.multi and int(mac_version().partition(".")[0] or 0) < MULTI_FUNCTION_MACOS:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"{source.path.name} holds several functions, which needs macOS {MULTI_FUNCTION_MACOS} and this is "
                f"{mac_version()}: build it again with `python -m engines.ane build --target macos14`",
            )
        from engines.ane.binding import Handle

        try:
            return Handle(source, units)
        except ImportError as exc:
            raise EngineError(
                ErrorCode.BACKEND_MISSING,
                f"PyObjC is installed and can't be imported ({exc}): install the extra 'ane' again, which pins its "
                "parts to one release",
            ) from exc
