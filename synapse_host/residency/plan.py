"""Which function of a Neural Engine model runs which rows: rungs of the ladder, packed passes where they pay. Pure.

A row goes on the smallest bucket that fits it. Where this machine's certificate qualifies packed widths and says what
every function costs, short rows share packed passes instead if that is cheaper in sum; without measurements, never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET

from engines.bundle import tight
from synapse_host.errors import BundleInvalid, SequenceTooLong
from synapse_host.residency.types import Model

if TYPE_CHECKING:
    from engines.bundle.manifest import Artifact, Function


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that run through one function in one exchange; ``rows`` are the request's, ascending."""

    kind: Literal["shape", "packed"]
    tokens: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured milliseconds: one row on a bucket, one pass of a packed width, both by tokens."""

    single: Mapping[int, float]
    packed: Mapping[int, float]


def parts(
    lengths: Sequence[int], buckets: Sequence[int], *, costs: Costs | None = None, widths: Iterable[int] = ()
) -> list[Part]:
    """Plan a request: packed passes first, at most 64 rows an exchange, then the rungs in ascending order.

    *widths*: what the worker advertises. SequenceTooLong names the first row that no bucket takes.
    """
    ladder = sorted(buckets)
    _fits(lengths, ladder)
    alone: Iterable[int] = range(len(lengths))
    found: list[Part] = []
    known = {width: costs.packed[width] for width in widths if width in costs.packed} if costs is not None else {}
    if costs is not None and known and len(lengths) > 1 and all(bucket in costs.single for bucket in ladder):
        single = {bucket: costs.single[bucket] for bucket in ladder}
        choice = tight.choose(lengths, single_cost=single, packed_cost=known, max_rows=tight.MAX_ROWS)
        if choice.width is not None:
            found += [Part("packed", choice.width, rows) for rows in _windows(choice.passes)]
            alone = choice.single
    groups: dict[int, list[int]] = {}
    for row in alone:
        groups.setdefault(next(rung for rung in ladder if lengths[row] <= rung), []).append(row)
    return found + [Part("shape", bucket, tuple(groups[bucket])) for bucket in sorted(groups)]


def _fits(lengths: Sequence[int], ladder: Sequence[int]) -> None:
    for row, tokens in enumerate(lengths):
        if tokens > ladder[-1]:
            raise SequenceTooLong(
                f"text {row} has {tokens} tokens, the largest bucket takes {ladder[-1]}",
                details={"index": row, "tokens": tokens, "max_tokens": ladder[-1]},
            )


def _windows(passes: Iterable[tight.Pass]) -> Iterator[tuple[int, ...]]:
    """Yield the rows of whole passes, as many as an exchange takes; the worker plans the same passes from them."""
    window: list[int] = []
    for one in passes:
        if window and len(window) + len(one.rows) > tight.MAX_ROWS:
            yield tuple(sorted(window))
            window = []
        window += one.rows
    if window:
        yield tuple(sorted(window))


# --- what the manifest says ------------------------------------------------------------------------------------------


def _functions(artifact: Artifact) -> Sequence[Function]:
    return artifact.functions if artifact.functions is not UNSET else ()


def buckets(artifact: Artifact) -> tuple[int, ...]:
    """Return an artifact's buckets in tokens, ascending."""
    return tuple(sorted(one.bucket for one in _functions(artifact) if one.bucket is not UNSET))


def packed_widths(artifact: Artifact) -> tuple[int, ...]:
    """Return an artifact's packed widths in tokens, ascending."""
    return tuple(sorted(one.packed_width for one in _functions(artifact) if one.packed_width is not UNSET))


def costs(artifact: Artifact, by_name: Mapping[str, float]) -> Costs:
    """Return measured times by function name as times by tokens."""
    single, packed = {}, {}
    for function in _functions(artifact):
        ms = by_name.get(function.name, 0.0)
        if ms > 0 and function.bucket is not UNSET:
            single[function.bucket] = ms
        elif ms > 0 and function.packed_width is not UNSET:
            packed[function.packed_width] = ms
    return Costs(single, packed)


def charge(artifact: Artifact) -> Model:
    """Return what one function of an artifact is charged: its layers and its bytes.

    Weights are shared on disk, not provably in the engine's memory, so every function of a multi-function package
    counts them all (ane.md 4); a folder of single-function packages holds them once a function. BundleInvalid where
    the manifest doesn't say what there is to charge.
    """
    rungs, layers = buckets(artifact), artifact.layers
    if not rungs or layers is UNSET:
        raise BundleInvalid(
            f"artifact {artifact.path} doesn't say which buckets and how many layers it has, and the Neural Engine's "
            "budget counts them: build it again",
            details={"path": artifact.path},
        )
    nbytes = artifact.bytes if artifact.bytes is not UNSET else 0
    if not artifact.path.endswith(".mlpackage"):
        nbytes = -(-nbytes // len(_functions(artifact)))
    return Model(layers=layers, nbytes=nbytes, smallest=rungs[0])
