"""What tests and operators change about a host. Seconds everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines.protocol.messages import DEFAULT_MAX_FRAME


@dataclass(frozen=True, slots=True)
class Windows:
    """Silence windows in seconds (protocol-v3, 4): how long an exchange may show no completed work."""

    setup: float = 600.0
    control: float = 600.0
    ping: float = 120.0
    inference: float = 120.0


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Limits and places of one host."""

    windows: Windows = field(default_factory=Windows)
    handshake: float = 10.0
    """One deadline from spawn to HELLO_ACK."""
    cool_down: float = 600.0
    """How long a quarantined catalog lane stays shut."""
    shutdown_grace: float = 2.0
    """How long a worker may take to obey SHUTDOWN before it is killed."""
    ping_interval: float = 10.0
    """How often an idle worker is asked how it is."""
    health_stale: float = 30.0
    """Health turns ``unknown`` after this long without PONG or validated progress."""
    runtime_dir: Path | None = None
    """None: a private one, removed at exit."""
    models_dir: Path | None = None
    """Where installed bundles lie; None: SYNAPSE_MODELS_DIR, or the user's cache directory."""
    data_dir: Path | None = None
    """Certificates lie below it, in ``synapse/certificates``; None: the user's data directory."""
    log_ring_bytes: int = 8192
    """What is kept of each lane's output."""
    log_lines_per_s: int = 50
    """How many of its lines go to the log."""
    max_frame: int = DEFAULT_MAX_FRAME
    """Bytes of the largest frame on a worker's connection."""
    permits: dict[str, int] | None = None
    """Execution permits by device kind; None: usable cores for ``cpu``, 1 for each accelerator."""
    queue_limit: int = 256
    """Requests that may wait for one lane before ``queue_full``."""
    slice: int = 16
    """Tokens that a generation asks its worker for at once; between two slices the lane's other callers have a turn."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """Lanes of the matrix with the engine that is to serve each, instead of the first that fits."""
    idle_unload: float | None = None
    """How long a lane may have nothing to do before its worker ends, for the memory; the next request starts one."""
    require_certificate: bool = False
    """May only strengthen what the matrix says."""
