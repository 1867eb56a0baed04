"""The two devices: the CPU provider and the CUDA provider behind :class:`engines.cuda.pipeline.Device`.

Both bind inputs and output by address and never let onnxruntime allocate or copy at the edge. On the CPU a slot's
memory is what the graph reads; on the GPU it is page-locked and one copy each way goes over the compute stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from engines.cuda.binding import Binding, Cuda
from engines.cuda.buckets import Bucket, Policy
from engines.cuda.graphs.builder import Graph
from engines.cuda.staging import Filler, Shape, Slot, layout, slot_bytes
from engines.machine import bound_to
from engines.protocol.errors import EngineError
from engines.runtime.engine import DeviceLost

if TYPE_CHECKING:
    from engines.runtime.batch import FloatArray

CAPTURED_ROWS: Final = (1, 2, 4, 8)
CAPTURED_WIDTHS: Final = (16, 32, 64, 128)
"""Latency shapes whose launches are recorded at LOAD: 16 graph ids, each of which pins its buffers (8.5)."""
WARM_RUNS: Final = 3
"""Runs of a captured shape before it serves: the first ones allocate, a later one is recorded (7.1)."""


@dataclass(frozen=True, slots=True)
class Route:
    """A graph's session and the widest row it takes."""

    graph: Graph
    session: Any
    widest: int
    narrow: Any = None
    """CPU: the same graph on one thread, for buckets that run side by side."""

    @property
    def packed(self) -> bool:
        """Whether rows lie end to end."""
        return self.graph.variant.attention == "packed"


def route(routes: Sequence[Route], width: int) -> Route:
    """Return the first route that takes *width*; routes are ordered by it."""
    return next((r for r in routes if width <= r.widest), routes[-1])


class Launch(NamedTuple):
    """A graph bound to a block of inputs and an output on the device; *number* names its recording, -1 is none."""

    binding: Binding
    device: int
    out: int
    number: str


def bind(binding: Binding, graph: Graph, shape: Shape, *, base: int, host: int, out: int, dims: int) -> None:
    """Bind a graph to addresses: inputs in a block at *base*, on the GPU ``max_len`` in its host copy at *host*."""
    for name in graph.inputs:
        offset, dimensions = shape.places[name]
        on_host = name == "max_len"  # an operator reads it on the CPU side, also on the GPU
        binding.input(name, dimensions, (host if on_host else base) + offset, host=on_host)
    binding.output(graph.output, (shape.rows, dims), out)


class CpuDevice:
    """The CPU provider. Several buckets run side by side on one thread each; a single one takes all threads."""

    def __init__(
        self, routes: Sequence[Route], *,
        policy: Policy, dims: int, widest: int, threads: int, cpus: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.routes, self.dims, self.threads = routes, dims, threads
        # The wide session's threads have every CPU but the first. A caller that wakes up on one of theirs shares it for
        # most of a short run, since nothing moves either of them away in time.
        self._cpu = cpus[0] if cpus else None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="forward") if routes[0].narrow else None
        names = sorted({name for r in routes for name in r.graph.inputs})
        size = slot_bytes(names, cells=max(policy.tokens, widest))
        count = threads + 1 if self._pool is not None else 2
        self._large = 4 * policy.tokens
        self.slots: tuple[Slot, ...] = tuple(self._slot(size, policy) for _ in range(count))

    def _slot(self, size: int, policy: Policy) -> Slot:
        host = np.empty(size, np.uint8)
        out = np.empty(min(policy.rows, policy.tokens) * self.dims, np.float32)
        return Slot(host, host.ctypes.data, out, out.ctypes.data)

    def shape(self, filler: Filler, bucket: Bucket) -> Shape:
        """Exactly the bucket."""
        names = route(self.routes, bucket.width).graph.inputs
        return filler.shape(bucket, names, rows=bucket.rows, width=bucket.width, packed=False)

    def submit(self, slot: Slot, shape: Shape, *, alone: bool) -> None:
        """Run in a pool thread, or in this one where nothing runs beside it."""
        if alone or self._pool is None:
            with bound_to(self._cpu):
                self._forward(slot, shape, wide=True)
            slot.native["future"] = None
        else:
            slot.native["future"] = self._pool.submit(self._forward, slot, shape, wide=False)

    def wait(self, slot: Slot, shape: Shape) -> FloatArray:
        """Return the rows."""
        future: Future[None] | None = slot.native.pop("future")
        if future is not None:
            future.result()
        return slot.out[: shape.rows * self.dims].reshape(shape.rows, self.dims)

    def _forward(self, slot: Slot, shape: Shape, *, wide: bool) -> None:
        chosen = route(self.routes, shape.width)
        binding, base = Binding(chosen.session if wide else chosen.narrow, "cpu", 0), slot.address
        bind(binding, chosen.graph, shape, base=base, host=base, out=slot.out_address, dims=self.dims)
        # onnxruntime's arena never shrinks by itself; one long row must not keep its scores for the worker's life.
        large = shape.rows * shape.width > self._large
        binding.run({"memory.enable_memory_arena_shrinkage": "cpu:0"} if large else {})

    def close(self) -> None:
        """Stop the threads and drop the sessions."""
        if self._pool is not None:
            self._pool.shutdown()
        self.routes = ()


