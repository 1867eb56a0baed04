"""A Hugging Face style checkpoint: ``config.json`` and safetensors files, mapped; never pickled, never copied whole.

Theory of operation. ``Checkpoint.open(folder)`` reads a folder, ``Checkpoint.from_package(file, ...)`` the single file
of a bundle's ``safetensors-package`` artifact. Both go the same way:

1. ``model_type`` names the family; its class (:mod:`engines.checkpoint.families`) fills in defaults and refuses by key
   what a forward pass here would not follow.
2. The safetensors headers are read and checked against the bytes of their files; a pickle is never opened.
3. Stored names become canonical ones (:mod:`engines.checkpoint.layout`). Every tensor that family and task need must be
   there with its shape and a float dtype; one that is left over is refused unless it can't change a number.

Weights are touched only when somebody asks for a tensor, as a view of the mapped file: an opened checkpoint owns its
maps and nothing else, and any number of threads may read it. What the files beside the weights say (pooling, prompts,
special ids, limits) is read by ``pipeline`` and gathered in ``facts``. At build time ``package`` writes a package,
``quantize`` makes its int8 form, ``dequantize`` recovers weights from a quantised ONNX file and ``reference`` computes
fixtures with transformers; the workers use the reading half alone.

A new family is one file in ``families`` and a row in its table, its spelling included where checkpoints have other keys
and names than its class; a model that computes what BERT computes is a class and a row in ``families.relatives``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engines.bundle.manifest import Family, Task, read_plain, unique_keys
from engines.checkpoint import families, layout
from engines.checkpoint.families import FAMILIES
from engines.checkpoint.families.base import FORMATS, Config, Spelling, need
from engines.checkpoint.families.base import CheckpointError as CheckpointError
from engines.checkpoint.families.relatives import RELATIVES
from engines.checkpoint.safetensors import MappedTensors, SafetensorsFile

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import FloatArray

MAX_JSON: Final = 64 * 1024 * 1024
FLOAT_DTYPES: Final = ("F32", "F16", "BF16")
SHARD_INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """One opened checkpoint.

    ``config``: config.json with the family's defaults filled in, see ``complete_config``. ``task``: the guess of
    ``guess_task`` or what the caller said. ``tensors[name]``: numpy array under the canonical name; float32 and
    float16 are read-only views of the mapped file, bfloat16 comes as a fresh float32 array with the same values.
    Hold one at a time.
    """

    folder: Path
    config: dict[str, Any]
    family: Family
    task: Task
    tensors: MappedTensors

    @classmethod
    def open(cls, folder: Path | str, *, task: Task | None = None) -> Checkpoint:
        """Open and check a checkpoint folder. Raises CheckpointError or BundleError; touches no weights."""
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; a checkpoint is a folder with config.json and {SINGLE}")
        file = folder / "config.json"
        raw = read_json(file)
        relative = RELATIVES.get(str(raw.get("model_type")))
        family: Family = "bert" if relative is not None else family_of(raw, file)
        spelling = relative or FAMILIES[family].spelling
        task = task or guess_task(raw, family, folder)
        try:
            spelling.check(task, str(raw.get("model_type")))
            translated, skipped = spelling.config(raw), spelling.skipped(raw)
        except CheckpointError as exc:
            raise CheckpointError(f"{file}: {exc}") from exc
        config = complete_config(translated, family, where=str(file))
        stored = _stored_tensors(folder)
        tensors = _select(stored, family, task, config, spelling=spelling, skipped=skipped)
        return cls(folder, config, family, task, tensors)

    @classmethod
    def from_package(
        cls,
        file: Path | str,
        *,
        config: Mapping[str, Any],
        family: Family,
        task: Task,
        fd: int | None = None,
        int8: bool = False,
    ) -> Checkpoint:
        """Open a ``safetensors-package`` artifact with the manifest's ``config``, ``family`` and ``task``.

        ``fd``: an open descriptor of the same file (the one that was hashed); *file* then only serves messages.
        ``int8``: the manifest says that the layers' matrices are stored so; ``tensors`` then has their scales and
        the columns apart too (``engines.checkpoint.quantize``).
        """
        package = SafetensorsFile.open(file, fd=fd)
        full = complete_config(config, family, where="manifest.json: config", from_manifest=True)
        stored = dict.fromkeys(package.header.tensors, package)
        return cls(Path(file).parent, full, family, task, _select(stored, family, task, full, int8=int8))

    def need_format(self, format: str) -> None:
        """Refuse to be built as what can't hold this model; the message names the reason and what can."""
        unheld = self.known.unheld(self.task)
        if format in unheld:
            others = " or ".join(f"{name} ({engine})" for name, engine in FORMATS.items() if name not in unheld)
            raise CheckpointError(
                f"a {self.family} {self.task} model can't be built as {format}: {unheld[format]}; build it as {others}"
            )

    @property
    def known(self) -> Config:
        """The config as its family's class."""
        return families.known(self.family, self.config)

    def f32(self, name: str) -> FloatArray:
        """Return one tensor as float32 (a view if it is stored so)."""
        import numpy as np

        return np.asarray(self.tensors[name], np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without touching its data."""
        return self.tensors.info(name).shape

    @property
    def nbytes(self) -> int:
        """Bytes of all selected tensors as stored."""
        return sum(self.tensors.info(name).nbytes for name in self.tensors)

    @property
    def stored_dtype(self) -> str:
        """The widest dtype that occurs, as manifests spell it: f32, f16 or bf16."""
        kinds = {self.tensors.info(name).dtype for name in self.tensors}
        return "f32" if "F32" in kinds or len(kinds) > 1 else kinds.pop().lower()


def read_json(file: Path) -> dict[str, Any]:
    """Read one bounded JSON object; duplicate keys are refused. Raises CheckpointError naming the file."""
    obj = _read_json(file)
    if not isinstance(obj, dict):
        raise CheckpointError(f"{file} must hold one JSON object")
    return obj


def read_optional(file: Path) -> dict[str, Any]:
    """Return what :func:`read_json` reads, or an empty object where there is no such file."""
    return read_json(file) if file.exists() else {}


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """Read one bounded JSON list of objects, as :func:`read_json` reads one."""
    obj = _read_json(file)
    if not isinstance(obj, list) or not all(isinstance(item, dict) for item in obj):
        raise CheckpointError(f"{file} must hold a JSON list of objects")
    return obj


def read_bytes(file: Path) -> bytes:
    """Return the bytes of a checkpoint's side file; CheckpointError for one that is missing, a pipe or too large."""
    try:
        return read_plain(file, MAX_JSON)
    except OSError as exc:
        raise CheckpointError(f"{file}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise CheckpointError(f"{file} is larger than {MAX_JSON} bytes") from exc


def _read_json(file: Path) -> Any:
    data = read_bytes(file)
    try:
        return json.loads(data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{file} is not valid JSON: {exc}") from exc


def family_of(raw: Mapping[str, Any], where: Path | str) -> Family:
    """Return the family that config.json names by ``model_type``."""
    for family in FAMILIES:
        if raw.get("model_type") == family:
            return family
    raise CheckpointError(
        f"{where}: model_type {raw.get('model_type')!r} is not supported: its forward pass isn't known to any engine "
        f"here (supported: {', '.join((*FAMILIES, *RELATIVES))}). Where there is a GGUF of it, build from that, to "
        "embed or generate: synapse build MODEL.gguf OUT"
    )


def guess_task(raw: Mapping[str, Any], family: Family, folder: Path) -> Task:
    """Guess what a checkpoint is for, from its architecture name and the sentence-transformers files beside it."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if "ForSequenceClassification" in name:
        return "rerank"
    if not FAMILIES[family].causal:
        return "embed"
    if (folder / "1_LogitScore" / "config.json").exists() or "yes_token_id" in raw:
        return "rerank"
    if (folder / "modules.json").exists() or (folder / "1_Pooling" / "config.json").exists() or name.endswith("Model"):
        return "embed"
    return "generate"


def complete_config(
    raw: Mapping[str, Any], family: Family, *, where: str, from_manifest: bool = False
) -> dict[str, Any]:
    """Return config.json with the family's defaults, rope settings in one spelling, and everything unsupported refused.

    Always present afterwards: the fields of the family's class (:mod:`engines.checkpoint.families`). *from_manifest*:
    numbers may be strings, as :func:`plain_numbers` writes them. Raises CheckpointError naming the key.
    """
    config = {key: value for key, value in raw.items() if value is not None}
    kind = FAMILIES[family]
    try:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        need(isinstance(rope, dict), "rope_parameters", "must be an object")
        for prefix, part in (("", rope), *((f"{k}.", v) for k, v in rope.items() if isinstance(v, dict))):
            named = part.get("rope_type", part.get("type", "default"))
            need(named == "default", f"rope_parameters.{prefix}rope_type", f"{named!r}: only 'default' is supported")
        thetas: dict[str, Any] = {}
        for key, part in kind.thetas(rope).items():
            need(isinstance(part, dict | None), "rope_parameters", "must hold objects")
            thetas |= {key: part["rope_theta"]} if part and "rope_theta" in part else {}
        known = msgspec.convert(thetas | config, kind, strict=not from_manifest)
        known.complete(raw)
    except (msgspec.ValidationError, CheckpointError) as exc:
        raise CheckpointError(f"{where}: {exc}") from exc
    return config | msgspec.structs.asdict(known)


def plain_numbers(config: Any) -> Any:
    """Return a config as a manifest can hold it: floats and huge numbers become strings (``"1e-12"``), nulls go."""
    if isinstance(config, float) or (isinstance(config, int) and config.bit_length() > 63):
        return repr(config)
    if isinstance(config, Mapping):
        return {str(key): plain_numbers(value) for key, value in config.items() if value is not None}
    if isinstance(config, (list, tuple)):
        return [plain_numbers(value) for value in config]
    return config


def _stored_tensors(folder: Path) -> dict[str, SafetensorsFile]:
    index = folder / SHARD_INDEX
    single = folder / SINGLE
    if single.exists() or not index.exists():
        if not single.exists():
            others = [name for name in ("pytorch_model.bin", "model.ckpt") if (folder / name).exists()]
            hint = f"; {others[0]} is a pickle and is never opened, convert it to safetensors" if others else ""
            raise CheckpointError(f"{folder}: no {SINGLE} (or {SHARD_INDEX}){hint}")
        file = SafetensorsFile.open(single)
        return dict.fromkeys(file.header.tensors, file)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    stored: dict[str, SafetensorsFile] = {}
    for name, shard in weight_map.items():
        if PurePosixPath(shard).name != shard or "\\" in shard or shard in ("", ".."):
            raise CheckpointError(f"{index}: {shard!r} must be a file beside it")
        if shard not in files:
            files[shard] = SafetensorsFile.open(folder / shard)
        if name not in files[shard].header.tensors:
            raise CheckpointError(f"{folder / shard}: tensor {name!r} is missing, the index says it is here")
        stored[name] = files[shard]
    return stored


def _select(
    stored: Mapping[str, SafetensorsFile],
    family: Family,
    task: Task,
    config: dict[str, Any],
    *,
    int8: bool = False,
    spelling: Spelling = Spelling(),  # noqa: B008 - it has no state
    skipped: Mapping[str, int] = MappingProxyType({}),
) -> MappedTensors:
    """Pick the required tensors under their canonical names, which *spelling* says, and check dtype and shape of each.

    *skipped*: rows that a stored tensor has before the first one needed.
    """
    places: dict[str, tuple[SafetensorsFile, str]] = {}
    for name, file in stored.items():
        key = layout.canonical(spelling.canonical(name))
        if key in places:
            raise CheckpointError(f"{file.path}: {places[key][1]!r} and {name!r} are the same tensor {key!r}")
        places[key] = (file, name)
    paths = sorted({str(file.path) for file in stored.values()})
    shapes = (layout.required_int8 if int8 else layout.required)(family, task, config)
    zeros = {key: shapes.pop(key) for key in spelling.made}
    for key, shape in shapes.items():
        if key not in places:
            raise CheckpointError(f"{', '.join(paths)}: tensor {key!r} is missing (a {family} {task} model needs it)")
        file, name = places[key]
        info = file.header.tensors[name]
        at = f"{file.path}: tensor {name!r}"
        whole = (shape[0] + skipped.get(key, 0), *shape[1:])
        if info.shape != whole:
            raise CheckpointError(f"{at} has shape {list(info.shape)}, config.json says {list(whole)}")
        if int8:
            wanted = layout.stored_int8(key, shape)
            if info.dtype != wanted:
                raise CheckpointError(f"{at} has dtype {info.dtype}, an int8 package has {wanted} there")
        elif info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{at} has dtype {info.dtype}, only F32, F16 and BF16 are read")
    for key, (file, name) in places.items():
        if key not in shapes and not layout.ignorable(key, task):
            raise CheckpointError(
                f"{file.path}: tensor {name!r} is not part of a {family} {task} model and can't be left out"
            )
    return MappedTensors({key: places[key] for key in shapes}, skipped=skipped, zeros=zeros)


def quoted(keys: Iterable[str]) -> str:
    """Return the first eight of *keys* in their order, for a message."""
    return ", ".join(repr(key) for key in sorted(keys)[:8])


def only(file: Path, unknown: set[str], what: str) -> None:
    """Refuse keys of a file that aren't known here; *what* they may change."""
    if unknown:
        raise CheckpointError(f"{file}: {quoted(unknown)} isn't known here and may change {what}")


def held(file: Path, conf: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a key whose value isn't one of those that mean what is done here."""
    for key, served in values.items():
        if conf.get(key) not in served:
            raise CheckpointError(f"{file}: {key} is {json.dumps(conf[key])[:200]}, which isn't served")
