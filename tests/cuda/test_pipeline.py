"""The loop over buckets: order, progress, out of memory, errors; and the CUDA device's loop on the CPU provider."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cuda import binding
from engines.cuda.buckets import Bucket, Policy, ladder_up_to, plan
from engines.cuda.devices import CudaDevice, Route
from engines.cuda.graphs.builder import WeightStore
from engines.cuda.graphs.families import block, build, cuda_variants
from engines.cuda.model import OwnedModel
from engines.cuda.pipeline import Run
from engines.cuda.staging import Filler, Shape, Slot, layout, slot_bytes
from engines.protocol.errors import EngineError, ErrorCode
from engines.protocol.messages import Phase
from engines.runtime.progress import ProgressReporter, silent
from tests.cuda.cases import case
from tests.cuda.conftest import Bundles, spec_of
from tests.cuda.host_cuda import HostCuda
from tests.support.rows import batch_of, cosines

NAMES = ("input_ids", "lens")


class Recorder:
    """A device whose 'forward' is the sum of a row's ids, computed when it is waited for."""

    def __init__(self, slots: int = 2, *, most_rows: int = 10**9, fail_at: int | None = None) -> None:
        self.slots = tuple(self._slot() for _ in range(slots))
        self.most_rows, self.fail_at = most_rows, fail_at
        self.events: list[str] = []
        self.flying: set[int] = set()
        self.submitted = 0

    def _slot(self) -> Slot:
        host = np.empty(slot_bytes(NAMES, cells=4096), np.uint8)
        return Slot(host, host.ctypes.data, np.empty(256, np.float32), 0)

    def shape(self, filler: Filler, bucket: Bucket) -> Shape:
        self.events.append(f"prepare {bucket.start}")
        return layout(NAMES, rows=bucket.rows, width=bucket.width)

    def submit(self, slot: Slot, shape: Shape, *, alone: bool) -> None:
        self.events.append("submit")
        assert id(slot) not in self.flying
        self.submitted += 1
        self.flying.add(id(slot))
        if self.submitted - 1 == self.fail_at:
            slot.native["error"] = EngineError(ErrorCode.INFERENCE_FAILED, "broken")
        elif shape.rows > self.most_rows:
            slot.native["error"] = EngineError(ErrorCode.OOM, "too large")

    def wait(self, slot: Slot, shape: Shape) -> np.ndarray:
        self.flying.discard(id(slot))
        self.events.append("wait")
        if "error" in slot.native:
            raise slot.native.pop("error")
        ids, lens = slot.view(shape, "input_ids"), slot.view(shape, "lens")
        real = np.arange(shape.width) < lens[:, None]
        slot.out[: shape.rows] = (ids * real).sum(1)
        return slot.out[: shape.rows, None]


def run(
    device: Recorder, lengths: list[int], *, tokens: int = 16, clock: Callable[[], float] | None = None
) -> tuple[np.ndarray, list[tuple[int, Phase]]]:
    rows = [[n * 100 + column for column in range(length)] for n, length in enumerate(lengths)]
    batch = batch_of(rows)
    filler = Filler(batch, plan(batch.lengths, Policy(tokens=tokens, ladder=())), pad_id=999, separator=None)
    out = np.full((len(rows), 1), np.nan, np.float32)
    frames: list[tuple[int, Phase]] = []
    ticks = iter(range(100_000))
    progress = ProgressReporter(
        lambda completed, phase: frames.append((completed, phase)),
        phase=Phase.SETUP,
        clock=clock or (lambda: float(next(ticks))),
    )
    Run(device, filler, out, progress).all()
    assert out[:, 0].tolist() == [float(sum(row)) for row in rows]
    return out, frames


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), slots=st.integers(1, 3))
def test_every_row_comes_home_in_request_order(lengths: list[int], slots: int) -> None:
    run(Recorder(slots), lengths)


def test_the_next_bucket_is_prepared_while_one_is_in_flight() -> None:
    device = Recorder()
    run(device, [8] * 8)  # four buckets of two rows
    assert device.events == [
        "prepare 0", "submit", "prepare 2", "submit", "wait", "prepare 4", "submit", "wait", "prepare 6", "submit",
        "wait", "wait",
    ]  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
