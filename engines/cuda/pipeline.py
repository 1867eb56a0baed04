"""Runs a request's buckets on a device: prepare, submit, collect, with progress as llama-cuda.md 8.4.

The same loop drives the CPU and the GPU; a device differs only in what ``submit`` and ``wait`` do. The first submission
is prepared in a few milliseconds; then the switch frame says how many rows it has. The device works while later buckets
are prepared, and ``inference`` progress counts rows that are back on the host, never rows that were only submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engines.protocol.errors import EngineError, ErrorCode
from engines.runtime.engine import DeviceLost

if TYPE_CHECKING:
    from engines.cuda.buckets import Bucket
    from engines.cuda.staging import Filler, Shape, Slot
    from engines.runtime.batch import FloatArray
    from engines.runtime.progress import ProgressReporter


class Device(Protocol):
    """Where buckets run. One request at a time."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Submissions that may be in flight at once, and their memory."""
        ...

    def shape(self, filler: Filler, bucket: Bucket) -> Shape:
        """Return the shapes *bucket* runs at."""
        ...

    def submit(self, slot: Slot, shape: Shape, *, alone: bool) -> None:
        """Start the forward of a filled slot; *alone*: nothing of this request runs beside it. Raises EngineError."""
        ...

    def wait(self, slot: Slot, shape: Shape) -> FloatArray:
        """Return float32 (shape.rows, dims) on the host, valid until the slot is filled again. Raises EngineError."""
        ...


class Run:
    """One request on its way through a device: :meth:`all`, once."""

    def __init__(self, device: Device, filler: Filler, out: FloatArray, progress: ProgressReporter) -> None:
        self.device, self.filler, self.out, self.progress = device, filler, out, progress
        self.inflight: deque[tuple[Slot, Bucket, Shape]] = deque()

    def all(self) -> None:
        """Compute every row of ``filler.plan`` into *out*, float32 (rows, dims), request order. Raises EngineError."""
        slots, buckets = self.device.slots, self.filler.plan.buckets
        try:
            for number, bucket in enumerate(buckets):
                if len(self.inflight) == len(slots):
                    self._collect()  # the oldest one, whose slot is the next
                slot = slots[number % len(slots)]
                shape = self._prepare(slot, bucket)
                if number == 0:
                    self.progress.switch(bucket.rows)
                self._submit(slot, bucket, shape, alone=len(buckets) == 1)
            while self.inflight:
                self._collect()
        finally:
            self._drain()  # after an error: nothing may still read or write a slot that the next request fills

    def _drain(self) -> None:
        """Let what is in flight end. The request fails with its first error, unless the device turns out to be lost."""
        while self.inflight:
            slot, _, shape = self.inflight.popleft()
            try:
                self.device.wait(slot, shape)
            except DeviceLost:
                raise  # the process has to end, and nothing can be waited for any more
            except EngineError:
                continue

    def _prepare(self, slot: Slot, bucket: Bucket) -> Shape:
        shape = self.device.shape(self.filler, bucket)
        self.filler.fill(slot, bucket, shape)
        return shape

    def _submit(self, slot: Slot, bucket: Bucket, shape: Shape, *, alone: bool) -> None:
        try:
            self.device.submit(slot, shape, alone=alone)
        except EngineError as exc:
            if not halving_helps(exc, bucket):
                raise
        else:
            self.inflight.append((slot, bucket, shape))
            return
        self._halve(slot, bucket)

    def _collect(self) -> None:
        """Bring the oldest submission home."""
        slot, bucket, shape = self.inflight.popleft()
        try:
            values = self.device.wait(slot, shape)
        except EngineError as exc:
            if not halving_helps(exc, bucket):
                raise
        else:
            self._finish(bucket, values)
            return
        self._halve(slot, bucket)

    def _halve(self, slot: Slot, bucket: Bucket) -> None:
        """Run a bucket once more in halves, alone (8.2); out of memory again is the answer.

        Called outside the handler: a kept exception would keep the failed run's frames, and with them device memory.
        """
        while self.inflight:
            self._collect()
        for half in bucket.halves():
            shape = self._prepare(slot, half)
            self.device.submit(slot, shape, alone=True)
            self._finish(half, self.device.wait(slot, shape))

    def _finish(self, bucket: Bucket, values: FloatArray) -> None:
        rows = self.filler.plan.order[bucket.start : bucket.stop]
        self.out[rows] = values[: len(rows)]
        self.progress.advance(bucket.rows)


def halving_helps(exc: EngineError, bucket: Bucket) -> bool:
    """Tell whether a bucket that failed with *exc* may fit in two halves."""
    return exc.code is ErrorCode.OOM and bucket.rows > 1
