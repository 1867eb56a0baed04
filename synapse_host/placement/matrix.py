"""``hw_matrix.yaml`` as frozen types: the only place that says what runs where.

:func:`load` raises :class:`~synapse_host.errors.MatrixInvalid` with ``file:line:column: key.path: what`` and, for a
misspelt key, engine or class, the nearest valid one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from engines.protocol.messages import ANE_ENGINE, CUDA_ENGINE, LLAMA_ENGINE
from synapse_host.errors import MatrixInvalid
from synapse_host.placement.matrix_schema import MATRIX, nearest
from synapse_host.placement.source import Mapping, Mark, Node, Sequence, Source, read

Task: TypeAlias = Literal["embed", "rerank", "generate"]

FILE_NAME: Final = "hw_matrix.yaml"

WORKER_ENGINES: Final = {"llama": LLAMA_ENGINE, "cuda": CUDA_ENGINE, "ane": ANE_ENGINE}
"""The engine name that HELLO must carry, by the matrix's ``engine``."""


class Hardware(Struct, frozen=True):
    """A hardware class; an absent condition holds everywhere."""

    id: str
    os: tuple[str, ...] = ()
    arch: tuple[str, ...] = ()
    min_os: str | None = None
    min_driver_api: int | None = None
    min_compute_capability: str | None = None
    neural_engine: bool | None = None
    cpu_features: tuple[str, ...] = ()


class Engine(Struct, frozen=True):
    """A worker program on a device. ``command`` is None for our own ``python -m engines.<engine>``."""

    id: str
    engine: Literal["llama", "cuda", "ane"]
    device: str
    format: str
    requires: str
    dtype: tuple[str, ...] = ()
    kernel_revision: str | None = None
    pytest_marker: str | None = None
    env: dict[str, str] = {}
    runtime_config: dict[str, str] = {}
    command: tuple[str, ...] | None = None
    thresholds: dict[str, dict[str, float]] = {}
    line: int = 0

    @property
    def worker_engine(self) -> str:
        """The engine name in HELLO."""
        return WORKER_ENGINES[self.engine]

    @property
    def device_kind(self) -> str:
        """``cpu``, ``cuda``, ``metal`` or ``ane``."""
        return self.device.partition(":")[0]


class Lane(Struct, frozen=True):
    """A task and the engines that may serve it, in order."""

    id: str
    task: Task
    engines: tuple[str, ...]
    kind: Literal["catalog", "legacy"] = "catalog"
    pin: str | None = None
    require_certificate: bool = False
    line: int = 0


class HardwareMatrix(Struct, frozen=True):
    """The whole file. ``name`` is how messages call it, ``path`` where it lies."""

    path: Path
    name: str
    hardware: dict[str, Hardware]
    engines: dict[str, Engine]
    lanes: dict[str, Lane]
    thresholds: dict[str, dict[str, float]] = {}

    def threshold(self, engine_id: str, task: str, gate: str) -> float | None:
        """Return one certification threshold: the engine's own (unless it isn't here), or the file's, or None."""
        own = self.engines[engine_id].thresholds.get(task, {}) if engine_id in self.engines else {}
        return own.get(gate, self.thresholds.get(task, {}).get(gate))


def default_path() -> Path:
    """Return the packaged matrix: the repository's in a checkout, the wheel's copy otherwise."""
    package = Path(str(files("synapse_host")))
    checkout = package.parent / FILE_NAME
    return checkout if checkout.is_file() else package / FILE_NAME


def load(path: Path | str | None = None) -> HardwareMatrix:
    """Read and check a matrix file (default: the packaged one). Raises MatrixInvalid."""
    path = default_path() if path is None else Path(path)
    node, source = read(path, _shown(path))
    raw = MATRIX.read(node, source, "")
    assert isinstance(node, Mapping)
    matrix = HardwareMatrix(
        path=path.absolute(),
        name=source.name,
        hardware={id: Hardware(id=id, **fields) for id, fields in raw["hardware"].items()},
        engines={id: _engine(id, fields, _mark(node, "engines", id)) for id, fields in raw["engines"].items()},
        lanes={id: Lane(id=id, line=_mark(node, "lanes", id).line, **fields) for id, fields in raw["lanes"].items()},
        thresholds=raw.get("thresholds", {}),
    )
    _check(matrix, node, source)
    return matrix


def _shown(path: Path) -> str:
    """Return the path as a person would write it: relative where it lies below the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path.name if path == default_path() else os.fspath(path)


def _engine(id: str, fields: dict[str, Any], mark: Mark) -> Engine:
    fields = dict(fields)
    worker = fields.pop("worker", None)
    return Engine(id=id, command=worker["command"] if worker else None, line=mark.line, **fields)


def _mark(node: Node, *keys: str) -> Mark:
    """Return where a key stands."""
    mark = node.mark
    for key in keys:
        assert isinstance(node, Mapping)
        mark, node = node.items[key]
    return mark


def _value_mark(node: Node, *keys: str | int) -> Mark:
    """Return where the value of a key (or list entry) stands."""
    for key in keys:
        if isinstance(key, str):
            assert isinstance(node, Mapping)
            node = node.items[key][1]
        else:
            assert isinstance(node, Sequence)
            node = node.items[key]
    return node.mark


ENCODERS: Final = ("ane", "cuda")
"""Engines that embed and rerank, but don't generate."""
_FITTING: Final = {
    "llama": ({"gguf"}, {"cpu", "metal", "cuda"}),
    "cuda": ({"safetensors-package"}, {"cpu", "cuda"}),
    "ane": ({"coreml"}, {"ane"}),
}


def _check(matrix: HardwareMatrix, node: Node, source: Source) -> None:
    """Check what one key alone can't show: references, and engines whose keys contradict each other."""

    def invalid(what: str, *keys: str | int) -> MatrixInvalid:
        return source.error(_value_mark(node, *keys), _path(keys), what)

    def unknown(what: str, name: str, known: Iterable[str], *keys: str | int) -> MatrixInvalid:
        return invalid(f"no {what} {name!r}{nearest(name, known)}", *keys)

    for engine in matrix.engines.values():
        at = ("engines", engine.id)
        if engine.requires not in matrix.hardware:
            raise unknown("hardware class", engine.requires, matrix.hardware, *at, "requires")
        formats, devices = _FITTING[engine.engine]
        if engine.format not in formats:
            what = f"engine {engine.engine} reads {' or '.join(sorted(formats))}, not {engine.format}"
            raise invalid(what, *at, "format")
        if engine.device_kind not in devices:
            what = f"engine {engine.engine} runs on {' or '.join(sorted(devices))}, not {engine.device}"
            raise invalid(what, *at, "device")
    for lane in matrix.lanes.values():
        for i, id in enumerate(lane.engines):
            if id not in matrix.engines:
                raise unknown("engine", id, matrix.engines, "lanes", lane.id, "engines", i)
            if matrix.engines[id].engine in ENCODERS and lane.task == "generate":
                what = f"engine {id} can't generate; it serves embed and rerank"
                raise invalid(what, "lanes", lane.id, "engines", i)
        if lane.pin is not None and lane.pin not in lane.engines:
            raise unknown("engine of this lane", lane.pin, lane.engines, "lanes", lane.id, "pin")


def _path(keys: tuple[str | int, ...]) -> str:
    path = ""
    for key in keys:
        path = f"{path}[{key}]" if isinstance(key, int) else (f"{path}.{key}" if path else key)
    return path
