"""LOAD of the owned worker: manifest and settings first, hardware before the artifact, digest before weights.

The order and the codes are llama-cuda.md 6.2, 8.1 and 8.2. Progress units: a MiB hashed, a tensor converted, a session
made, a bucket warmed.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from msgspec import UNSET

from engines import machine
from engines.bundle.manifest import Artifact, Bundle, BundleError
from engines.checkpoint import layout
from engines.checkpoint.layout import INT8
from engines.checkpoint.package import profile_of
from engines.checkpoint.read import Checkpoint, complete_config
from engines.checkpoint.safetensors import SafetensorsFile
from engines.cuda import binding, floor, settings
from engines.cuda.binding import Cuda
from engines.cuda.buckets import Policy, ladder_up_to
from engines.cuda.devices import CAPTURED_ROWS, CAPTURED_WIDTHS, CpuDevice, CudaDevice, Route
from engines.cuda.graphs.builder import Graph, ModelSpec, Precision, Variant, WeightStore
from engines.cuda.graphs.families import build, cpu_variants, cuda_variants, recorded_variants
from engines.cuda.graphs.modernbert import half_window
from engines.cuda.model import MAX_TOKENS, Facts, OwnedModel
from engines.cuda.options import cuda_provider
from engines.cuda.settings import (
    CPU_CALL_TOKENS,
    CPU_CALL_TOKENS_INT8,
    CUDA_CALL_TOKENS,
    CUDA_CALL_TOKENS_SMALL,
    CUDA_SCORE_BYTES,
    PRECISION_VARIABLE,
    Settings,
)  # fmt: skip
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime import artifact
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import DeviceLost, Probe
from engines.runtime.progress import ProgressReporter, silent

if TYPE_CHECKING:
    from engines.protocol.messages import Load

FORMAT = "safetensors-package"
TWIN_LIMIT = 512 * 2**20
"""CPU: up to this many bytes of weights a second, one-thread session is kept for buckets that run side by side."""
log = logging.getLogger(__name__)


def load(
    request: Load, bundle: Bundle, *,
    device: str, precision: Precision, probe: Callable[[], Probe], progress: ProgressReporter,
) -> OwnedModel:  # fmt: skip
    """Verify and load one artifact after :func:`check_request`. Raises EngineError; nothing stays behind then."""
    chosen = settings.parse(request.runtime_config, device=device, precision=precision)
    check_manifest(request, bundle)
    verdict = probe()  # before the artifact is opened: a machine without the hardware says so, whatever the file is
    if verdict.status != "ok":
        raise floor.refusal(verdict)
    entry = check_digest(request, bundle)
    int8 = entry.dtype == INT8
    with artifact.open_artifact(request.artifact_path) as file:
        check_dtype(entry, device)
        config = check_header(file, Path(request.artifact_path), bundle, int8=int8)
        file.verify(entry.digest, progress)
        try:
            checkpoint = Checkpoint.from_package(
                request.artifact_path, config=config, family=bundle.manifest.family, task=bundle.manifest.task,
                fd=file.fileno(), int8=int8,
            )  # fmt: skip
        except BundleError as exc:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, str(exc)) from exc
        model = _Assembly(
            bundle, checkpoint, chosen, device=device, precision=precision, int8=int8, progress=progress
        ).model()
        try:
            file.recheck(progress)
        except EngineError:
            model.close()
            raise
        return model


def check_request(request: Load) -> None:
    """Check what needs no file."""
    if not request.artifact_path or not request.format:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, "LOAD needs artifact_path and format")
    artifact.expected_digest(request.artifact_digest)
    if request.format != FORMAT:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"format {request.format!r}: this engine loads {FORMAT} only")


def check_manifest(request: Load, bundle: Bundle) -> None:
    """Compare LOAD's optional ``profile`` and ``operation`` with the manifest, which decides."""
    manifest = bundle.manifest
    profile, operation = request.runtime_config.get("profile"), request.runtime_config.get("operation")
    if profile is not None and profile != profile_of(manifest.model_id):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"model_unsupported: profile {profile!r}, this bundle is {profile_of(manifest.model_id)!r}",
        )
    if operation is not None and operation != manifest.task:
        raise EngineError(
            ErrorCode.OPERATION_MISMATCH, f"operation {operation!r}, this bundle's task is {manifest.task}"
        )
    if manifest.task not in ("embed", "rerank") or manifest.family not in ("bert", "modernbert", "qwen3"):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"model_unsupported: a {manifest.family} {manifest.task} model is not served here",
        )


