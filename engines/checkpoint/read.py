"""A Hugging Face style checkpoint: ``config.json`` and safetensors files, mapped; never pickled, never copied whole.

``Checkpoint.open(folder)`` reads a folder, ``Checkpoint.from_package(file, ...)`` the single file of a bundle's
``safetensors-package`` artifact. Canonical tensor names and shapes: ``engines.checkpoint.layout``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from engines.bundle.manifest import BundleError, Task, open_plain
from engines.checkpoint import layout
from engines.checkpoint.layout import Family
from engines.checkpoint.safetensors import MappedTensors, SafetensorsFile

if TYPE_CHECKING:
    from engines.checkpoint.safetensors import FloatArray

MAX_JSON: Final = 64 * 1024 * 1024
FLOAT_DTYPES: Final = ("F32", "F16", "BF16")
SHARD_INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


class CheckpointError(BundleError):
    """A checkpoint can't be used. The message names the file and the key or tensor."""


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
        raw = read_json(folder / "config.json")
        family = family_of(raw, folder / "config.json")
        config = complete_config(raw, family, where=str(folder / "config.json"))
        stored = _stored_tensors(folder)
        task = task or guess_task(raw, family, folder)
        return cls(folder, config, family, task, _select(stored, family, task, config))

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
        full = complete_config(restore_numbers(config), family, where="manifest.json: config")
        stored = dict.fromkeys(package.header.tensors, package)
        return cls(Path(file).parent, full, family, task, _select(stored, family, task, full, int8=int8))

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


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """Read one bounded JSON list of objects, as :func:`read_json` reads one."""
    obj = _read_json(file)
    if not isinstance(obj, list) or not all(isinstance(item, dict) for item in obj):
        raise CheckpointError(f"{file} must hold a JSON list of objects")
    return obj


