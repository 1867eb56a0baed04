"""``hw_matrix.yaml`` as frozen types: the only place that says what runs where.

The Structs of this module are the one schema: msgspec checks a file against them, and ``synapse matrix schema`` prints
them as JSON Schema. A file is read in three steps: :mod:`synapse_host.placement.source` gives plain data that knows its
places, msgspec converts it to :class:`File`, and :func:`_check` looks at what one key alone can't show (an engine that
isn't there, a device that its worker can't drive). :func:`load` raises MatrixInvalid with
``file:line:column: key.path: what`` and, for a misspelt key, engine or class, the nearest valid one. Nothing here looks
at the machine: that is :mod:`synapse_host.placement.hardware`, and :mod:`synapse_host.placement.select` compares both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct
from msgspec import UnsetType as Unset

from engines.protocol.messages import ANE_ENGINE, CUDA_ENGINE, LLAMA_ENGINE
from synapse_host.errors import MatrixInvalid
from synapse_host.placement.source import Keys, Source, nearest, read

FILE_NAME: Final = "hw_matrix.yaml"

WORKER_ENGINES: Final = {"llama": LLAMA_ENGINE, "cuda": CUDA_ENGINE, "ane": ANE_ENGINE}
"""The engine name that HELLO must carry, by the matrix's ``engine``."""

SOME: Final = Meta(min_length=1)
Task: TypeAlias = Literal["embed", "rerank", "generate"]
Os: TypeAlias = Literal["linux", "darwin", "windows"]
Arch: TypeAlias = Literal["x86_64", "arm64"]
Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Feature: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z0-9_]+$", examples=["avx512_bf16"])]
Dtype: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,16}$", examples=["f16"])]
Text: TypeAlias = Annotated[str, Meta(pattern=r"^[^\0]*$")]
Variable: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Setting: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*$")]
Version: TypeAlias = Annotated[str, Meta(pattern=r"^\d+(\.\d+){0,3}$", examples=["14.4"])]
Capability: TypeAlias = Annotated[str, Meta(pattern=r"^\d+\.\d+$", examples=["7.5"])]
Device: TypeAlias = Annotated[str, Meta(pattern=r"^(cpu|metal|ane|cuda(:\d{1,3})?)$", examples=["cpu"])]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Factor: TypeAlias = Annotated[float, Meta(ge=0, le=1000)]


class _Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping of the file with a closed list of keys."""


class EmbedGates(_Part, frozen=True, kw_only=True):
    """Thresholds of embedding lanes."""

    min_cosine: Share | Unset = UNSET
    mean_cosine: Share | Unset = UNSET
    worst_decile: Share | Unset = UNSET
    batch_single: Share | Unset = UNSET


class RerankGates(_Part, frozen=True, kw_only=True):
    """Thresholds of reranking lanes."""

    pearson: Share | Unset = UNSET
    max_error: Factor | Unset = UNSET


class GenerateGates(_Part, frozen=True, kw_only=True):
    """Thresholds of generating lanes."""

    top1: Share | Unset = UNSET
    first_token: Share | Unset = UNSET


class ApproximateGates(_Part, frozen=True, kw_only=True):
    """Thresholds of artifacts in the precision class 'approximate' (int8)."""

    pearson: Share | Unset = UNSET
    top1: Share | Unset = UNSET


class PlacementGates(_Part, frozen=True, kw_only=True):
    """Thresholds of lanes on the Neural Engine."""

    share: Share | Unset = UNSET
    cost_share: Share | Unset = UNSET
    speedup: Factor | Unset = UNSET


class Thresholds(_Part, frozen=True, kw_only=True):
    """Certification thresholds; an engine may override single ones."""

    embed: EmbedGates = EmbedGates()
    rerank: RerankGates = RerankGates()
    generate: GenerateGates = GenerateGates()
    approximate: ApproximateGates = ApproximateGates()
    placement: PlacementGates = PlacementGates()


class HardwareKeys(_Part, frozen=True, kw_only=True):
    """A hardware class: every condition must hold; none at all fits every machine."""

    os: Annotated[tuple[Os, ...], SOME] | Os = ()
    arch: Annotated[tuple[Arch, ...], SOME] | Arch = ()
    min_os: Version | None = None
    min_driver_api: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    min_compute_capability: Capability | None = None
    neural_engine: bool | None = None
    cpu_features: tuple[Feature, ...] | Feature = ()


class Hardware(HardwareKeys, frozen=True, kw_only=True):
    """A hardware class with its name; an absent condition holds everywhere."""

    id: str
    os: tuple[Os, ...] = ()
    arch: tuple[Arch, ...] = ()
    cpu_features: tuple[str, ...] = ()


class Worker(_Part, frozen=True, kw_only=True):
    """Another worker program; its working directory is the file's folder."""

    command: Annotated[tuple[Annotated[str, Meta(pattern=r"^[^\0]+$")], ...], SOME]


class EngineKeys(_Part, frozen=True, kw_only=True):
    """A worker program on a device."""

    engine: Literal["llama", "cuda", "ane"]
    device: Device
    format: Literal["gguf", "safetensors-package", "coreml"]
    requires: Name
    dtype: Annotated[tuple[Dtype, ...], SOME] | Dtype = ()
    kernel_revision: Annotated[str, Meta(pattern=r"^\S{1,256}$")] | None = None
    pytest_marker: Annotated[str, Meta(pattern=r"^[a-z_]+$")] | None = None
    env: dict[Variable, Text] = {}
    runtime_config: dict[Setting, Text] = {}
    worker: Worker | None = None
    thresholds: Thresholds = Thresholds()


