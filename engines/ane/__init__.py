"""Core ML on the Apple Neural Engine: fixed-shape functions, placement share, shape and packed admission."""

from typing import Final

REVISION: Final = "mil-encoder-1"
"""The graph builder's revision, part of kernel_revision: raise it whenever a change may change a number."""