def _read_json(file: Path) -> Any:

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        obj = dict(items)
        if len(obj) != len(items):
            raise CheckpointError(f"{file}: a key occurs twice")
        return obj

    try:
        with open_plain(file) as handle:
            data = handle.read(MAX_JSON + 1)
    except OSError as exc:
        raise CheckpointError(f"{file}: {exc.strerror or exc}") from exc
    if len(data) > MAX_JSON:
        raise CheckpointError(f"{file} is larger than {MAX_JSON} bytes")
    try:
        obj = json.loads(data, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{file} is not valid JSON: {exc}") from exc
    return obj


def family_of(raw: Mapping[str, Any], where: Path | str) -> Family:
    """Return the family that config.json names by ``model_type``."""
    for family in layout.FAMILIES:
        if raw.get("model_type") == family:
            return family
    raise CheckpointError(
        f"{where}: model_type {raw.get('model_type')!r} is not supported (supported: {', '.join(layout.FAMILIES)})"
    )


def guess_task(raw: Mapping[str, Any], family: Family, folder: Path) -> Task:
    """Guess what a checkpoint is for, from its architecture name and the sentence-transformers files beside it."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if "ForSequenceClassification" in name:
        return "rerank"
    if family in ("bert", "modernbert"):
        return "embed"
    if (folder / "1_LogitScore" / "config.json").exists() or "yes_token_id" in raw:
        return "rerank"
    if (folder / "modules.json").exists() or (folder / "1_Pooling" / "config.json").exists() or name.endswith("Model"):
        return "embed"
    return "generate"


_COUNTS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_LIMIT: Final = 2**31 - 1


def complete_config(raw: Mapping[str, Any], family: Family, *, where: str) -> dict[str, Any]:
    """Return config.json with the family's defaults, rope settings in one spelling, and everything unsupported refused.

    Always present afterwards: vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
    max_position_embeddings (int > 0), head_dim; bert: type_vocab_size, layer_norm_eps; modernbert: norm_eps,
    norm_bias, attention_bias, mlp_bias, classifier_bias, classifier_pooling (cls or mean), local_attention (whole
    window in tokens), global_rope_theta, local_rope_theta, layer_types (``full_attention`` or ``sliding_attention``
    per layer); qwen3 and llama: num_key_value_heads, rms_norm_eps, rope_theta, attention_bias, tie_word_embeddings.
    """
    config = dict(raw)

    def need(ok: bool, key: str, why: str) -> None:
        if not ok:
            raise CheckpointError(f"{where}: {key}: {why}")

    def count(key: str) -> None:
        value = config.get(key)
        need(type(value) is int and 0 < value <= _LIMIT, key, f"{value!r} must be a positive integer")

    def default(**values: Any) -> None:
        for key, value in values.items():
            if config.get(key) is None:
                config[key] = value

    def number(key: str) -> None:
        value = config[key]
        # An int may have any number of digits; a float doesn't.
        need(type(value) in (int, float) and 0 < value < 2**63, key, f"{value!r} must be a positive number below 2^63")
        config[key] = value if key == "local_attention" else float(value)

    for key in _COUNTS:
        count(key)
    need(config["num_hidden_layers"] <= 1024, "num_hidden_layers", "more than 1024 layers")
    default(head_dim=config["hidden_size"] // config["num_attention_heads"])
    count("head_dim")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    need(isinstance(rope, dict), "rope_parameters", "must be an object")
    for kind, part in (("", rope), *((f"{k}.", v) for k, v in rope.items() if isinstance(v, dict))):
        named = part.get("rope_type", part.get("type", "default"))
        need(named == "default", f"rope_parameters.{kind}rope_type", f"{named!r} is not supported, only 'default'")
    if family == "bert":
        default(type_vocab_size=2, layer_norm_eps=1e-12, hidden_act="gelu", position_embedding_type="absolute")
        count("type_vocab_size")
        number("layer_norm_eps")
        need(config["hidden_act"] == "gelu", "hidden_act", f"{config['hidden_act']!r} is not supported, only 'gelu'")
        need(config["position_embedding_type"] == "absolute", "position_embedding_type", "only 'absolute' is supported")
    elif family == "modernbert":
        full, sliding = (rope.get(kind, {}) for kind in ("full_attention", "sliding_attention"))
        need(isinstance(full, dict) and isinstance(sliding, dict), "rope_parameters", "must hold objects")
        default(
            norm_eps=1e-5, norm_bias=False, attention_bias=False, mlp_bias=False, classifier_bias=False,
            classifier_pooling="cls", classifier_activation="gelu", hidden_activation="gelu", local_attention=128,
            global_rope_theta=full.get("rope_theta", 160000.0),
            local_rope_theta=sliding.get("rope_theta", 10000.0),
        )  # fmt: skip
        default(global_attn_every_n_layers=3)
        count("global_attn_every_n_layers")
        every = config["global_attn_every_n_layers"]
        kinds = ["sliding_attention" if n % every else "full_attention" for n in range(config["num_hidden_layers"])]
        default(layer_types=kinds)
        types = config["layer_types"]
        known = isinstance(types, list) and all(kind in ("sliding_attention", "full_attention") for kind in types)
        need(known and len(types) == len(kinds), "layer_types", "must name full_attention or sliding_attention each")
        for key in ("norm_eps", "global_rope_theta", "local_rope_theta", "local_attention"):
            number(key)
        for key in ("hidden_activation", "classifier_activation"):
            need(config[key] == "gelu", key, f"{config[key]!r} is not supported, only 'gelu'")
        need(config["classifier_pooling"] in ("cls", "mean"), "classifier_pooling", "must be cls or mean")
    else:
        default(
            num_key_value_heads=config["num_attention_heads"], rms_norm_eps=1e-6, hidden_act="silu",
            rope_theta=rope.get("rope_theta", 10000.0), attention_bias=False, tie_word_embeddings=family == "qwen3",
        )  # fmt: skip
        count("num_key_value_heads")
        for key in ("rms_norm_eps", "rope_theta"):
            number(key)
        need(config["hidden_act"] == "silu", "hidden_act", f"{config['hidden_act']!r} is not supported, only 'silu'")
        need(not config.get("use_sliding_window"), "use_sliding_window", "sliding windows are not supported")
        grouped = config["num_attention_heads"] % config["num_key_value_heads"] == 0
        need(grouped, "num_key_value_heads", "must divide num_attention_heads")
    if family in ("bert", "modernbert"):
        need(
            config["hidden_size"] % config["num_attention_heads"] == 0, "num_attention_heads", "must divide hidden_size"
        )
    return config


def plain_numbers(config: Any) -> Any:
    """Return a config as a manifest can hold it: floats and huge numbers become strings (``"1e-12"``), nulls go."""
    if isinstance(config, float) or (isinstance(config, int) and config.bit_length() > 63):
        return repr(config)
    if isinstance(config, Mapping):
        return {str(key): plain_numbers(value) for key, value in config.items() if value is not None}
    if isinstance(config, (list, tuple)):
        return [plain_numbers(value) for value in config]
    return config


_FLOAT_KEYS: Final = frozenset(
    {"layer_norm_eps", "norm_eps", "rms_norm_eps", "rope_theta", "global_rope_theta", "local_rope_theta"}
    | {"local_attention"}
)


def restore_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``plain_numbers`` for the keys that are read as numbers here; others keep their string."""
    restored: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            restored[key] = restore_numbers(value)
        elif key in _FLOAT_KEYS and isinstance(value, str):
            try:
                restored[key] = float(value)
            except ValueError:
                raise CheckpointError(f"manifest.json: config.{key}: {value!r} is not a number") from None
        else:
            restored[key] = value
    return restored


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
    stored: Mapping[str, SafetensorsFile], family: Family, task: Task, config: dict[str, Any], *, int8: bool = False
) -> MappedTensors:
    """Pick the required tensors under their canonical names and check dtype and shape of each."""
    places: dict[str, tuple[SafetensorsFile, str]] = {}
    for name, file in stored.items():
        key = layout.canonical(name)
        if key in places:
            raise CheckpointError(f"{file.path}: {places[key][1]!r} and {name!r} are the same tensor {key!r}")
        places[key] = (file, name)
    paths = sorted({str(file.path) for file in stored.values()})
    shapes = (layout.required_int8 if int8 else layout.required)(family, task, config)
    for key, shape in shapes.items():
        if key not in places:
            raise CheckpointError(f"{', '.join(paths)}: tensor {key!r} is missing (a {family} {task} model needs it)")
        file, name = places[key]
        info = file.header.tensors[name]
        at = f"{file.path}: tensor {name!r}"
        if info.shape != shape:
            raise CheckpointError(f"{at} has shape {list(info.shape)}, config.json says {list(shape)}")
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
    return MappedTensors({key: places[key] for key in shapes})
