"""``synapse certify --recheck``: is a document's verdict what its measurements say? Needs no model and no worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from synapse_host import evidence as documents
from synapse_host import figures, gates
from synapse_host.evidence import EmbedInputs, Evidence, GenerateInputs, RerankInputs

if TYPE_CHECKING:
    from synapse_host.matrix import HardwareMatrix


@dataclass(frozen=True, slots=True)
class Recheck:
    """``evidence`` carries gates and verdict as computed again; ``problems`` is what the document had otherwise."""

    evidence: Evidence
    problems: list[str]

    @property
    def certified(self) -> bool:
        """True when the document stands as it is and its verdict is ``certified``."""
        return not self.problems and self.evidence.verdict == "certified"


def recheck(path: Path, matrix: HardwareMatrix, *, share: float | None = None) -> Recheck:
    """Compute a document's gates and verdict again and compare; thresholds may not be weaker than *matrix* has them.

    *share*: the placement share asked for instead of the matrix's. Raises InvalidRequest for what is no document.
    """
    recorded, digest = documents.read(path)
    problems = []
    if recorded.digest != digest:
        problems.append("digest: the document was changed after it was written")
    misshapen = list(_misshapen(recorded))
    if misshapen:
        # Nothing can be computed from series of different length.
        return Recheck(recorded, [*problems, *misshapen])
    problems += _contradictions(recorded)
    wanted = gates.thresholds(
        matrix,
        engine=recorded.engine.id,
        task=recorded.model.task,
        precision=gates.precision_of(recorded.model.dtype),
        placement=_on_ane(recorded),
        share=share,
    )
    for name in gates.weaker(recorded.thresholds, wanted):
        have = recorded.thresholds.get(name)
        problems.append(f"thresholds.{name}: {have} is weaker than {wanted[name]} of {matrix.name}")
    fresh = gates.judge(recorded)
    mine, theirs = {gate.name: gate for gate in fresh.gates}, {gate.name: gate for gate in recorded.gates}
    if len(theirs) != len(recorded.gates):
        problems.append("gates: one occurs twice")
    for name in dict.fromkeys([*mine, *theirs]):
        if mine.get(name) != theirs.get(name):
            said, found = theirs.get(name), mine.get(name)
            problems.append(f"gates.{name}: the document says {_shown(said)}, its measurements say {_shown(found)}")
    if fresh.reported != recorded.reported:
        problems.append("reported: other numbers than its measurements give")
    if fresh.reasons != recorded.reasons:
        problems.append(f"reasons: the document says {recorded.reasons}, its gates say {fresh.reasons}")
    if fresh.verdict != recorded.verdict:
        problems.append(f"verdict: the document says {recorded.verdict}, its measurements say {fresh.verdict}")
    return Recheck(fresh, problems)


def _shown(gate: documents.Gate | None) -> str:
    if gate is None:
        return "nothing"
    return f"{gate.value} {gate.comparison} {gate.threshold} {'passed' if gate.passed else 'failed'}"


def _on_ane(evidence: Evidence) -> bool:
    return evidence.engine.device.partition(":")[0] == "ane"


def _contradictions(evidence: Evidence) -> Iterator[str]:
    """Yield what one part of the document says and another denies."""
    precision = gates.precision_of(evidence.model.dtype)
    if evidence.precision != precision:
        yield f"precision: {evidence.precision}, but dtype {evidence.model.dtype} is {precision}"
    if evidence.placement_required != _on_ane(evidence):
        yield f"placement_required: {evidence.placement_required} for device {evidence.engine.device}"
    kinds = {"embed": EmbedInputs, "rerank": RerankInputs, "generate": GenerateInputs}
    if evidence.inputs is not None and not isinstance(evidence.inputs, kinds[evidence.model.task]):
        yield f"inputs: not those of a model to {evidence.model.task}"
    from synapse_host.builder import reference_origin

    fixture = evidence.fixture
    if fixture is not None and (fixture.origin == "project") != (reference_origin(fixture.digest) == "project"):
        yield f"fixture.origin: {fixture.origin} for {fixture.digest}"
    if evidence.inputs is not None and evidence.fixture is None:
        yield "fixture: measurements without a reference"
    if evidence.inputs is not None and evidence.fixture is not None and evidence.fixture.probes != len(evidence.tokens):
        yield f"tokens: {len(evidence.tokens)} rows for {evidence.fixture.probes} probes"


def _misshapen(evidence: Evidence) -> Iterator[str]:
    """Yield the series that don't have one entry a probe."""
    n = len(evidence.tokens)
    series = figures.columns(evidence.inputs) if evidence.inputs is not None else {}
    for name, (values, _, _) in series.items():
        if len(values) != n:
            yield f"inputs.{name}: {len(values)} entries, {n} expected"
    for packing in evidence.packing:
        rows = sum(map(len, packing.mixes))
        for name in ("cosine", "alone", "moved"):
            have = len(getattr(packing, name))
            if have != rows and packing.reason is None:
                yield f"packing.{packing.width}.{name}: {have} entries, {rows} expected"
