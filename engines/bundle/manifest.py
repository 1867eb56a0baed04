"""``manifest.json``: types, canonical bytes, digest, and validation that names the key.

Theory of operation. A bundle is a folder that host and workers both read, so what it says must mean the same at both
ends. The manifest is parsed strictly (:func:`parse_strict`: one object, no key twice, no floats), since its digest is
taken over canonical bytes: an owned worker says the digest in HELLO, and the host compares it with its own. No floats
occur in it: a non-integer number is a string such as ``"1e-12"`` (protocol-v3, 2; interfaces.md, "A bundle's
manifest.json"). Then msgspec turns the object into a :class:`Manifest` and refuses unknown keys, and ``_validate``
checks what types can't say: which keys a task needs, and that every path stays inside the folder.

Reading opens the manifest alone. A file it names is opened, as a plain file and never a pipe (:func:`open_plain`), and
compared with its digest by whoever uses it: ``digest`` hashes files and Core ML's folders, ``fixtures`` reads reference
fixtures, ``preparation`` finds what a machine compiled from an artifact, ``tight`` plans packed passes by the same
rules at both ends. All of it is pure or reads files; nothing keeps state, so any thread may use it. Everything that
can't be used raises :class:`BundleError`, whose sentence names file, key and what to do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from engines.protocol.messages import Pooling

FILE_NAME: Final = "manifest.json"
MAX_BYTES: Final = 4 * 1024 * 1024

FILES: Final = ("tokenizer", "fixtures", "dense")
"""Keys of the files that a manifest names beside its artifacts."""
Family: TypeAlias = Literal[
    "bert", "modernbert", "mpnet", "nomic_bert", "gemma3_text", "qwen3", "qwen2", "llama", "mistral"
]
FamilyName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Task: TypeAlias = Literal["embed", "rerank", "generate"]
Score: TypeAlias = Literal["sigmoid", "identity"]
Digest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**32 - 1)]


class BundleError(Exception):
    """A bundle can't be used. The message names the file, the key and what to do."""