def check_digest(request: Load, bundle: Bundle) -> Artifact:
    """Return the manifest's artifact that LOAD names by digest, before the file is opened."""
    expected = artifact.expected_digest(request.artifact_digest)
    for entry in bundle.artifacts(FORMAT):
        if entry.digest.removeprefix("sha256:") == expected:
            return entry
    raise EngineError(
        ErrorCode.PACKAGE_DIGEST_MISMATCH,
        f"package_digest_mismatch: no {FORMAT} of the manifest has digest sha256:{expected}",
    )


def check_dtype(entry: Artifact, device: str) -> None:
    """Refuse an int8 package on the GPU: its graph is made of the CPU provider's operators."""
    if entry.dtype == INT8 and device != "cpu":
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"model_unsupported: {entry.path} is int8, which only the CPU serves; {device} takes f32 and f16",
        )


def check_header(file: BinaryIO, path: Path, bundle: Bundle, *, int8: bool = False) -> dict[str, Any]:
    """Read the package's header only: profile, required tensors, exact shapes. Return the completed config."""
    manifest = bundle.manifest
    try:
        header = SafetensorsFile.open(path, fd=file.fileno()).header
        config = dict(manifest.config) if manifest.config is not UNSET else {}
        full = complete_config(config, manifest.family, where="manifest.json: config", from_manifest=True)
        required = (layout.required_int8 if int8 else layout.required)(manifest.family, manifest.task, full)
    except BundleError as exc:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, str(exc)) from exc
    profile = header.metadata.get("profile")
    if profile is not None and profile != profile_of(manifest.model_id):
        raise EngineError(
            ErrorCode.PACKAGE_DIGEST_MISMATCH,
            f"package_digest_mismatch: the package is {profile!r}, the manifest {profile_of(manifest.model_id)!r}",
        )
    shapes = {layout.canonical(name): info.shape for name, info in header.tensors.items()}
    for name, shape in required.items():
        if shapes.get(name) != shape:
            found = f"has shape {list(shapes[name])}" if name in shapes else "is missing"
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID, f"head_tensor_missing: {name} {found}, the manifest needs {list(shape)}"
            )
    return config


