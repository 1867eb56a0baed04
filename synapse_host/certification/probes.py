"""The probes a bundle is tried with: its reference fixtures, whether they are still its own, and rows at the edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET

from engines.bundle import fixtures
from engines.bundle.manifest import BundleError, FileRef
from synapse_host.errors import BundleInvalid
from synapse_host.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from engines.bundle.fixtures import Fixtures
    from engines.bundle.manifest import Bundle


def opened(bundle: Bundle) -> Fixtures | None:
    """Return the bundle's fixtures, None where it has none; BundleInvalid where they can't be used."""
    ref = bundle.manifest.fixtures
    if not isinstance(ref, FileRef):
        return None
    try:
        found = fixtures.read(bundle.path(ref.path))
    except BundleError as exc:
        raise BundleInvalid(str(exc)) from exc
    manifest = bundle.manifest
    if found.task != manifest.task:
        raise BundleInvalid(f"{ref.path}: fixtures to {found.task}, the bundle is to {manifest.task}")
    dims = found.arrays["vectors_q"].shape[1] if found.task == "embed" else manifest.dims
    if dims != manifest.dims:
        raise BundleInvalid(f"{ref.path}: vectors of {dims} dims, the bundle says {manifest.dims}")
    return found


def stale_rows(bundle: Bundle, probes: Fixtures) -> int:
    """Count the probes whose text gives other ids now; rows that were cut are compared as far as they go."""
    if bundle.manifest.tokenizer is UNSET:
        return 0
    tokenizer = TextTokenizer(bundle)
    stale = 0
    if probes.task == "rerank":
        queries, of = probes.rows("query"), probes.arrays["query_of"].tolist()
        for text, query, candidate in zip(probes.texts, of, probes.rows("candidate"), strict=True):
            if text is not None:
                ids, rows = tokenizer.segments(text[0], [text[1]], truncate=True)
                same = ids.tolist() == queries[query].tolist() and _begins(rows.ids.tolist(), candidate.tolist())
                stale += not same
        return stale
    for text, row in zip(probes.texts, probes.rows(), strict=True):
        if text is not None and probes.task == "embed":
            stale += tokenizer.rows([text], truncate=True).ids.tolist() != row.tolist()
        elif text is not None:
            stale += not _begins(tokenizer.prompt(text).ids.tolist(), row.tolist())
    return stale


def _begins(whole: list[int], cut: list[int]) -> bool:
    return bool(cut) and whole[: len(cut)] == cut


def stops(bundle: Bundle) -> set[int]:
    """Return the ids that end a generation: the manifest's, and the tokenizer's by their usual names."""
    special = bundle.manifest.special_ids
    found = {id for name, id in special.items() if name in ("eos", "eot", "eom")} if special is not UNSET else set()
    if bundle.manifest.tokenizer is not UNSET:
        tokenizer = TextTokenizer(bundle)
        named = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<end_of_turn>")
        found |= {id for name in named if (id := tokenizer.id(name)) is not None}
    return found


def edge_rows(rows: Sequence[Any], room: int) -> dict[str, list[int]]:
    """Return rows at the edges of what a model takes, by case: *room* ids are served, one more is too long.

    They are made of ids that occur in *rows*.
    """
    base = [int(id) for row in rows for id in row]
    lengths = {"length 1": 1, "length 2": 2, "max - 1": room - 1, "max": room, "max + 1": room + 1}
    found = {name: np.resize(base, length).tolist() for name, length in lengths.items()}
    return {**found, "repeated token": [base[len(base) // 2]] * min(64, room)}