class FileRef(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the bundle, by relative path and digest."""

    path: str
    digest: Digest


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled function of a Core ML package: a bucket or a packed width, in tokens."""

    name: str
    bucket: Positive | UnsetType = UNSET
    packed_width: Positive | UnsetType = UNSET


class Artifact(Struct, frozen=True, forbid_unknown_fields=True):
    """One loadable artifact. ``coreml`` ones are folders: ``digest`` the compatible one, ``tree`` the injective one."""

    format: str
    path: str
    digest: Digest
    dtype: str
    bytes: int | UnsetType = UNSET
    tree: Digest | UnsetType = UNSET
    layers: Positive | UnsetType = UNSET
    functions: list[Function] | UnsetType = UNSET
    files: int | UnsetType = UNSET


class DenseLayer(Struct, frozen=True, forbid_unknown_fields=True):
    """A dense layer: ``activation(x @ weight.T + bias)``; *activation* is the name of a class of torch.nn."""

    in_features: Positive
    out_features: Positive
    activation: str


class DenseLayers(Struct, frozen=True, forbid_unknown_fields=True):
    """Dense layers behind the pooling, which the host applies, and the file of their weights."""

    path: str
    digest: Digest
    layers: list[DenseLayer]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a model is.

    ``dims``: vector width (embed), 1 (rerank), hidden size (generate). ``family``: a :data:`Family` where the bundle
    was built from a checkpoint, llama.cpp's name of the architecture (``phi3``, ``gemma3``) where it holds somebody
    else's GGUF. ``prompts``: texts, by name, that the model was trained to see before others; ``default_prompt`` names
    the one that is used where a caller names none. ``dense``: layers between the pooling and the normalisation;
    ``dims`` is the width behind them. ``truncate_dim``: how many of ``dims`` numbers the host gives of a vector where a
    caller doesn't say.
    """

    manifest_version: Literal[1]
    model_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    family: FamilyName
    task: Task
    dims: Positive
    max_tokens: Positive
    artifacts: list[Artifact]
    pooling: Pooling | UnsetType = UNSET
    normalize: bool | UnsetType = UNSET
    score: Score | UnsetType = UNSET
    tokenizer: FileRef | UnsetType = UNSET
    special_ids: dict[str, TokenId] | UnsetType = UNSET
    head: dict[str, Any] | UnsetType = UNSET
    token_types: bool | UnsetType = UNSET
    config: dict[str, Any] | UnsetType = UNSET
    fixtures: FileRef | UnsetType = UNSET
    chat_template: str | UnsetType = UNSET
    prompts: dict[str, str] | UnsetType = UNSET
    default_prompt: str | UnsetType = UNSET
    truncate_dim: Positive | UnsetType = UNSET
    dense: DenseLayers | UnsetType = UNSET
    license: str | UnsetType = UNSET
    source: str | UnsetType = UNSET

    @property
    def worker_dims(self) -> int:
        """The width of what a worker returns; the host's dense layers come behind it."""
        return self.dims if self.dense is UNSET else self.dense.layers[0].in_features

    @property
    def worker_normalizes(self) -> bool:
        """Whether a worker normalises its vectors; behind dense layers the host does it."""
        return self.normalize is True and self.dense is UNSET


class Bundle(Struct, frozen=True):
    """A manifest in its folder. ``digest``: lowercase hex SHA-256 of the canonical bytes, without a prefix."""

    root: Path
    manifest: Manifest
    digest: str

    def path(self, relative: str) -> Path:
        """Return a file's absolute path; the manifest was checked to stay inside the folder."""
        return self.root / relative

    def artifacts(self, format: str) -> list[Artifact]:
        """Return the artifacts of one format, in manifest order."""
        return [artifact for artifact in self.manifest.artifacts if artifact.format == format]


def canonical_bytes(obj: Any) -> bytes:
    """Return the canonical JSON bytes of a plain manifest object (protocol-v3, 2), without a final newline."""
    return _CANONICAL.encode(obj).encode()


def unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build one JSON object, as ``object_pairs_hook``; ValueError for a key that occurs twice."""
    obj: dict[str, Any] = {}
    for key, value in items:
        if key in obj:
            raise ValueError(f"key {key[:80]!r} occurs twice")
        obj[key] = value
    return obj


def parse_strict(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return one JSON object and its canonical bytes; BundleError for duplicate keys, floats, NaN and other types."""
    try:
        obj = _STRICT.decode(data.decode("utf-8"))
        canonical = canonical_bytes(obj)  # half a surrogate pair has no UTF-8 form, so no digest either
    except (ValueError, RecursionError) as exc:
        raise BundleError(f"{FILE_NAME} is not valid JSON: {exc}") from exc
    if not isinstance(obj, dict):
        raise BundleError(f"{FILE_NAME} must hold one JSON object")
    return obj, canonical


def _whole(text: str) -> int:
    # What reads a config or a head makes floats and array elements of it, which hold no more.
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise BundleError(f"{FILE_NAME}: {text[:40]} has more than 64 bits")
    return value


def _number(text: str) -> Any:
    raise BundleError(f"{FILE_NAME}: {text[:40]} is not an integer; write non-integers as strings")


# Made once: `synapse models` reads a manifest a model, and there may be thousands.
_STRICT: Final = json.JSONDecoder(
    object_pairs_hook=unique_keys, parse_int=_whole, parse_float=_number, parse_constant=_number
)
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def open_plain(path: Path) -> BinaryIO:
    """Open a file of a bundle; OSError for one that is no plain file. A FIFO or a device would be read for ever."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, limit: int) -> bytes:
    """Return a plain file's bytes. OSError as :func:`open_plain` raises it, ValueError for more than *limit* bytes."""
    with open_plain(path) as file:
        data = file.read(min(limit + 1, 65536))  # a read of the limit would get memory for all of it first
        if len(data) == 65536:
            data += file.read(limit + 1 - len(data))
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes")
    return data


def read(root: Path | str) -> Bundle:
    """Read and validate the manifest of a bundle folder (or the path of its manifest.json).

    Files are not opened here; digests are checked where they are used. Raises BundleError.
    """
    root = Path(root)
    if root.name == FILE_NAME:
        root = root.parent
    file = root / FILE_NAME
    try:
        data = read_plain(file, MAX_BYTES)
    except ValueError as exc:
        raise BundleError(f"{FILE_NAME} has {exc}") from exc
    except OSError as exc:
        raise BundleError(f"{root} is not a model bundle: {file.name}: {exc.strerror or exc}") from exc
    return Bundle(root.absolute(), *parse(data))


def parse(data: bytes) -> tuple[Manifest, str]:
    """Decode and validate manifest bytes; return the manifest and its digest. BundleError names the key."""
    obj, canonical = parse_strict(data)
    try:
        manifest = msgspec.convert(obj, Manifest)
    except msgspec.ValidationError as exc:
        raise BundleError(f"{FILE_NAME}: {exc}") from exc
    _validate(manifest)
    return manifest, hashlib.sha256(canonical).hexdigest()


def write(root: Path, manifest: Manifest) -> str:
    """Validate and write ``manifest.json`` in canonical form; return its digest."""
    _validate(manifest)
    data = canonical_bytes(msgspec.to_builtins(manifest))
    parse_strict(data)
    (root / FILE_NAME).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _validate(manifest: Manifest) -> None:
    def refuse(key: str, why: str) -> None:
        raise BundleError(f"{FILE_NAME}: {key}: {why}")

    if not manifest.artifacts:
        refuse("artifacts", "a bundle needs at least one")
    if manifest.task == "embed":
        if manifest.pooling is UNSET:
            refuse("pooling", "an embedding bundle names mean, cls or last")
        if manifest.normalize is UNSET:
            refuse("normalize", "an embedding bundle says true or false")
    if manifest.task == "rerank":
        if manifest.score is UNSET:
            refuse("score", "a reranking bundle says sigmoid or identity")
        if manifest.dims != 1:
            refuse("dims", "a reranker has 1")
    if manifest.default_prompt is not UNSET and manifest.default_prompt not in (manifest.prompts or {}):
        refuse("default_prompt", f"{manifest.default_prompt!r} is none of prompts")
    if manifest.truncate_dim is not UNSET and (manifest.task != "embed" or manifest.truncate_dim > manifest.dims):
        refuse("truncate_dim", "only an embedder has it, and no more than its dims")
    if manifest.dense is not UNSET:
        widths = [width for layer in manifest.dense.layers for width in (layer.in_features, layer.out_features)]
        if manifest.task != "embed" or widths[1::2] != [*widths[2::2], manifest.dims]:
            refuse("dense", "each layer takes what the one before it gives, the last one gives an embedder's dims")
    refs = [(f"artifacts[{i}].path", a.path) for i, a in enumerate(manifest.artifacts)]
    refs += [(key, ref.path) for key in FILES if (ref := getattr(manifest, key)) is not UNSET]
    for key, text in refs:
        if text[:1] in ("", "/") or ".." in text.split("/") or "\\" in text or "\0" in text or ":" in text:
            refuse(key, f"{text!r} must be a relative path inside the bundle")
    seen: set[tuple[str, str]] = set()
    for i, artifact in enumerate(manifest.artifacts):
        if (artifact.format, artifact.dtype) in seen:
            refuse(f"artifacts[{i}].dtype", f"a second {artifact.format} artifact of dtype {artifact.dtype}")
        seen.add((artifact.format, artifact.dtype))
        if artifact.format == "coreml" and (artifact.tree is UNSET or artifact.functions is UNSET):
            refuse(f"artifacts[{i}]", "a coreml artifact names its tree digest and functions")