class _Assembly:
    """Checkpoint and settings -> graphs, sessions, device, model."""

    def __init__(
        self, bundle: Bundle, checkpoint: Checkpoint, chosen: Settings, *,
        device: str, precision: Precision, int8: bool, progress: ProgressReporter,
    ) -> None:  # fmt: skip
        manifest = bundle.manifest
        self.chosen, self.device, self.precision, self.progress = chosen, device, precision, progress
        self.int8 = int8
        config = checkpoint.config
        types = manifest.token_types is True
        special = manifest.special_ids if manifest.special_ids is not UNSET else {}
        if types and "sep" not in special:
            raise EngineError(ErrorCode.ARTIFACT_INVALID, "manifest.json: token_types needs special_ids.sep")
        self.spec = ModelSpec(
            manifest.family, manifest.task, manifest.dims, config,
            pooling=manifest.pooling.value if manifest.pooling is not UNSET else "cls",
            normalize=manifest.normalize is True, token_types=types,
            head=manifest.head if manifest.head is not UNSET else {},
        )  # fmt: skip
        if manifest.task == "embed" and manifest.dims != config["hidden_size"]:
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID,
                f"manifest.json: dims {manifest.dims}, the checkpoint has {config['hidden_size']}",
            )
        self.facts = Facts(
            task=manifest.task, dims=manifest.dims,
            max_tokens=min(manifest.max_tokens, config["max_position_embeddings"], MAX_TOKENS),
            vocab=config["vocab_size"],
            pad_id=int(special.get("pad", config.get("pad_token_id") or 0)),
            pooling=self.spec.pooling if manifest.task == "embed" else None,
            normalize=self.spec.normalize if manifest.task == "embed" else None,
            separator=special.get("sep") if types else None,
        )  # fmt: skip
        if not 0 <= self.facts.pad_id < self.facts.vocab:
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID, f"manifest.json: pad id {self.facts.pad_id} is not in the vocabulary"
            )
        self.store: WeightStore = WeightStore(checkpoint.tensors, precision, progress.advance)
        self.nbytes = checkpoint.nbytes

    def model(self) -> OwnedModel:
        """Build everything and run it once."""
        return self._cpu() if self.device == "cpu" else self._cuda()

    def _cpu(self) -> OwnedModel:
        multiple, free = self.blocks()
        widest = max(_round(self.facts.max_tokens, multiple, free), self.facts.max_tokens)
        usual = CPU_CALL_TOKENS_INT8 if self.int8 else CPU_CALL_TOKENS
        policy = Policy(tokens=self.chosen.call_tokens or usual, ladder=(), multiple=multiple, free=free, rows=256)
        twin = self.chosen.threads > 1 and self.nbytes <= TWIN_LIMIT
        cpus = machine.whole_machine(self.chosen.threads)
        bound = ";".join(str(cpu + 1) for cpu in cpus[1:])
        routes = []
        for variant, limit in cpu_variants(self.spec, int8=self.int8):
            graph = build(self.spec, self.store, variant)
            # A single call waits for its threads some sixty times; with nothing beside it they may stay awake.
            made = binding.session(graph, threads=self.chosen.threads, spin=twin, cpus=bound)
            self.progress.advance()
            narrow = None
            if twin:
                narrow = binding.session(graph, threads=1)
                self.progress.advance()
            routes.append(Route(graph, made, min(limit, widest), narrow))
        device = CpuDevice(
            routes, policy=policy, dims=self.facts.dims, widest=widest, threads=self.chosen.threads, cpus=cpus
        )
        model = OwnedModel(self.facts, policy, device)
        if self.chosen.warm:
            self._smoke(model, [1, min(16, self.facts.max_tokens)])
        log.info(
            "onnx-cpu: hardware floor skipped, %d threads, %d graphs, weights in %s",
            self.chosen.threads, len(routes), INT8 if self.int8 else self.precision,
        )  # fmt: skip
        return model

    def _cuda(self) -> OwnedModel:
        cuda = binding.Cuda(int(self.device.partition(":")[2] or 0))
        try:
            return self._on_cuda(cuda)
        except DeviceLost:
            raise  # nothing can be released any more, and no session may be destroyed (faults.KEPT)
        except BaseException as exc:
            _forget_frames(exc)
            cuda.close()
            raise

    def _on_cuda(self, cuda: Cuda) -> OwnedModel:
        main = cuda_variants(self.spec, self.chosen.attention, self.precision)
        recorded = recorded_variants(self.spec, self.precision) if self.chosen.cuda_graphs else []
        widths = dict([*recorded, *main])
        policy, widest = self._cuda_policy(stores_scores=any(v.attention == "plain" for v, _ in main))
        graphs = {variant: build(self.spec, self.store, variant) for variant in widths}
        weights = {name: array for graph in graphs.values() for name, array in graph.weights.items()}
        limits = self._memory_limits(graphs, [v for v, _ in main], policy, sum(a.nbytes for a in weights.values()))
        shared = cuda.upload(weights)
        made: dict[Variant, Route] = {}
        for variant, graph in graphs.items():
            options = cuda_provider(
                index=cuda.index, stream=int(cuda.stream), cuda_graphs=self.chosen.cuda_graphs,
                memory_limit=limits[variant],
            )  # fmt: skip
            session = binding.session(graph, threads=1, cuda=options, shared=shared)
            made[variant] = Route(graph, session, min(widths[variant], widest))
            self.progress.advance()
        device = CudaDevice(
            cuda,
            [made[variant] for variant, _ in main],
            policy=policy, dims=self.facts.dims, widest=widest, captured=[made[variant] for variant, _ in recorded],
        )  # fmt: skip
        model = OwnedModel(self.facts, policy, device)
        if self.chosen.warm:
            for step in policy.ladder:
                width = min(step, self.facts.max_tokens)
                self._smoke(model, [width] * min(256, policy.max_rows(step)))
        if recorded:
            device.record(self.progress.advance)
        free, total = cuda.memory_info()
        log.info(
            "cuda: %s, onnxruntime on CUDAExecutionProvider, %d graphs, %d of %d MiB of the device in use",
            self.device, len(made), (total - free) // 2**20, total // 2**20,
        )  # fmt: skip
        return model

    def _cuda_policy(self, *, stores_scores: bool) -> tuple[Policy, int]:
        """Return how rows become calls, and the widest row. *stores_scores*: a graph writes attention scores out."""
        multiple, free = self.blocks()
        widest = _round(self.facts.max_tokens, multiple, free)
        small = self.spec.integer("hidden_size") <= 512
        score = self.spec.integer("num_attention_heads") * (2 if self.precision == "f16" else 4)
        policy = Policy(
            tokens=self.chosen.call_tokens or (CUDA_CALL_TOKENS_SMALL if small else CUDA_CALL_TOKENS),
            ladder=ladder_up_to(widest, multiple=multiple, free=free),
            merge_cells=0 if self.chosen.bucket_policy == "v1" else 128,
            scores=CUDA_SCORE_BYTES // score if stores_scores else 0,
        )
        return policy, widest

    def _memory_limits(
        self, graphs: Mapping[Variant, Graph], main: Sequence[Variant], policy: Policy, weights: int
    ) -> dict[Variant, int]:
        """Return each session's part of ``gpu_mem_limit_mb``, in bytes; 0: no limit.

        Every session has an arena of its own, so what the weights leave is divided by the size of their calls.
        """
        limit = self.chosen.gpu_mem_limit_mb * 2**20
        if not limit:
            return dict.fromkeys(graphs, 0)
        if limit <= weights:
            raise EngineError(
                ErrorCode.OOM,
                f"gpu_mem_limit_mb {self.chosen.gpu_mem_limit_mb}: the weights alone take {-(-weights // 2**20)} MiB",
            )
        largest = CAPTURED_ROWS[-1] * CAPTURED_WIDTHS[-1]
        cells = {variant: max(policy.tokens, largest) if variant in main else largest for variant in graphs}
        return {variant: (limit - weights) * share // sum(cells.values()) for variant, share in cells.items()}

    def blocks(self) -> tuple[int, int]:
        """Return (multiple, free): above *free* tokens a ModernBERT row's width is a whole number of half windows."""
        if self.spec.family != "modernbert":
            return 1, 0
        window = half_window(self.spec.number("local_attention", 128))
        return window, window + 1

    def _smoke(self, model: OwnedModel, lengths: list[int]) -> None:
        """Run rows of pad tokens and look at the result: a model that can't answer isn't loaded."""
        cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        batch = TokenBatch(np.full(cu_seqlens[-1], self.facts.pad_id, np.int32), cu_seqlens)
        values = model.forward(batch, silent())
        self.progress.advance()
        if not np.isfinite(values).all():
            raise self._not_finite(max(lengths))

    def _not_finite(self, width: int) -> EngineError:
        """Say whose fault NaN or infinity is: the package's, float16's or the device's."""
        damaged = self.store.not_finite()
        if damaged is not None:
            return EngineError(
                ErrorCode.ARTIFACT_INVALID, f"the model answers NaN or infinity; its weights are damaged: {damaged}"
            )
        what = f"the model answers NaN or infinity for rows of {width} tokens, though every weight is finite"
        cause = f"a value leaves {self.store.dtype}'s range, or {self.device} computes wrong values"
        if self.precision == "f16":
            cause += f"; try {PRECISION_VARIABLE}=f32 in the engine's env of the matrix"
        return EngineError(ErrorCode.NONFINITE_OUTPUT, f"{what}: {cause}")


def _round(width: int, multiple: int, free: int) -> int:
    return width if width <= free else -(-width // multiple) * multiple


def _forget_frames(exc: BaseException) -> None:
    """Clear the frames that a failure went through: they hold sessions, which go before the memory they work with."""
    link: BaseException | None = exc
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