class Engine(EngineKeys, frozen=True, kw_only=True):
    """An engine with its name."""

    id: str
    dtype: tuple[str, ...] = ()
    thresholds: dict[str, dict[str, float]] = {}  # type: ignore[assignment]

    @property
    def command(self) -> tuple[str, ...] | None:
        """The foreign worker's command; None for our own ``python -m engines.<engine>``."""
        return self.worker.command if self.worker else None

    @property
    def worker_engine(self) -> str:
        """The engine name in HELLO."""
        return WORKER_ENGINES[self.engine]

    @property
    def device_kind(self) -> str:
        """``cpu``, ``cuda``, ``metal`` or ``ane``."""
        return self.device.partition(":")[0]


class LaneKeys(_Part, frozen=True, kw_only=True):
    """A task and the engines that may serve it; the first that fits is the placement.

    ``choose``: first in the file's order, or by the throughput that certificates recorded on this machine.
    """

    task: Task
    engines: Annotated[tuple[Name, ...], Meta(min_length=1, extra_json_schema={"uniqueItems": True})]
    kind: Literal["catalog", "legacy"] = "catalog"
    pin: Name | None = None
    choose: Literal["order", "fastest"] = "order"
    require_certificate: bool = False


class Lane(LaneKeys, frozen=True, kw_only=True):
    """A lane with its name and the line it is written in."""

    id: str
    line: int = 0


class File(_Part, frozen=True, kw_only=True):
    """hw_matrix.yaml: what runs where."""

    version: Literal[1]
    hardware: Annotated[dict[Name, HardwareKeys], SOME]
    engines: Annotated[dict[Name, EngineKeys], SOME]
    lanes: Annotated[dict[Name, LaneKeys], SOME]
    thresholds: Thresholds = Thresholds()


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


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of hw_matrix.yaml."""
    schema = msgspec.json.schema(File)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": FILE_NAME, **schema}


def default_path() -> Path:
    """Return the packaged matrix: the repository's in a checkout, the wheel's copy otherwise."""
    package = Path(str(files("synapse_host")))
    checkout = package.parent / FILE_NAME
    return checkout if checkout.is_file() else package / FILE_NAME


def load(path: Path | str | None = None) -> HardwareMatrix:
    """Read and check a matrix file (default: the packaged one). Raises MatrixInvalid."""
    path = default_path() if path is None else Path(path)
    source = read(path, _shown(path))
    file = source.convert(File)
    matrix = HardwareMatrix(
        path=path.absolute(),
        name=source.name,
        hardware={id: Hardware(id=id, **_fields(keys)) for id, keys in file.hardware.items()},
        engines={id: Engine(id=id, **_fields(keys)) for id, keys in file.engines.items()},
        lanes={id: Lane(id=id, line=source.line("lanes", id), **_fields(keys)) for id, keys in file.lanes.items()},
        thresholds=msgspec.to_builtins(file.thresholds),
    )
    _check(matrix, source)
    return matrix


def _fields(keys: HardwareKeys | EngineKeys | LaneKeys) -> dict[str, Any]:
    """Return what the file says of one class, engine or lane; a bare word where a list may be is a list of one."""
    found = msgspec.structs.asdict(keys)
    for name in ("os", "arch", "cpu_features", "dtype"):
        if isinstance(found.get(name), str):
            found[name] = (found[name],)
    return found | ({"thresholds": msgspec.to_builtins(found["thresholds"])} if "thresholds" in found else {})


def _shown(path: Path) -> str:
    """Return the path as a person would write it: relative where it lies below the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path.name if path == default_path() else os.fspath(path)


ENCODERS: Final = ("ane", "cuda")
"""Engines that embed and rerank, but don't generate."""
_FITTING: Final = {
    "llama": ({"gguf"}, {"cpu", "metal", "cuda"}),
    "cuda": ({"safetensors-package"}, {"cpu", "cuda"}),
    "ane": ({"coreml"}, {"ane"}),
}


def _check(matrix: HardwareMatrix, source: Source) -> None:
    """Check what one key alone can't show: references, and engines whose keys contradict each other."""

    def unknown(what: str, name: str, known: Iterable[str], *keys: str | int) -> MatrixInvalid:
        return source.error(f"no {what} {name!r}{nearest(name, known)}", keys)

    for engine in matrix.engines.values():
        at: Keys = ("engines", engine.id)
        if engine.requires not in matrix.hardware:
            raise unknown("hardware class", engine.requires, matrix.hardware, *at, "requires")
        formats, devices = _FITTING[engine.engine]
        if engine.format not in formats:
            what = f"engine {engine.engine} reads {' or '.join(sorted(formats))}, not {engine.format}"
            raise source.error(what, (*at, "format"))
        if engine.device_kind not in devices:
            what = f"engine {engine.engine} runs on {' or '.join(sorted(devices))}, not {engine.device}"
            raise source.error(what, (*at, "device"))
    for lane in matrix.lanes.values():
        for i, id in enumerate(lane.engines):
            at = ("lanes", lane.id, "engines", i)
            if id in lane.engines[:i]:
                raise source.error(f"{id!r} is listed twice", at)
            if id not in matrix.engines:
                raise unknown("engine", id, matrix.engines, *at)
            if matrix.engines[id].engine in ENCODERS and lane.task == "generate":
                raise source.error(f"engine {id} can't generate; it serves embed and rerank", at)
        if lane.pin is not None and lane.pin not in lane.engines:
            raise unknown("engine of this lane", lane.pin, lane.engines, "lanes", lane.id, "pin")
