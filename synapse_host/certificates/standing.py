"""The certificates on this machine: where one lies, whether it is valid, and what that lets a lane do.

A certificate is the evidence document of a run that passed, kept on the machine where it passed: one file per engine,
bundle and configuration, below ``<data dir>/synapse/certificates/<engine id>/``. It is valid while two things hold: its
verdict follows from its own measurements under this matrix (:mod:`synapse_host.certificates.recheck`), and everything
that changes numbers is what it was (:mod:`synapse_host.certificates.binding`). :func:`look_up` answers that, and
nothing else does: it is asked by the host when a worker starts, ``synapse doctor``, ``certify``, ``certificates`` and
the hardware runs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from synapse_host.certificates import binding, verdict
from synapse_host.certificates import document as documents
from synapse_host.certificates.binding import Identity
from synapse_host.certificates.document import Evidence, Model
from synapse_host.certificates.recheck import recheck
from synapse_host.errors import InvalidRequest
from synapse_host.placement import hardware, places
from synapse_host.placement.places import NoHome
from synapse_host.placement.select import fit

if TYPE_CHECKING:
    from engines.bundle.manifest import Artifact, Bundle
    from synapse_host.placement.hardware import HostProfile
    from synapse_host.placement.matrix import Engine, HardwareMatrix, Lane

MISSING: Final = "it has none on this machine"
OTHERWISE: Final = (
    "the matrix configures its engine otherwise than when it was certified: device, dtype, runtime_config, env, "
    "worker command or thresholds"
)
NOT_RUN: Final = frozenset({"ane_lane_busy"})
"""Faults that end a run before it says anything about the lane: another host of this user holds the device."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What there is for an engine and a bundle. ``why``: what is against it, empty while it is valid.

    ``evidence``: the document as judged now, None where there is none or none that can be read.
    """

    path: Path
    evidence: Evidence | None
    why: tuple[str, ...]

    @property
    def valid(self) -> bool:
        """True while a lane may call itself certified by it."""
        return self.evidence is not None and not self.why


@dataclass(frozen=True, slots=True)
class Listed:
    """One stored certificate by the names people use. ``model``: the installed name, else the bundle's own.

    ``fix``: the command that gets a valid one; None where certifying again can't help.
    """

    certificate: Certificate
    engine: str
    lane: str = ""
    model: str = ""
    fix: str | None = None


# --- where they lie --------------------------------------------------------------------------------------------------


def folder(data_dir: Path | None = None) -> Path:
    """Return where certificates lie: below *data_dir*, or the user's data directory. Raises NoHome."""
    return places.data() / "certificates" if data_dir is None else data_dir / "synapse" / "certificates"


def path_of(matrix: HardwareMatrix, engine: Engine, model: Model, data_dir: Path | None = None) -> Path:
    """Return the certificate file of an engine, a model's artifact and what the matrix says of both.

    What the matrix says is part of the name. So trying an engine by another matrix, with another configuration or
    other thresholds, never takes a certificate away from the one that serves.
    """
    named = {
        "artifact": model.artifact_digest,
        "command": list(engine.command or ()),
        "device": engine.device,
        "dtype": model.dtype,
        "env": engine.env,
        "runtime_config": engine.runtime_config,
        "thresholds": verdict.thresholds(matrix, engine, task=model.task, dtype=model.dtype),
    }
    key = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:12]
    return folder(data_dir) / engine.id / f"{model.manifest_digest}-{key}.json"


def settle(evidence: Evidence, matrix: HardwareMatrix, data_dir: Path | None = None) -> Path | None:
    """Make a run's outcome count: keep a certified document, withdraw the older one after a run that failed.

    Returns the kept file. Nothing changes for an answer to another question than the matrix asks (other thresholds,
    ``--min-placement-share``) and for a run that never got the device.
    """
    engine, model = matrix.engines[evidence.engine.id], evidence.model
    if evidence.thresholds != verdict.thresholds(matrix, engine, task=model.task, dtype=model.dtype):
        return None
    if evidence.verdict == "certified":
        path = path_of(matrix, engine, model, data_dir)
        documents.write(path, evidence)
        return path
    if evidence.fault is None or evidence.fault.code not in NOT_RUN:
        with suppress(NoHome):
            path_of(matrix, engine, model, data_dir).unlink(missing_ok=True)
    return None


# --- is one valid? ---------------------------------------------------------------------------------------------------


