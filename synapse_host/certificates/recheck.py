"""Is a document's verdict what its measurements say? Pure and fast: no model, no worker.

What a document is judged by never comes from the document: device, expected engine and thresholds are the matrix's,
expected outcomes are fixed, and of the model everything is the bundle's where there is one. A document that says
otherwise is refused, and judged by the right ones all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engines.bundle.manifest import FileRef
from synapse_host.certificates import document as documents
from synapse_host.certificates import figures, verdict
from synapse_host.certificates.binding import model_of
from synapse_host.certificates.document import EmbedInputs, Evidence

if TYPE_CHECKING:
    from engines.bundle.manifest import Bundle
    from synapse_host.placement.matrix import HardwareMatrix

_SHAPING: Final = ("cast", "expand_dims", "slice_by_index", "squeeze")
CPU_ALLOWED: Final = frozenset(
    f"{operator}@{stage}"
    for stage, operators in {
        "mask_position": (*_SHAPING, "tile", "add", "greater_equal", "mul", "select", "sub"),
        "token_embedding": (*_SHAPING, "tile", "gather", "gather_along_axis", "gather_nd"),
        "pooling": _SHAPING,
    }.items()
    for operator in operators
)
"""What a Neural Engine function may keep on the CPU: the list of ``engines.ane.compute_plan`` (a test compares)."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """``evidence`` carries gates and verdict as computed again; ``problems`` is what the document had otherwise."""

    evidence: Evidence
    problems: list[str]

    @property
    def certified(self) -> bool:
        """True when the document is right as it is and its verdict is ``certified``."""
        return not self.problems and self.evidence.verdict == "certified"


def recheck(path: Path, matrix: HardwareMatrix, *, bundle: Bundle | None = None, share: float | None = None) -> Recheck:
    """Compute a document's gates and verdict again and compare; thresholds may not be weaker than *matrix* has them.

    *bundle*: the model's, if it is here; without one the document is believed about its model. *share*: the placement
    share asked for instead of the matrix's. Raises InvalidRequest for what is no document.
    """
    recorded, digest = documents.read(path)
    problems = []
    if recorded.digest != digest:
        problems.append("digest: the document was changed after it was written")
    if recorded.engine.id not in matrix.engines:
        # Nothing says what it would have to be judged by.
        return Recheck(recorded, [*problems, f"engine.id: {matrix.name} has no engine {recorded.engine.id}"])
    misshapen = list(_misshapen(recorded))
    if misshapen:
        # Nothing can be computed from series of different length, or of values that can't be.
        return Recheck(recorded, [*problems, *misshapen])
    due = _as_due(recorded, matrix, bundle)
    problems += _contradictions(due, matrix)
    engine, model = matrix.engines[due.engine.id], due.model
    wanted = verdict.thresholds(matrix, engine, task=model.task, dtype=model.dtype, share=share)
    for name in verdict.weaker(recorded.thresholds, wanted):
        have = recorded.thresholds.get(name)
        problems.append(f"thresholds.{name}: {have} is weaker than {wanted[name]} of {matrix.name}")
    try:
        judged = verdict.judge(due)
        fresh = verdict.judge(msgspec.structs.replace(due, thresholds=wanted))
    except (ArithmeticError, LookupError, ValueError, TypeError) as exc:
        return Recheck(recorded, [*problems, f"inputs: nothing can be computed from them ({exc})"])
    problems += _otherwise(recorded, judged)
    return Recheck(fresh, problems)


def _as_due(recorded: Evidence, matrix: HardwareMatrix, bundle: Bundle | None) -> Evidence:
    """Return the document with everything it is judged by taken from matrix and bundle."""
    engine = matrix.engines[recorded.engine.id]
    model, fixture, inputs = recorded.model, recorded.fixture, recorded.inputs
    if bundle is not None:
        known = bundle.manifest.artifacts
        artifact = next((one for one in known if one.digest == model.artifact_digest), known[0])
        model = model_of(bundle, artifact, model.name)
        if fixture is not None:
            ref = bundle.manifest.fixtures
            expected = ref.digest if isinstance(ref, FileRef) else ""
            fixture = msgspec.structs.replace(fixture, expected_digest=expected)
        if isinstance(inputs, EmbedInputs):
            inputs = msgspec.structs.replace(inputs, unit=bundle.manifest.normalize is not False)
    limits = [msgspec.structs.replace(case, expected=figures.CASES.get(case.name, "ok")) for case in recorded.limits]
    return msgspec.structs.replace(
        recorded,
        model=msgspec.structs.replace(model, format=engine.format),
        engine=msgspec.structs.replace(recorded.engine, device=engine.device, expected=engine.worker_engine),
        precision=verdict.precision_of(model.dtype),
        placement_required=engine.device_kind == "ane",
        fixture=fixture,
        limits=limits,
        inputs=inputs,
    )


def _otherwise(recorded: Any, due: Any, path: str = "") -> Iterator[str]:
    """Yield every field in which a document differs from what it would have to say; gates and cases by their names."""
    if recorded == due:
        return
    inside = f"{path}." if path else ""
    if isinstance(recorded, msgspec.Struct) and type(recorded) is type(due):
        for field in recorded.__struct_fields__:
            yield from _otherwise(getattr(recorded, field), getattr(due, field), inside + field)
    elif path in ("gates", "limits"):
        mine, theirs = {one.name: one for one in due}, {one.name: one for one in recorded}
        if len(theirs) != len(recorded):
            yield f"{path}: one occurs twice"
        for name in dict.fromkeys([*mine, *theirs]):
            yield from _otherwise(theirs.get(name), mine.get(name), inside + name)
    else:
        yield f"{path}: the document says {recorded}, due is {due}"


def _contradictions(evidence: Evidence, matrix: HardwareMatrix) -> Iterator[str]:
    """Yield what one part of the document says and another, or what is known of all runs, denies."""
    lane = matrix.lanes.get(evidence.lane)
    if lane is None or lane.task != evidence.model.task:
        yield f"lane: {matrix.name} has no lane {evidence.lane} to {evidence.model.task}"
    from synapse_host.models.builder import reference_origin

    fixture = evidence.fixture
    if fixture is not None and (fixture.origin == "project") != (reference_origin(fixture.digest) == "project"):
        yield f"fixture.origin: {fixture.origin} for {fixture.digest}"
    if evidence.inputs is not None and evidence.fixture is None:
        yield "fixture: measurements without a reference"
    if evidence.inputs is not None and evidence.fixture is not None and evidence.fixture.probes != len(evidence.tokens):
        yield f"tokens: {len(evidence.tokens)} rows for {evidence.fixture.probes} probes"
    if len({case.name for case in evidence.limits}) != len(evidence.limits):
        yield "limits: one occurs twice"
    allowed = evidence.placement.cpu_allowed if evidence.placement is not None else []
    if unknown := sorted({*allowed} - CPU_ALLOWED):
        yield f"placement.cpu_allowed: {', '.join(unknown)} may not stay on the CPU"


def _misshapen(evidence: Evidence) -> Iterator[str]:
    """Yield the series that don't have one entry a probe or row, and those with values that no measurement gives."""
    yield from figures.misshapen(evidence)
    for packing in evidence.packing:
        rows = sum(map(len, packing.mixes))
        for name in ("cosine", "alone", "moved"):
            have = len(getattr(packing, name))
            if have != rows and packing.reason is None:
                yield f"packing.{packing.width}.{name}: {have} entries, {rows} expected"
