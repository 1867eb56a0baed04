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
from msgspec import UNSET

from engines.bundle.manifest import FileRef
from synapse_host.certificates import document as documents
from synapse_host.certificates import figures, verdict
from synapse_host.certificates.document import EmbedInputs, Evidence, GenerateInputs, Model, RerankInputs

if TYPE_CHECKING:
    from engines.bundle.manifest import Artifact, Bundle
    from synapse_host.placement.matrix import Engine, HardwareMatrix

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
"""What a Neural Engine function may keep on the CPU: the list of ``engines.ane.placement`` (a test compares)."""
_INPUTS: Final = {"embed": EmbedInputs, "rerank": RerankInputs, "generate": GenerateInputs}


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
    problems += _otherwise(recorded, due)
    problems += _contradictions(due, matrix)
    wanted = thresholds_of(matrix, matrix.engines[due.engine.id], due.model, share)
    for name in verdict.weaker(recorded.thresholds, wanted):
        have = recorded.thresholds.get(name)
        problems.append(f"thresholds.{name}: {have} is weaker than {wanted[name]} of {matrix.name}")
    try:
        judged = verdict.judge(due)
        fresh = verdict.judge(msgspec.structs.replace(due, thresholds=wanted))
    except (ArithmeticError, LookupError, ValueError, TypeError) as exc:
        return Recheck(recorded, [*problems, f"inputs: nothing can be computed from them ({exc})"])
    problems += _misjudged(recorded, judged)
    return Recheck(fresh, problems)


def thresholds_of(matrix: HardwareMatrix, engine: Engine, model: Model, share: float | None = None) -> dict[str, float]:
    """Return the thresholds that *matrix* has for an engine and a model's task and precision class."""
    return verdict.thresholds(
        matrix,
        engine=engine.id,
        task=model.task,
        precision=verdict.precision_of(model.dtype),
        placement=engine.device_kind == "ane",
        share=share,
    )


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


def model_of(bundle: Bundle, artifact: Artifact, name: str = "") -> Model:
    """Return what a document says of a bundle's model and the artifact that was loaded."""
    manifest = bundle.manifest
    return Model(
        name=name or manifest.model_id,
        model_id=manifest.model_id,
        family=manifest.family,
        task=manifest.task,
        dims=manifest.dims,
        max_tokens=manifest.max_tokens,
        manifest_digest=bundle.digest,
        artifact_digest=artifact.digest,
        format=artifact.format,
        dtype=artifact.dtype,
        bytes=None if artifact.bytes is UNSET else artifact.bytes,
        tree=None if artifact.tree is UNSET else artifact.tree,
        source=None if manifest.source is UNSET else manifest.source,
        tokenizer=manifest.tokenizer.digest if isinstance(manifest.tokenizer, FileRef) else None,
    )


def _otherwise(recorded: Any, due: Any, path: str = "") -> Iterator[str]:
    """Yield every field in which a document differs from what it would have to say."""
    if isinstance(recorded, msgspec.Struct) and type(recorded) is type(due):
        for field in recorded.__struct_fields__:
            yield from _otherwise(getattr(recorded, field), getattr(due, field), f"{path}.{field}" if path else field)
    elif isinstance(recorded, list) and path == "limits":
        for case, other in zip(recorded, due, strict=True):
            yield from _otherwise(case, other, f"limits.{case.name}")
    elif recorded != due:
        yield f"{path}: the document says {recorded}, due is {due}"


def _misjudged(recorded: Evidence, judged: Evidence) -> Iterator[str]:
    """Yield what a document makes of its measurements and its own thresholds, and they don't."""
    mine, theirs = {gate.name: gate for gate in judged.gates}, {gate.name: gate for gate in recorded.gates}
    if len(theirs) != len(recorded.gates):
        yield "gates: one occurs twice"
    for name in dict.fromkeys([*mine, *theirs]):
        if mine.get(name) != theirs.get(name):
            said, found = theirs.get(name), mine.get(name)
            yield f"gates.{name}: the document says {_shown(said)}, its measurements say {_shown(found)}"
    if judged.reported != recorded.reported:
        yield "reported: other numbers than its measurements give"
    if judged.reasons != recorded.reasons:
        yield f"reasons: the document says {recorded.reasons}, its gates say {judged.reasons}"
    if judged.verdict != recorded.verdict:
        yield f"verdict: the document says {recorded.verdict}, its measurements say {judged.verdict}"


def _shown(gate: documents.Gate | None) -> str:
    if gate is None:
        return "nothing"
    return f"{gate.value} {gate.comparison} {gate.threshold} {'passed' if gate.passed else 'failed'}"


def _contradictions(evidence: Evidence, matrix: HardwareMatrix) -> Iterator[str]:
    """Yield what one part of the document says and another, or what is known of all runs, denies."""
    lane = matrix.lanes.get(evidence.lane)
    if lane is None or lane.task != evidence.model.task:
        yield f"lane: {matrix.name} has no lane {evidence.lane} to {evidence.model.task}"
    if evidence.inputs is not None and not isinstance(evidence.inputs, _INPUTS[evidence.model.task]):
        yield f"inputs: not those of a model to {evidence.model.task}"
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
    """Yield the series that don't have one entry a probe, and those with values that no measurement gives."""
    n = len(evidence.tokens)
    series = figures.columns(evidence.inputs) if evidence.inputs is not None else {}
    for name, (values, low, high) in series.items():
        if len(values) != n:
            yield f"inputs.{name}: {len(values)} entries, {n} expected"
        elif any(value is not None and not low <= value <= high for value in values):
            yield f"inputs.{name}: a value that no measurement gives"
    for packing in evidence.packing:
        rows = sum(map(len, packing.mixes))
        for name in ("cosine", "alone", "moved"):
            have = len(getattr(packing, name))
            if have != rows and packing.reason is None:
                yield f"packing.{packing.width}.{name}: {have} entries, {rows} expected"