def look_up(
    matrix: HardwareMatrix,
    engine: Engine,
    bundle: Bundle,
    artifact: Artifact,
    profile: HostProfile | None = None,
    *,
    data_dir: Path | None = None,
    identity: Identity | None = None,
) -> Certificate:
    """Return the certificate of an engine and an artifact with what is against it now.

    *identity*: what the worker says of itself; None asks it (``--version`` in a child), if nothing else speaks against
    the certificate. *profile*: None looks at the machine; else with the floors of
    :func:`synapse_host.placement.hardware.floor_keys`. Blocks; reads a file, and hashes what changed of the engine's
    installation.
    """
    path = path_of(matrix, engine, binding.model_of(bundle, artifact), data_dir)
    if not path.exists():
        other = any(path.parent.glob(f"{bundle.digest}-*.json"))
        return Certificate(path, None, (OTHERWISE if other else MISSING,))
    try:
        judged = recheck(path, matrix, bundle=bundle)
    except InvalidRequest as exc:
        return Certificate(path, None, (f"{exc.message}; it can't be read",))
    found, problems = judged.evidence, list(judged.problems)
    if found.engine.id != engine.id:
        problems.append(f"it is a certificate of {found.engine.id}")
    if not problems and not judged.certified:
        problems.append(f"its measurements don't pass: {', '.join(found.reasons)}")
    if not problems:
        # Anew, when a worker starts: a driver may have been replaced under a running host.
        profile = profile or hardware.detect(hardware.floor_keys(matrix, [engine.id]))
        identity = identity or binding.identity_of(binding.version_line(matrix, engine))
        now = binding.present(matrix, engine, bundle, artifact, profile, identity)
        problems = binding.void_because(binding.recorded(found, engine), now)
    return Certificate(path, found, tuple(problems))


def listed(
    matrix: HardwareMatrix,
    bundles: Mapping[str, Bundle],
    profile: HostProfile,
    *,
    data_dir: Path | None = None,
    identities: Mapping[str, Identity] | None = None,
) -> Iterator[Listed]:
    """Yield every stored certificate, sorted, each looked up under this matrix. *bundles*: the installed ones."""
    known = dict(identities or {})
    try:
        stored = sorted(folder(data_dir).glob("*/[!.]*.json"))
    except NoHome:
        return
    for path in stored:
        id = path.parent.name
        try:
            document, _ = documents.read(path)
        except InvalidRequest as exc:
            yield Listed(Certificate(path, None, (exc.message,)), id)
            continue
        of = document.model
        engine = matrix.engines.get(id)
        name, bundle = next(((n, one) for n, one in bundles.items() if one.digest == of.manifest_digest), ("", None))
        artifacts = bundle.artifacts(engine.format) if bundle is not None and engine is not None else []
        artifact = next((one for one in artifacts if one.digest == of.artifact_digest), None)
        if engine is None:
            why = f"the matrix has no engine {id}"
        elif bundle is None:
            why = "its bundle is not installed here, or was made anew since"
        elif artifact is None or path != path_of(matrix, engine, binding.model_of(bundle, artifact), data_dir):
            why = OTHERWISE
        else:
            if id not in known:
                known[id] = binding.identity_of(binding.version_line(matrix, engine))
            found = look_up(matrix, engine, bundle, artifact, profile, data_dir=data_dir, identity=known[id])
            fix = f"synapse certify {document.lane} --model {name} --engine {id}"
            yield Listed(found, id, document.lane, name, fix)
            continue
        yield Listed(Certificate(path, document, (why,)), id, document.lane, name or of.model_id)


def speeds(
    matrix: HardwareMatrix, lanes: Iterable[Lane], bundles: Iterable[Bundle], profile: HostProfile,
    *, data_dir: Path | None = None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the tokens per second of valid certificates by manifest digest and engine, of *lanes*' engines that fit.

    Blocks as :func:`look_up` does.
    """
    found: dict[str, dict[str, float]] = {}
    for lane, bundle in itertools.product(lanes, bundles):
        if lane.task != bundle.manifest.task:
            continue
        for engine in (matrix.engines[id] for id in lane.engines):
            _, artifact, _ = fit(matrix, engine, profile, bundle)
            if artifact is None:
                continue
            with suppress(NoHome):
                certificate = look_up(matrix, engine, bundle, artifact, profile, data_dir=data_dir)
                if certificate.valid and certificate.evidence is not None:
                    speed = certificate.evidence.reported.get("tokens_per_s", 0.0)
                    found.setdefault(bundle.digest, {})[engine.id] = speed
    return found