def test_progress_of_the_worked_example(frozen: bool) -> None:
    """100 rows, first submission 60: the switch says 60 whatever the clock says, finished buckets 120 and 160 (8.4)."""
    _, frames = run(Recorder(), [1] * 40 + [2] * 60, tokens=120, clock=(lambda: 0.0) if frozen else None)
    assert frames == [(count, Phase.INFERENCE) for count in ([60] if frozen else [60, 120, 160])]


def test_out_of_memory_runs_the_bucket_once_more_in_halves() -> None:
    device = Recorder(most_rows=4)
    _, frames = run(device, [1] * 8 + [3] * 5, tokens=15)
    assert device.submitted == 2 + 2 * 2
    assert [completed for completed, _ in frames] == sorted({completed for completed, _ in frames})


@pytest.mark.parametrize(("most_rows", "rows"), [(1, 8), (0, 1)])
def test_out_of_memory_twice_is_the_answer(most_rows: int, rows: int) -> None:
    device = Recorder(most_rows=most_rows)
    with pytest.raises(EngineError) as caught:
        run(device, [1] * rows)
    assert caught.value.code is ErrorCode.OOM


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("fail_at", [0, 1, 3, 7])
def test_an_error_leaves_nothing_in_flight(slots: int, fail_at: int) -> None:
    device = Recorder(slots, fail_at=fail_at)
    with pytest.raises(EngineError, match="broken"):
        run(device, [8] * 16)
    # Halves of a bucket are waited for at once; every other submission must have come home too.
    assert not device.flying


@pytest.mark.parametrize("options", [{"most_rows": 0}, {"fail_at": 1}, {"most_rows": 4}])
def test_a_failed_request_holds_nothing(options: dict[str, int]) -> None:
    """A cycle through an exception's traceback would keep sessions and device memory until the collector comes by."""
    device = Recorder(**options)
    alive = weakref.ref(device)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(EngineError):
            run(device, [1] * 8 + [3] * 5, tokens=15)
        del device
        assert alive() is None
    finally:
        gc.enable()


# --- the CUDA device's loop, on host memory and the CPU provider -----------------------------------------------------


Make = Callable[..., OwnedModel]


@pytest.fixture
def cuda_model(bundles: Bundles) -> Iterator[Make]:
    """Make a model whose device is CudaDevice over HostCuda."""
    made: list[OwnedModel] = []

    def make(name: str, *, record: bool = False) -> OwnedModel:
        spec, tensors = spec_of(bundles(name))
        store, cuda = WeightStore(tensors, "f32"), HostCuda()
        routes = [
            Route(graph := build(spec, store, variant), binding.session(graph, threads=1), limit)
            for variant, limit in cuda_variants(spec, "f32")
        ]
        policy = Policy(tokens=256, ladder=ladder_up_to(spec.max_tokens, block(spec)), rows=64)
        device = CudaDevice(
            cuda,  # type: ignore[arg-type]
            routes, policy=policy, dims=spec.dims, widest=policy.ladder[-1], captured=routes if record else (),
        )  # fmt: skip
        if record:
            device.record(lambda: None)
        made.append(OwnedModel(spec, policy, device))
        return made[-1]

    yield make
    for model in made:
        model.close()
        assert not model.device.cuda.live  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "record"),
    [("bert-mean", True), ("bert-rerank", False), ("modernbert-mean", False), ("qwen3-last", False),
     ("qwen3-rerank", True)],
)  # fmt: skip
def test_cuda_loop_equals_transformers(
    name: str, record: bool, cuda_model: Make, goldens: dict[str, np.ndarray]
) -> None:
    model, rows = cuda_model(name, record=record), case(name).rows()
    for _ in range(2):
        output = model.forward(batch_of(rows), silent())
        if case(name).task == "rerank":
            assert np.abs(output[:, 0] - goldens[name]).max() <= 1e-4
        else:
            assert cosines(output, goldens[name]).min() >= 0.99999


def test_a_small_bucket_takes_the_recorded_shape_that_holds_it(cuda_model: Make) -> None:
    device = cuda_model("bert-mean", record=True).device
    assert isinstance(device, CudaDevice)
    assert device.recorded_for(1, 10) == (1, 16)
    assert device.recorded_for(3, 17) == (4, 32)
    assert device.recorded_for(9, 16) is None and device.recorded_for(1, 65) is None  # widths 16, 32 and 64 of 64
