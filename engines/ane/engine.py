"""The Core ML worker's engine: who it is, whether this machine can run it, and LOAD.

Theory of operation. A worker process holds at most one model, the one of its ``--manifest``. The model is a set of
functions of fixed shape: one for each bucket (one row, padded to it) and one for each packed width (several rows back
to back). Each function that is loaded, is *resident*, takes memory and a place on the Neural Engine, so the host says
which ones are (ADMIT, EVICT) and the worker only keeps a hard cap; nothing loads implicitly.

LOAD, in this order: runtime_config, manifest, is this a machine for Core ML, the digest of the compiled folder, the
preparer's record beside it (made from this bundle, on this OS build), each function's signature. Only then the
framework is asked: the smallest bucket is opened, its signature compared, run once, its compute plan read. An admission
later does the same for its function. After each native load the files are compared with those that LOAD hashed, since
the framework opens them by path (:class:`engines.ane.artifact.Verified`).

A request is checked before the framework sees it (ids in the vocabulary, every function it needs resident), runs row
by row or pass by pass, and every output is checked after (shape, finite, not all zeros). Pooling is done here, not in
the function.

One thread does all of this, so nothing is locked; the peer watcher and Core ML's own queues run beside it, which works
because the binding releases the GIL around every call. Everything above :mod:`engines.ane.backend` is tested on any
machine; only :mod:`engines.ane.binding` needs a Mac. Neither numpy nor the framework is imported for HELLO or PING.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, cast

from msgspec import UNSET

from engines.ane import REVISION
from engines.ane.families import serves
from engines.bundle import manifest, tight
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import (
    ANE_ENGINE,
    AneAdmitPacked,
    AneAdmitShape,
    AneEvictPacked,
    AneEvictShape,
    Load,
    PackedCapability,
    Request,
)
from engines.runtime.engine import OWNED_SERVING, Engine, EngineIdentity, Model, Probe, WorkerOptions, own_version

if TYPE_CHECKING:
    from engines.ane.backend import Backend
    from engines.ane.config import Settings
    from engines.ane.inputs import InputRules
    from engines.ane.model import PlanCache
    from engines.ane.signature import Key
    from engines.bundle.manifest import Artifact, Bundle, Family, Manifest
    from engines.runtime.progress import ProgressReporter

FORMAT: Final = "coreml"
FORMATS: Final = (FORMAT, "mlmodelc")
"""What LOAD may call a compiled folder."""
VERSION_PREFIX: Final = "synapse-workers-"
SHAPES: Final[frozenset[type[Request]]] = frozenset({AneAdmitShape, AneEvictShape, AneAdmitPacked, AneEvictPacked})


class AneEngine(Engine):
    """Core ML functions of one bundle in a worker process; one model at a time.

    *backend* is the seam below which only a Mac can go; tests pass another one. The default is PyObjC's.
    """

    name: ClassVar[str] = ANE_ENGINE
    serves: ClassVar[frozenset[type[Request]]] = OWNED_SERVING | SHAPES
    max_models: ClassVar[int | None] = 1
    ref_prefix: ClassVar[str] = "ane"

    def __init__(self, options: WorkerOptions, backend: Backend | None = None) -> None:
        if backend is None:
            from engines.ane.coreml import CoreML

            backend = CoreML()
        self._options = options
        self._backend = backend
        self._plans: PlanCache = {}

    @cached_property
    def _bundle(self) -> Bundle | str:
        """The bundle named by ``--manifest``, or why it can't be used."""
        if self._options.manifest is None:
            return "the worker was started without --manifest, and the manifest says what a Core ML model is"
        try:
            return manifest.read(self._options.manifest)
        except manifest.BundleError as exc:
            return str(exc)

    def identity(self) -> EngineIdentity:
        """Return what HELLO says, from package metadata, the manifest file and the OS's version file."""
        bundle = None if isinstance(self._bundle, str) else self._bundle
        device = self._options.device
        flags = {"backend": FORMAT, "device": device, "placement": "neural-engine", "risk_class": "abort_capable"}
        return EngineIdentity(
            engine=self._backend.engine,
            version=VERSION_PREFIX + own_version(),
            build_flags=flags,
            manifest_digest=bundle.digest if bundle is not None else None,
            kernel_revision=f"{REVISION}/{self._backend.runtime}/{device}/f16",
            packed=self._packed(bundle) if bundle is not None else None,
        )

    def _packed(self, bundle: Bundle) -> PackedCapability | None:
        """The qualified widths that the bundle has; without any, HELLO omits ``packed``."""
        functions = [function for artifact in bundle.artifacts(FORMAT) for function in artifact.functions or ()]
        have = {function.packed_width for function in functions if function.packed_width is not UNSET}
        widths = sorted(have.intersection(self._options.packed or ()))
        return PackedCapability(layout=tight.LAYOUT, widths=widths, max_rows=tight.MAX_ROWS) if widths else None

    def probe_floor(self) -> Probe:
        """Return the verdict of :func:`engines.ane.coreml.probe`."""
        from engines.ane.coreml import probe

        return probe()

    def load(self, request: Load, *, progress: ProgressReporter) -> Model:
        """Check configuration, manifest, every digest and signature, then load and run the smallest bucket only.

        Unit of progress: a MiB hashed, then a function loaded, run once, planned. EngineError: config_invalid,
        backend_missing, artifact_invalid, package_digest_mismatch, specialization_missing, model_unsupported,
        operation_mismatch, ane_resources_exhausted, invalid_placement, nonfinite_output, oom. All or nothing.
        """
        from engines.ane import artifact as files
        from engines.ane import config
        from engines.ane.model import AneModel
        from engines.ane.signature import check_signature, expected
        from engines.runtime.artifact import expected_digest

        settings = config.parse(request.runtime_config)
        if request.format not in FORMATS:
            why = f"format is {request.format[:40]!r}, this worker loads {', '.join(FORMATS)}"
            raise EngineError(ErrorCode.ARTIFACT_INVALID, why)
        bundle = self._bundle
        if isinstance(bundle, str):
            raise EngineError(ErrorCode.CONFIG_INVALID, bundle)
        described = bundle.manifest
        _cross_check(described, settings)
        artifacts = bundle.artifacts(FORMAT)
        if not artifacts:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, f"bundle {described.model_id} has no coreml artifact")
        expected_digest(request.artifact_digest)  # before the machine is asked: bad input is the same everywhere
        self._backend.require()
        folder = files.Verified(request.artifact_path, request.artifact_digest, progress)
        known = {one.digest: one for one in artifacts}
        os_build, cold = self._backend.os_build(), settings.prepare == "allow_cold"
        record = files.prepared(folder.root, source_digests=known, os_build=os_build, allow_cold=cold)
        artifact = known[record.source_digest]
        rules, hidden, layers = _rules(described, artifact)
        keys = _keys(artifact)
        found = files.sources(folder.root, keys.values(), record)
        for key, name in keys.items():
            check_signature(name, found[name][1], expected(key, rules, task=described.task, hidden=hidden))
        return AneModel(
            backend=self._backend,
            functions={key: (name, *found[name]) for key, name in keys.items()},
            recheck=folder.recheck,
            rules=rules,
            task=described.task,
            hidden=hidden,
            layers=layers,
            settings=settings,
            bundle_digest=bundle.digest,
            version=VERSION_PREFIX + own_version(),
            plans=self._plans,
            progress=progress,
        )


