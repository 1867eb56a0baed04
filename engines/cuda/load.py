"""LOAD of the owned worker: manifest and settings first, hardware before the artifact, digest before weights.

The order and the codes are llama-cuda.md 6.2, 8.1 and 8.2. What is checked by then is put together in
:mod:`engines.cuda.assembly`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import UNSET

from engines.bundle.manifest import Artifact, Bundle, BundleError, Family, Manifest
from engines.checkpoint.layout import INT8
from engines.checkpoint.package import profile_of
from engines.checkpoint.read import Checkpoint
from engines.checkpoint.safetensors import SafetensorsFile
from engines.cuda import floor, settings
from engines.cuda.assembly import Assembly
from engines.cuda.graphs.builder import ModelSpec, Precision
from engines.cuda.graphs.families import FAMILIES
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime import artifact

if TYPE_CHECKING:
    from engines.cuda.model import OwnedModel
    from engines.protocol.messages import Load
    from engines.runtime.engine import Probe
    from engines.runtime.progress import ProgressReporter

FORMAT: Final = "safetensors-package"
MAX_TOKENS: Final = 8192
"""Longest row of any model (llama-cuda.md 6.2, ``admission.max_context_tokens``)."""


def load(
    request: Load, bundle: Bundle, *,
    device: str, precision: Precision, probe: Callable[[], Probe], progress: ProgressReporter,
) -> OwnedModel:  # fmt: skip
    """Verify and load one artifact. Raises EngineError; nothing stays behind then."""
    expected = artifact.expected_digest(request.artifact_digest)
    if not request.artifact_path:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "artifact_path is empty")
    if request.format != FORMAT:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"format {request.format!r}: this engine loads {FORMAT} only")
    chosen = settings.parse(request.runtime_config, device=device, precision=precision)
    check_manifest(request, bundle.manifest)
    verdict = probe()  # before the artifact is opened: a machine without the hardware says so, whatever the file is
    if verdict.status != "ok":
        raise floor.refusal(verdict)
    entry = find_artifact(bundle, expected)
    int8 = entry.dtype == INT8
    if int8 and device != "cpu":  # its graph is made of the CPU provider's operators
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"model_unsupported: {entry.path} is int8, which only the CPU serves; {device} takes f32 and f16",
        )
    with artifact.open_artifact(request.artifact_path) as file:
        checkpoint = open_package(request.artifact_path, file.fileno(), bundle.manifest, int8=int8)
        file.verify(entry.digest, progress)
        spec = spec_of(bundle.manifest, checkpoint.config)
        model = Assembly(
            spec, checkpoint, chosen, device=device, precision=precision, int8=int8, progress=progress
        ).model()
        try:
            file.recheck(progress)
        except EngineError:
            model.close()
            raise
        return model


def check_manifest(request: Load, manifest: Manifest) -> None:
    """Compare LOAD's optional ``profile`` and ``operation`` with the manifest, which decides."""
    mine = profile_of(manifest.model_id)
    profile, operation = (request.runtime_config.get(key) for key in ("profile", "operation"))
    if profile not in (None, mine):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED, f"model_unsupported: profile {profile!r}, this bundle is {mine!r}"
        )
    if operation not in (None, manifest.task):
        raise EngineError(
            ErrorCode.OPERATION_MISMATCH, f"operation {operation!r}, this bundle's task is {manifest.task}"
        )
    if manifest.task not in ("embed", "rerank") or manifest.family not in FAMILIES:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"model_unsupported: a {manifest.family} {manifest.task} model is not served here",
        )


def find_artifact(bundle: Bundle, expected: str) -> Artifact:
    """Return the manifest's artifact that LOAD names by digest, before the file is opened."""
    for entry in bundle.artifacts(FORMAT):
        if entry.digest.removeprefix("sha256:") == expected:
            return entry
    raise EngineError(
        ErrorCode.PACKAGE_DIGEST_MISMATCH,
        f"package_digest_mismatch: no {FORMAT} of the manifest has digest sha256:{expected}",
    )


def open_package(path: str, fd: int, manifest: Manifest, *, int8: bool) -> Checkpoint:
    """Read the package's header by descriptor *fd*: whose it is, and that it has every tensor. Touches no weight."""
    try:
        profile = SafetensorsFile.open(path, fd=fd).header.metadata.get("profile")
        if profile not in (None, profile_of(manifest.model_id)):
            raise EngineError(
                ErrorCode.PACKAGE_DIGEST_MISMATCH,
                f"package_digest_mismatch: the package is {profile!r}, not {profile_of(manifest.model_id)!r}",
            )
        config = manifest.config if manifest.config is not UNSET else {}
        return Checkpoint.from_package(
            path, config=config, family=cast(Family, manifest.family), task=manifest.task, fd=fd, int8=int8
        )
    except BundleError as exc:
        word = "head_tensor_missing: " if ": tensor " in str(exc) else ""
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{word}{exc}") from exc


def spec_of(manifest: Manifest, config: dict[str, Any]) -> ModelSpec:
    """Return what the manifest says of a model with the completed *config*; what contradicts it is refused."""
    special = manifest.special_ids if manifest.special_ids is not UNSET else {}
    head = manifest.head if manifest.head is not UNSET else {}
    pooling = manifest.pooling.value if manifest.pooling is not UNSET else "cls"
    separator = special.get("sep", -1) if manifest.token_types is True else None
    pad = special.get("pad", config.get("pad_token_id") or 0)
    width = manifest.worker_dims
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    for wrong, words in (
        (separator == -1, "token_types needs special_ids.sep"),
        (manifest.task == "embed" and width != hidden, f"dims {width}, the checkpoint has {hidden}"),
        (not isinstance(pad, int) or not 0 <= pad < vocabulary, f"pad id {pad!r} is not in the vocabulary"),
    ):
        if wrong:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, f"manifest.json: {words}")
    return ModelSpec(
        manifest.family, manifest.task, width, config,
        max_tokens=min(manifest.max_tokens, config["max_position_embeddings"], MAX_TOKENS),
        pooling=pooling, normalize=manifest.worker_normalizes, head=head, pad_id=pad, separator=separator,
    )  # fmt: skip
