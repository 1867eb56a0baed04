"""From a checked package to a model that has run once: graphs, sessions, device.

Progress units of LOAD: a MiB hashed (before), a tensor converted, a session made, a bucket warmed, a shape recorded.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from engines import machine
from engines.checkpoint.layout import INT8
from engines.checkpoint.read import Checkpoint
from engines.cuda import binding
from engines.cuda.buckets import Policy, ladder_up_to, whole_blocks
from engines.cuda.devices import CAPTURED_ROWS, CAPTURED_WIDTHS, CpuDevice, CudaDevice, Route
from engines.cuda.graphs.builder import Graph, ModelSpec, Precision, Variant, WeightStore
from engines.cuda.graphs.families import block, build, cpu_variants, cuda_variants, recorded_variants
from engines.cuda.model import OwnedModel
from engines.cuda.options import cuda_provider
from engines.cuda.settings import PRECISION_VARIABLE, Settings
from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.batch import TokenBatch
from engines.runtime.engine import DeviceLost
from engines.runtime.progress import silent

if TYPE_CHECKING:
    from engines.runtime.progress import ProgressReporter

CPU_CALL_TOKENS: Final = 256
"""Tokens a call on the CPU: small calls stay in the caches (models.md 7.5), and several run side by side."""
CPU_CALL_TOKENS_INT8: Final = 128
"""int8 has four more passes over a layer's values, so the caches matter more: 6 % on pairs of 128 tokens."""
CUDA_CALL_TOKENS: Final = 32768
CUDA_CALL_TOKENS_SMALL: Final = 65536
"""For models of at most 512 hidden units, such as MiniLM (8.3.2)."""
CUDA_CALL_TOKENS_F32: Final = 4096
"""The oracle's graphs write attention scores out (8.3.2): with the usual budget a call would ask for 88 GiB."""
TWIN_LIMIT: Final = 512 * 2**20
"""CPU: up to this many bytes of weights a second, one-thread session is kept for buckets that run side by side."""
log = logging.getLogger(__name__)


