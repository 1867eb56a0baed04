"""The host's array types; numpy is imported for the type checker alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray: TypeAlias = npt.NDArray[np.float32]
    """Vectors or scores."""
    IntArray: TypeAlias = npt.NDArray[np.int32]
    """Token ids."""
