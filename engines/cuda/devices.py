"""The two devices: the CPU provider and the CUDA provider behind :class:`engines.cuda.pipeline.Device`.

Both bind inputs and output by address and never let onnxruntime allocate or copy at the edge. On the CPU a slot's
memory is what the graph reads; on the GPU it is page-locked and one copy each way goes over the compute stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.cuda.binding import Binding, Cuda
from engines.cuda.buckets import Bucket, Policy
from engines.cuda.graphs.builder import Graph
from engines.cuda.staging import RESIDENT, Filler, Shape, Slot, layout, slot_bytes
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


def bind(
    binding: Binding, graph: Graph, shape: Shape, *, base: int, counting: int, host_counting: int, out: int, dims: int
) -> None:
    """Bind *graph* to addresses: inputs at *base*, resident ones inside the counting arrays 0, 1, 2, …"""
    for name in graph.inputs:
        if name in shape.places:
            offset, dimensions = shape.places[name]
            binding.input(name, dimensions, base + offset)
        elif name == "max_len":
            binding.input(name, (1,), host_counting + 4 * shape.width, host=True)  # the element that equals the width
        else:
            assert name in RESIDENT
            binding.input(name, (shape.width,), counting)
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
        self._counting = np.arange(widest + 1, dtype=np.int32)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="forward") if routes[0].narrow else None
        names = sorted({name for r in routes for name in r.graph.inputs})
        cells = max(policy.tokens, widest)
        size = slot_bytes(names, cells=cells, rows=min(policy.rows, policy.tokens))
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
        binding = Binding(chosen.session if wide else chosen.narrow, "cpu", 0)
        counting = self._counting.ctypes.data
        bind(
            binding, chosen.graph, shape,
            base=slot.address, counting=counting, host_counting=counting, out=slot.out_address, dims=self.dims,
        )  # fmt: skip
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
        self._host_counting = np.arange(widest + 1, dtype=np.int32)
        pinned, address = cuda.pinned(self._host_counting.nbytes)
        pinned.view(np.int32)[:] = self._host_counting
        self._counting = cuda.memory(self._host_counting.nbytes)
        cuda.copy(self._counting, address, self._host_counting.nbytes, up=True)
        self._ladder = policy.ladder
        names = sorted({name for r in (*routes, *captured) for name in r.graph.inputs})
        # A recorded shape runs whole, so a slot holds the largest one however small the call budget is.
        shapes = [(CAPTURED_ROWS[-1], width) for width in self._captured_widths()]
        rows = max([policy.max_rows(1), *(rows for rows, _ in shapes)])
        cells = max([policy.tokens, widest, *(rows * width for rows, width in shapes)])
        self._out = rows * dims * 4
        size = slot_bytes(names, cells=cells, rows=rows)
        self.slots: tuple[Slot, ...] = (self._slot(size), self._slot(size))
        self._recorded: dict[tuple[int, int], tuple[Binding, int, int, str]] = {}

    def _slot(self, size: int) -> Slot:
        host, address = self.cuda.pinned(size)
        out, out_address = self.cuda.pinned(self._out)
        native = {
            "device": self.cuda.memory(size), "device_out": self.cuda.memory(self._out), "event": self.cuda.event()
        }  # fmt: skip
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
        key = (shape.rows, shape.width)
        recorded = self._recorded.get(key)
        if recorded is not None and "token_offset" not in shape.places:
            binding, device, device_out, number = recorded
        else:
            chosen = route(self.routes, shape.width)
            device, device_out, number = slot.native["device"], slot.native["device_out"], "-1"
            binding = self._bound(chosen, shape, device, device_out)
        self._queue(slot, shape, binding, device, device_out, number)

    def _bound(self, chosen: Route, shape: Shape, device: int, device_out: int) -> Binding:
        host = self._host_counting.ctypes.data
        binding = Binding(chosen.session, self.cuda.kind, self.cuda.index)
        bind(
            binding, chosen.graph, shape,
            base=device, counting=self._counting, host_counting=host, out=device_out, dims=self.dims,
        )  # fmt: skip
        return binding

    def _queue(self, slot: Slot, shape: Shape, binding: Binding, device: int, device_out: int, number: str) -> None:
        self.cuda.copy(device, slot.address, shape.size, up=True)
        slot.native["binding"] = binding  # onnxruntime may still read it until the event has fired
        try:
            binding.run({"disable_synchronize_execution_providers": "1", "gpu_graph_id": number})
        except DeviceLost:
            raise  # onnxruntime has said it, with the operator's name
        except EngineError:
            self.cuda.settle()  # what was queued still reads the slot, which the caller may fill again; DeviceLost
            raise
        self.cuda.copy(slot.out_address, device_out, shape.rows * self.dims * 4, up=False)
        self.cuda.record(slot.native["event"])

    def wait(self, slot: Slot, shape: Shape) -> FloatArray:
        """Return the rows once the event has fired."""
        self.cuda.wait(slot.native["event"])
        slot.native.pop("binding", None)
        return slot.out[: shape.rows * self.dims].reshape(shape.rows, self.dims)

    def _captured_widths(self) -> tuple[int, ...]:
        """Widths to record: only those of the ladder, since a model may need its widths in whole blocks."""
        return tuple(width for width in CAPTURED_WIDTHS if width in self._ladder) if self.captured else ()

    def record(self, recorded: Callable[[], None]) -> None:
        """Record the latency shapes, each with its own buffers; *recorded* is told of each. At LOAD, one thread."""
        slot = self.slots[0]
        for width in self._captured_widths():
            chosen = route(self.captured, width)
            for rows in CAPTURED_ROWS:
                shape = layout(chosen.graph.inputs, rows=rows, width=width)
                device, device_out = self.cuda.memory(shape.size), self.cuda.memory(rows * self.dims * 4)
                binding, number = self._bound(chosen, shape, device, device_out), str(len(self._recorded) + 1)
                for name, value in (("input_ids", 0), ("lens", width), ("type_starts", width)):
                    if name in shape.places:
                        slot.view(shape, name)[...] = value
                for _ in range(WARM_RUNS):
                    self._queue(slot, shape, binding, device, device_out, number)
                    self.wait(slot, shape)
                self._recorded[rows, width] = (binding, device, device_out, number)
                recorded()

    def close(self) -> None:
        """Drop the sessions, then the memory and the stream they work with. Raises DeviceLost before anything is."""
        self.cuda.settle()
        self._recorded.clear()
        self.routes = self.captured = ()
        for slot in self.slots:
            slot.native.clear()
        self.cuda.close()