class CudaDevice:
    """The CUDA provider on one stream: upload, forward and download of two slots follow each other on it.

    The host waits for a slot's event only, so it prepares one slot while the GPU works on the other. All memory belongs
    to *cuda*, which the device closes; whoever fails to make a device closes it himself.
    """

    def __init__(
        self, cuda: Cuda, routes: Sequence[Route], *,
        policy: Policy, dims: int, widest: int, captured: Sequence[Route] = (),
    ) -> None:  # fmt: skip
        self.cuda, self.routes, self.captured, self.dims = cuda, routes, captured, dims
        self._ladder = policy.ladder
        names = sorted({name for r in (*routes, *captured) for name in r.graph.inputs})
        # A recorded shape runs whole, so a slot holds the largest one however small the call budget is.
        shapes = [(CAPTURED_ROWS[-1], width) for width in self._captured_widths()]
        self._out = max([policy.max_rows(1), *(rows for rows, _ in shapes)]) * dims * 4
        size = slot_bytes(names, cells=max([policy.tokens, widest, *(rows * width for rows, width in shapes)]))
        self.slots: tuple[Slot, ...] = (self._slot(size), self._slot(size))
        self._recorded: dict[tuple[int, int], Launch] = {}

    def _slot(self, size: int) -> Slot:
        host, address = self.cuda.pinned(size)
        out, out_address = self.cuda.pinned(self._out)
        native = {"device": self.cuda.memory(size), "out": self.cuda.memory(self._out), "event": self.cuda.event()}
        return Slot(host, address, out.view(np.float32), out_address, native)

    def shape(self, filler: Filler, bucket: Bucket) -> Shape:
        """A recorded shape where one holds the bucket, else exactly the bucket."""
        target = self.recorded_for(bucket.rows, bucket.width)
        if target is not None:
            rows, width = target
            graph = route(self.captured, width).graph
            return filler.shape(bucket, graph.inputs, rows=rows, width=width, packed=False)
        chosen = route(self.routes, bucket.width)
        return filler.shape(bucket, chosen.graph.inputs, rows=bucket.rows, width=bucket.width, packed=chosen.packed)

    def recorded_for(self, rows: int, width: int) -> tuple[int, int] | None:
        """Return the smallest recorded (rows, width) that holds a bucket."""
        fits = [key for key in self._recorded if key[0] >= rows and key[1] >= width]
        return min(fits, key=lambda key: (key[0] * key[1], key)) if fits else None

    def submit(self, slot: Slot, shape: Shape, *, alone: bool) -> None:
        """Queue upload, forward, download and an event."""
        recorded = self._recorded.get((shape.rows, shape.width))
        if recorded is not None and "token_offset" not in shape.places:
            self._queue(slot, shape, recorded)
        else:
            chosen = route(self.routes, shape.width)
            self._queue(slot, shape, self._launch(chosen, slot, shape, slot.native["device"], slot.native["out"], "-1"))

    def _launch(self, chosen: Route, slot: Slot, shape: Shape, device: int, out: int, number: str) -> Launch:
        binding = Binding(chosen.session, self.cuda.kind, self.cuda.index)
        bind(binding, chosen.graph, shape, base=device, host=slot.address, out=out, dims=self.dims)
        return Launch(binding, device, out, number)

    def _queue(self, slot: Slot, shape: Shape, launch: Launch) -> None:
        self.cuda.copy(launch.device, slot.address, shape.size, up=True)
        slot.native["launch"] = launch  # onnxruntime may still read its binding until the event has fired
        try:
            launch.binding.run({"disable_synchronize_execution_providers": "1", "gpu_graph_id": launch.number})
        except DeviceLost:
            raise  # onnxruntime has said it, with the operator's name
        except EngineError:
            self.cuda.settle()  # what was queued still reads the slot, which the caller may fill again; DeviceLost
            raise
        self.cuda.copy(slot.out_address, launch.out, shape.rows * self.dims * 4, up=False)
        self.cuda.record(slot.native["event"])

    def wait(self, slot: Slot, shape: Shape) -> FloatArray:
        """Return the rows once the event has fired."""
        self.cuda.wait(slot.native["event"])
        slot.native.pop("launch", None)
        return slot.out[: shape.rows * self.dims].reshape(shape.rows, self.dims)

    def _captured_widths(self) -> tuple[int, ...]:
        """Widths to record: only those of the ladder, since a model may need its widths in whole blocks."""
        return tuple(width for width in CAPTURED_WIDTHS if width in self._ladder) if self.captured else ()

    def record(self, recorded: Callable[[], None]) -> None:
        """Record the latency shapes, each with its own buffers; call *recorded* after each. At LOAD, in one thread."""
        slot = self.slots[0]
        for width in self._captured_widths():
            chosen = route(self.captured, width)
            for rows in CAPTURED_ROWS:
                shape = layout(chosen.graph.inputs, rows=rows, width=width)
                device, out = self.cuda.memory(shape.size), self.cuda.memory(rows * self.dims * 4)
                launch = self._launch(chosen, slot, shape, device, out, str(len(self._recorded) + 1))
                full: dict[str, Any] = {"input_ids": 0, "positions": np.arange(width)}  # every row of full length
                for name in shape.places:
                    slot.view(shape, name)[...] = full.get(name, width)
                for _ in range(WARM_RUNS):
                    self._queue(slot, shape, launch)
                    self.wait(slot, shape)
                self._recorded[rows, width] = launch
                recorded()

    def close(self) -> None:
        """Drop the sessions, then the memory and the stream they work with. Raises DeviceLost before anything is."""
        self.cuda.settle()
        self._recorded.clear()
        self.routes = self.captured = ()
        for slot in self.slots:
            slot.native.clear()
        self.cuda.close()
