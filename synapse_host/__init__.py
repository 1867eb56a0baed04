"""The host module: selects an engine per lane and supervises single-lane worker processes."""

from __future__ import annotations

TYPE_CHECKING = False
"""Type checkers take it for true; importing typing would cost more than all the rest of this module."""

if TYPE_CHECKING:
    from typing import Any

    from synapse_host.config import HostConfig, Windows
    from synapse_host.errors import SynapseError
    from synapse_host.host import Host
    from synapse_host.results import Generation, Piece
    from synapse_host.sync import SyncHost

__all__ = ["Generation", "Host", "HostConfig", "Piece", "SynapseError", "SyncHost", "Windows"]

_HOMES = {
    "HostConfig": "synapse_host.config",
    "Windows": "synapse_host.config",
    "SynapseError": "synapse_host.errors",
    "Host": "synapse_host.host",
    "SyncHost": "synapse_host.sync",
    "Generation": "synapse_host.results",
    "Piece": "synapse_host.results",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `import synapse_host` stays cheap.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