class Assembly:
    """Puts one model together: *spec*, weights and settings to graphs, sessions and a device."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, chosen: Settings, *,
        device: str, precision: Precision, int8: bool, progress: ProgressReporter,
    ) -> None:  # fmt: skip
        self.spec, self.chosen, self.nbytes = spec, chosen, checkpoint.nbytes
        self.device, self.precision, self.int8, self.progress = device, precision, int8, progress
        self.store = WeightStore(checkpoint.tensors, precision, progress.advance)
        self.block = block(spec)
        self.widest = whole_blocks(spec.max_tokens, self.block)

    def model(self) -> OwnedModel:
        """Build everything and run it once."""
        if self.device == "cpu":
            return self._on_cpu()
        cuda = binding.Cuda(int(self.device.partition(":")[2] or 0))
        try:
            return self._on_cuda(cuda)
        except DeviceLost:
            raise  # nothing can be released any more, and no session may be destroyed (faults.KEPT)
        except BaseException as exc:
            _forget_frames(exc)
            cuda.close()
            raise

    def _on_cpu(self) -> OwnedModel:
        usual, threads = CPU_CALL_TOKENS_INT8 if self.int8 else CPU_CALL_TOKENS, self.chosen.threads
        policy = Policy(tokens=self.chosen.call_tokens or usual, ladder=(), block=self.block, rows=256)
        twin = threads > 1 and self.nbytes <= TWIN_LIMIT
        cpus = machine.whole_machine(threads)
        bound = ";".join(str(cpu + 1) for cpu in cpus[1:])
        routes = []
        for variant, limit in cpu_variants(self.spec, int8=self.int8):
            graph = build(self.spec, self.store, variant)
            with ThreadPoolExecutor(1) as beside:  # a session's optimiser keeps one thread busy, without the GIL
                other = beside.submit(binding.session, graph, threads=1) if twin else None
                # A single call waits for its threads some sixty times; with nothing beside it they may stay awake.
                made = binding.session(graph, threads=threads, spin=twin, cpus=bound)
                self.progress.advance()
                narrow = None if other is None else other.result()
            if twin:
                self.progress.advance()
            routes.append(Route(graph, made, min(limit, self.widest), narrow))
        device = CpuDevice(
            routes, policy=policy, dims=self.spec.dims, widest=self.widest, threads=threads, cpus=cpus
        )  # fmt: skip
        model = OwnedModel(self.spec, policy, device)
        if self.chosen.warm:
            self._smoke(model, [1, min(16, self.spec.max_tokens)])
        log.info(
            "onnx-cpu: hardware floor skipped, %d threads, %d graphs, weights in %s",
            threads, len(routes), INT8 if self.int8 else self.precision,
        )  # fmt: skip
        return model

    def _on_cuda(self, cuda: binding.Cuda) -> OwnedModel:
        main = cuda_variants(self.spec, self.precision)
        recorded = recorded_variants(self.spec, self.precision) if self.chosen.cuda_graphs else []
        widths = dict([*recorded, *main])
        small = self.spec.config["hidden_size"] <= 512
        usual = CUDA_CALL_TOKENS_SMALL if small else CUDA_CALL_TOKENS
        usual = CUDA_CALL_TOKENS_F32 if self.precision == "f32" else usual
        policy = Policy(self.chosen.call_tokens or usual, ladder_up_to(self.widest, self.block))
        graphs = {variant: build(self.spec, self.store, variant) for variant in widths}
        weights = {name: array for graph in graphs.values() for name, array in graph.weights.items()}
        limits = self._memory_limits(graphs, dict(main), policy, sum(array.nbytes for array in weights.values()))
        shared = cuda.upload(weights)
        made: dict[Variant, Route] = {}
        for variant, graph in graphs.items():
            options = cuda_provider(
                index=cuda.index, stream=int(cuda.stream), cuda_graphs=self.chosen.cuda_graphs,
                memory_limit=limits[variant],
            )  # fmt: skip
            session = binding.session(graph, threads=1, cuda=options, shared=shared)
            made[variant] = Route(graph, session, min(widths[variant], self.widest))
            self.progress.advance()
        device = CudaDevice(
            cuda, [made[variant] for variant, _ in main], policy=policy, dims=self.spec.dims, widest=self.widest,
            captured=[made[variant] for variant, _ in recorded],
        )  # fmt: skip
        model = OwnedModel(self.spec, policy, device)
        if self.chosen.warm:
            for step in policy.ladder:
                self._smoke(model, [min(step, self.spec.max_tokens)] * min(256, policy.max_rows(step)))
        if recorded:
            device.record(self.progress.advance)
        free, total = cuda.memory_info()
        log.info(
            "cuda: %s, onnxruntime on CUDAExecutionProvider, %d graphs, %d of %d MiB of the device in use",
            self.device, len(made), (total - free) // 2**20, total // 2**20,
        )  # fmt: skip
        return model

    def _memory_limits(
        self, graphs: Mapping[Variant, Graph], main: Mapping[Variant, int], policy: Policy, weights: int
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

    def _smoke(self, model: OwnedModel, lengths: list[int]) -> None:
        """Run rows of pad tokens and look at the result: a model that can't answer isn't loaded."""
        cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        batch = TokenBatch(np.full(cu_seqlens[-1], self.spec.pad_id, np.int32), cu_seqlens)
        values = model.forward(batch, silent())
        self.progress.advance()
        if np.isfinite(values).all():
            return
        # Say whose fault NaN or infinity is: the package's, float16's or the device's.
        if (damaged := self.store.not_finite()) is not None:
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID, f"the model answers NaN or infinity; its weights are damaged: {damaged}"
            )
        advice = f"; try {PRECISION_VARIABLE}=f32 in the engine's env of the matrix" if self.precision == "f16" else ""
        raise EngineError(
            ErrorCode.NONFINITE_OUTPUT,
            f"the model answers NaN or infinity for rows of {max(lengths)} tokens, though every weight is finite: "
            f"a value leaves {self.store.dtype}'s range, or {self.device} computes wrong values{advice}",
        )


def _forget_frames(exc: BaseException) -> None:
    """Clear the frames that a failure went through: they hold sessions, which go before the memory they work with."""
    link: BaseException | None = exc
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
