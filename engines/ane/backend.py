"""The seam above the last call into the framework: open a function, run it, ask for its plan, close it.

Production has one implementation (:mod:`engines.ane.coreml`, PyObjC). Tests pass another one, which runs packages op
by op on any machine under a name of its own, by constructor argument; no configuration can select it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engines.ane.compute_plan import Function
    from engines.ane.inputs import Feeds
    from engines.ane.signature import FunctionSpec

HINTS: Final = "reshapeFrequency=infrequent"
"""Every shape is fixed, so Core ML may spend its time on the first load."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one function lives: the compiled bundle, and its name there."""

    path: Path
    function: str
    multi: bool
    """False for a single-function package: then no function name may be set on its configuration."""


class Program(Protocol):
    """One loaded function. One call at a time: input arrays are shared between calls."""

    def run(self, feeds: Feeds) -> Mapping[str, npt.NDArray[np.float32]]:
        """Run once; return dense float32 arrays the caller owns, by output name. EngineError on a failed prediction."""

    def plan(self) -> Function | None:
        """Return where the framework intends to run each operation of this function, None where it won't say."""

    def signature(self) -> FunctionSpec:
        """Return what the loaded model says of its own inputs and outputs."""

    def close(self) -> None:
        """Release the model, autorelease pool drained; idempotent."""


class Backend(Protocol):
    """One way to run Core ML functions."""

    engine: str
    """HELLO engine name."""
    runtime: str
    """What the numbers come from, for kernel_revision; known without importing the framework."""

    def require(self) -> None:
        """Raise EngineError backend_missing, with the reason, where this machine can't run it."""

    def os_build(self) -> str:
        """Return the OS build that specialisation and placement belong to."""

    def open(self, source: Source, *, units: str) -> Program:
        """Load one function. EngineError: backend_missing, artifact_invalid, ane_resources_exhausted, oom."""
