"""What only a Neural Engine lane is asked: packed widths, what its functions cost, and where Core ML would run them.

A packed width is tried for whether a row is what it is on its rung, whatever lies beside it. What a function costs
decides later whether packing pays, and shows a worker that Core ML took a model and runs it on the CPU without a word.
Both go through the host's own path; where Core ML would run a function is asked in a throw-away child, since a plan
takes seconds to minutes. :func:`synapse_host.certificates.verdict.qualified_widths` says what the numbers mean (ane.md
3.3 and 4).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np

from synapse_host.certificates.document import DIGITS, Function, Packing, Series
from synapse_host.certificates.metrics import cosines
from synapse_host.errors import BundleInvalid, SynapseError
from synapse_host.residency.plan import buckets

if TYPE_CHECKING:
    from synapse_host.arrays import FloatArray
    from synapse_host.host import Host
    from synapse_host.placement.assignment import Assignment

Table: TypeAlias = tuple[list[Function], list[str], str | None]
"""Functions, the operators that the engine allows on the CPU, and why there are no functions."""
Plans: TypeAlias = Callable[["Assignment"], Table]

SEED: Final = 20261130
TIMED: Final = 8
"""Rows, or passes, of one timed exchange: their fixed costs are shared as they are in bulk work."""
REPEATS: Final = 5
PAIR: Final = 3
"""Special ids of a pair: [CLS] query [SEP] document [SEP]."""


def mixes(width: int) -> list[list[int]]:
    """Return ten mixes of row lengths for a width of at least 16: even and uneven, full and nearly empty passes."""
    part = [max(1, width // n) for n in range(1, 17)]
    return [
        [part[3]] * 8,
        [part[7]] * 16,
        [width - part[15], part[15]],
        [1] * 16,
        [part[1], part[2], part[7]],
        [3, part[1], 4, part[2]],
        [part[4]] * 10,
        [part[15]] * 16,
        [min(width, n) for n in (7, 11, 13, part[3], 17)],
        [width, part[1], part[5], 2],
    ]


async def packing(host: Host, assignment: Assignment, source: Sequence[Any], width: int) -> Packing:
    """Try one width on rows cut from *source* (token ids); an error of the lane ends the trial with its reason."""
    limit = assignment.bundle.manifest.max_tokens
    plan = [[min(n, limit) for n in lengths] for lengths in mixes(width)]
    random = np.random.default_rng([SEED, width])
    ids = np.concatenate([np.asarray(row, np.int32) for row in source])
    cosine: Series = []
    alone: Series = []
    moved: Series = []
    reason = None
    try:
        for lengths in plan:
            starts = random.integers(0, len(ids), len(lengths))
            rows = [np.resize(np.roll(ids, -start), n) for start, n in zip(starts, lengths, strict=True)]
            together = await _packed(host, assignment, rows, width)
            turned = (await _packed(host, assignment, rows[::-1], width))[::-1]
            dims = assignment.bundle.manifest.dims
            single = await host.embed_ids(assignment.model, rows, lane=assignment.lane, dimensions=dims)
            apart = np.concatenate([await _packed(host, assignment, [row], width) for row in rows])
            cosine += [round(float(value), DIGITS) for value in cosines(together, single)]
            alone += _differences(together, apart)
            moved += _differences(together, turned)
    except SynapseError as exc:
        reason = f"{exc.code}: {exc.message}"
    return Packing(width=width, mixes=plan, cosine=cosine, alone=alone, moved=moved, reason=reason)


async def costs(host: Host, assignment: Assignment, widths: Sequence[int], source: Sequence[Any]) -> dict[str, float]:
    """Return the median milliseconds of one row on every bucket and of one pass of every width, by function name."""
    artifact = assignment.placement.artifact
    assert artifact is not None and isinstance(artifact.functions, list)
    base = [int(id) for row in source for id in row]
    found: dict[str, float] = {}
    top = min(buckets(artifact)[-1], assignment.bundle.manifest.max_tokens)
    for function in artifact.functions:
        bucket, width = function.bucket, function.packed_width
        if isinstance(bucket, int):
            ids = np.resize(base, min(bucket, top)).tolist()
            times = [await _timed(_alone(host, assignment, ids)) for _ in range(REPEATS)]
        elif isinstance(width, int) and width in widths:
            # Two rows of half the width fill a pass: TIMED passes.
            rows = [np.resize(base, max(1, width // 2)).tolist()] * (2 * TIMED)
            times = [await _timed(_packed(host, assignment, rows, width)) for _ in range(REPEATS)]
        else:
            continue
        found[function.name] = round(sorted(times[1:])[len(times[1:]) // 2] / TIMED, 4)
    return found


async def _alone(host: Host, assignment: Assignment, ids: list[int]) -> FloatArray:
    """Ask for TIMED rows of these ids on their own rung; a reranker's pairs are composed to the same length."""
    if assignment.bundle.manifest.task != "rerank":
        return await host.embed_ids(assignment.model, [ids] * TIMED, lane=assignment.lane)
    candidate = ids[: max(1, len(ids) - 1 - PAIR)]
    return await host.rerank_ids(assignment.model, ids[:1], [candidate] * TIMED, lane=assignment.lane)


async def _packed(host: Host, assignment: Assignment, rows: Sequence[Any], width: int) -> FloatArray:
    return await host.embed_packed(assignment.model, rows, width, lane=assignment.lane)


async def _timed(work: Any) -> float:
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1000


def _differences(one: FloatArray, other: FloatArray) -> Series:
    return [round(float(value), DIGITS) for value in np.abs(one - other).max(axis=1)]


def plan_tool(assignment: Assignment) -> Table:
    """Ask ``python -m engines.ane plan`` about the artifact that the lane loads."""
    from engines.bundle.manifest import FILE_NAME
    from synapse_host.models import builder

    spec = assignment.require()
    manifest = assignment.bundle.path(FILE_NAME)
    argv = ["engines.ane", "plan", spec.load.artifact_path, "--manifest", str(manifest)]
    try:
        result = builder.run_tool(argv, stage="plan")
        return msgspec.convert(result["functions"], list[Function]), [str(op) for op in result["cpu_allowed"]], None
    except BundleInvalid as exc:
        return [], [], exc.message
    except (KeyError, msgspec.ValidationError) as exc:
        return [], [], f"the plan tool's answer can't be used: {exc}"
