"""What a supervisor needs to know to run one lane: made from matrix, placement and bundle, fixed at open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

LaneKind: TypeAlias = Literal["catalog", "legacy"]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The LOAD that follows every handshake of this lane."""

    artifact_path: str
    artifact_digest: str
    format: str
    runtime_config: dict[str, str] = field(default_factory=dict)

    def number(self, key: str, default: int) -> int:
        """Return a whole number of ``runtime_config``; *default* where it has none, or what a worker will refuse."""
        setting = self.runtime_config.get(key, "").strip()
        return int(setting) if setting.isdecimal() and len(setting) <= 10 else default


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """One running lane: one model, one worker, one generation, one strike count."""

    lane_id: str
    """The matrix lane's name, or ``<lane>:<model>`` where several models share it."""
    model: str
    kind: LaneKind
    engine_id: str
    """The engine's name in the matrix, such as ``llama-cpu``."""
    expected_engine: str
    """The engine name HELLO must carry, such as ``llama.cpp-worker``."""
    owned: bool
    """Owned workers report manifest_digest and kernel_revision and get ``--manifest``."""
    device: str
    """``--device`` value: ``cpu``, ``cuda[:N]``, ``metal`` or ``ane``; HELLO must echo it in ``build_flags.device``."""
    command: tuple[str, ...]
    """Program and leading arguments; the host appends ``--socket``, ``--nonce``, ``--device`` and so on."""
    load: LoadSpec
    cwd: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    """Extra variables for the worker, from the matrix."""
    manifest_path: Path | None = None
    manifest_digest: str | None = None
    kernel_revision: str | None = None
    """The matrix pin, if any."""
    packed_widths: tuple[int, ...] = ()
    stdin: int | None = None
    """Descriptor the worker inherits as standard input: the Neural Engine's lane lock. None: nothing."""
    own_worker: bool = True
    """False for a foreign ``worker.command``: no SIGUSR1 before the kill."""

    @property
    def device_kind(self) -> str:
        """``cpu``, ``cuda``, ``metal`` or ``ane``: whose execution permits inference takes."""
        return self.device.partition(":")[0]
