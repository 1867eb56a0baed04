"""The tokenizer.json of a bundle, read as data before the tokenizers library sees it.

A tokenizer file is a program: a chain of normalizers, splitters and a model, run in C with no limit on time or memory,
and a fault in there can abort the whole host. So only what is listed here gets through: the components that published
models use, each with bounds, each field by its type. What comes out is written anew from what was read, so nothing that
was not looked at reaches the library. Padding, truncation and the decoder are left out: the host uses none of them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from engines.bundle.digest import same
from engines.bundle.manifest import read_plain
from synapse_host.errors import BundleInvalid
from synapse_host.text.tokenizer_schema import MAX_PARTS, File, Model, Normalizer, PreTokenizer

MAX_BYTES: Final = 64 * 1024 * 1024
"""The largest published file (Gemma 3) has 33 MB."""
MAX_GROWTH: Final = 16
"""Times that all components together may lengthen a text, each by the worst that it can do; see :func:`_growth`."""
MAX_MAPPED_BYTES: Final = 48
"""Bytes that a character map may write for one character; Unicode's longest compatibility form has 33."""


class _Kind(Struct):
    type: str | UnsetType = UNSET
    merges: Raw | UnsetType = UNSET
    continuing_subword_prefix: Raw | UnsetType = UNSET
    unk_id: Raw | UnsetType = UNSET


def read(path: Path) -> bytes:
    """Return a file's bytes. Raises OSError for one that is no plain file, ValueError for one that is too large."""
    return read_plain(path, MAX_BYTES)


def checked(path: Path, digest: str, model: str) -> bytes:
    """Return a bundle's tokenizer file by its digest, sanitized; BundleInvalid names *model* and what is wrong.

    The digest comes first: another vocabulary would give wrong vectors without any error.
    """
    try:
        data = read(path)
        actual = hashlib.sha256(data).hexdigest()
        if same(digest, actual):
            return sanitized(data)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise BundleInvalid(
            f"bundle {model}: {path.name} can't be read as a tokenizer: {reason}. Rebuild the bundle"
        ) from exc
    raise BundleInvalid(
        f"bundle {model}: {path.name} was changed: its digest is sha256:{actual}, the manifest says {digest}. "
        "Install or build the bundle again",
        details={"file": str(path), "expected": digest, "observed": f"sha256:{actual}"},
    )


def sanitized(data: bytes) -> bytes:
    """Return a tokenizer.json with the same meaning that holds nothing but what was checked.

    Raises ValueError, which says what isn't accepted and where.
    """
    try:
        file = msgspec.json.decode(data, type=File)
        model = msgspec.json.decode(_typed(bytes(file.model)), type=Model)
        growth = 1.0
        for part in _parts(file.normalizer, file.pre_tokenizer):
            growth *= _growth(part)
            if part.pattern is not UNSET:
                part.pattern.check()
            if isinstance(part, Normalizer) and part.type == "Precompiled":
                _check_characters(part.precompiled_charsmap or "")  # without one the library panics
        if growth > MAX_GROWTH:
            raise ValueError(f"its components may lengthen a text more than {MAX_GROWTH} times")
        model.check()
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    except MemoryError as exc:
        raise ValueError("there is no memory for it") from exc
    file.model = Raw(msgspec.json.encode(model))
    return msgspec.json.encode(file)


def _typed(model: bytes) -> bytes:
    """Return a model with its ``type``, which files of before 2021 leave out."""
    kind = msgspec.json.decode(model, type=_Kind)
    if kind.type is not UNSET:
        return model
    if kind.merges is not UNSET:
        name = b"BPE"
    elif kind.continuing_subword_prefix is not UNSET:
        name = b"WordPiece"
    else:
        name = b"WordLevel" if kind.unk_id is UNSET else b"Unigram"
    return b'{"type":"' + name + b'",' + model.lstrip().removeprefix(b"{")


def _parts(*parts: Normalizer | PreTokenizer | None) -> Iterator[Normalizer | PreTokenizer]:
    """Yield components in their order, those inside of others too; ValueError for too many."""
    stack = [part for part in reversed(parts) if part is not None]
    count = 0
    while stack:
        part = stack.pop()
        count += 1
        if count > 3 * MAX_PARTS:
            raise ValueError(f"more than {3 * MAX_PARTS} components")
        yield part
        inner = part.normalizers if isinstance(part, Normalizer) else part.pretokenizers
        stack.extend(reversed(inner or []))


def _growth(part: Normalizer | PreTokenizer) -> float:
    """Return how many times longer a component may make a text, about; 1 for what changes no length to speak of."""
    if isinstance(part, Normalizer) and part.content is not UNSET:
        # An expression matches one character at least.
        literal = UNSET if part.pattern is UNSET else part.pattern.string
        return max(1.0, len(part.content) / (1 if literal is UNSET else len(literal)))
    if part.type in ("ByteLevel", "Metaspace"):
        return 2.0  # a byte beyond ASCII becomes a character of two; a space before each word
    return 8.0 if part.type == "Precompiled" else 1.0


def _check_characters(text: str) -> None:
    """Check SentencePiece's map: the size of its index (u32), the index, and texts that each end with a zero byte."""
    try:
        data = base64.b64decode(text, validate=True)
        size = int.from_bytes(data[:4], "little")
        texts = data[4 + size :].decode()
    except (binascii.Error, UnicodeDecodeError) as exc:
        raise ValueError(f"the character map is damaged: {exc}") from exc
    if not 4 <= size <= len(data) - 4 or size % 4:
        raise ValueError(f"the character map is damaged: an index of {size} bytes in {len(data)}")
    longest = max(len(each.encode()) for each in texts.split("\0"))
    if longest > MAX_MAPPED_BYTES:
        raise ValueError(f"the character map writes {longest} bytes for one character, at most {MAX_MAPPED_BYTES}")