def _cross_check(described: Manifest, settings: Settings) -> None:
    """LOAD's ``operation`` and ``profile`` are optional cross-checks; the manifest decides."""
    if settings.operation is not None and settings.operation != described.task:
        why = f"operation is {settings.operation[:40]!r}, the bundle is for {described.task}"
        raise EngineError(ErrorCode.OPERATION_MISMATCH, why)
    if settings.profile is not None and settings.profile != described.model_id:
        why = f"profile is {settings.profile[:64]!r}, the bundle is {described.model_id}"
        raise EngineError(ErrorCode.CONFIG_INVALID, why)
    if not serves(described.family, described.task):
        why = f"{described.family} for {described.task} does not run on this engine"
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, why)


def _keys(artifact: Artifact) -> dict[Key, str]:
    """Return key -> name of the artifact's functions. EngineError without a bucket."""
    from engines.ane.signature import Key

    keys: dict[Key, str] = {}
    for function in artifact.functions or ():
        if bool(function.bucket) is bool(function.packed_width):
            why = f"function {function.name} must have one of bucket and packed_width"
            raise EngineError(ErrorCode.ARTIFACT_INVALID, why)
        key = Key("shape", function.bucket) if function.bucket else Key("packed", function.packed_width or 0)
        if key in keys:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, f"the manifest names {key} twice")
        keys[key] = function.name
    if not any(key.kind == "shape" for key in keys):
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "the artifact has no bucket; a model needs one single function")
    return keys


def _rules(described: Manifest, artifact: Artifact) -> tuple[InputRules, int, int]:
    """Return what rows must look like, the hidden size, and the layer count, from the manifest."""
    from engines.ane.inputs import InputRules
    from engines.checkpoint.read import CheckpointError, complete_config

    if described.config is UNSET:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "manifest.json: config is missing")
    try:
        where = "manifest.json: config"
        c = complete_config(described.config, cast("Family", described.family), where=where, from_manifest=True)
    except CheckpointError as exc:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, str(exc)) from exc
    special = described.special_ids or {}
    token_types = described.token_types is True
    if token_types and "sep" not in special:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "manifest.json: special_ids.sep is missing (token types need it)")
    sep = special["sep"] if token_types else None
    rules = InputRules.of(described.family, c, pad_id=special.get("pad", 0), token_types=token_types, sep_id=sep)
    return rules, c["hidden_size"], artifact.layers or c["num_hidden_layers"]
