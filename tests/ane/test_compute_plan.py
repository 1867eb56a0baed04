"""Hand-built plans: exactly upstream's number on the wire, our table beside it, the checked list of CPU operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engines.ane import compute_plan
from engines.ane.build.plan import counted
from engines.ane.compute_plan import Device, Function, Operation
from engines.bundle.manifest import Bundle
from engines.protocol.errors import EngineError, ErrorCode
from synapse_host.certificates import document as documents
from synapse_host.certificates import figures
from tests.ane.coreml_answers import MilFunction

ANE, CPU, GPU, UNKNOWN = Device.ANE, Device.CPU, Device.GPU, Device.UNKNOWN


def ops(**counts: int) -> tuple[Operation, ...]:
    """``ops(ane=2, cpu=1, unknown=3)``: that many operations of each label; unknown ones are constants."""
    names = {
        "ane": ("ios17.conv", ANE),
        "cpu": ("ios17.cast", CPU),
        "gpu": ("ios17.conv", GPU),
        "unknown": ("const", UNKNOWN),
    }
    return tuple(Operation(names[kind][0], names[kind][1]) for kind, count in counts.items() for _ in range(count))


def plan(*operations: Operation, outputs: tuple[str, ...] = ()) -> Function:
    return Function(("input_ids", "attention_mask"), operations, outputs)


NESTED = Operation("ios17.while_loop", CPU, blocks=(ops(ane=2), (Operation("ios17.cond", ANE, blocks=(ops(cpu=1),)),)))


@pytest.mark.parametrize(
    ("view", "share"),
    [
        # ane.md 1.3: 846 on the ANE, 5 on the CPU, 1,042 constants without usage.
        (plan(*ops(unknown=1042, ane=846, cpu=5)), 0.9941245593419507),
        (plan(*ops(gpu=75_093, unknown=10)), 0.0),
        (plan(NESTED), 3 / 5),
        (plan(*ops(ane=3, cpu=1), Operation("ios17.matmul", UNKNOWN)), 0.75),
        # Constants are not left out by name: if a plan reports a device for one, upstream's formula counts it.
        (plan(Operation("const", CPU), Operation("ios17.conv", ANE)), 0.5),
        (None, None),
        (plan(), None),
        (plan(*ops(unknown=40)), None),
        (plan(Operation("ios17.conv", UNKNOWN)), None),
    ],
)
def test_the_share_is_upstream_s_and_absent_where_it_cannot_be_told(view: Function | None, share: float | None) -> None:
    assert compute_plan.share(view) == share


def certified(*body: Operation) -> documents.Function:
    """What certification's gates get to see of a plan."""
    told = {"name": "main", "kind": "bucket", "tokens": 128, **counted(plan(*body))}
    return msgspec.convert(told, documents.Function)


SILENT = Operation("ios17.matmul", UNKNOWN)
DEAR = (Operation("ios17.cast", ANE, 0.01), Operation("ios17.conv", ANE, 0.09), Operation("ios17.matmul", CPU, 0.9))


@pytest.mark.parametrize(
    ("body", "share", "cost_share"),
    [
        (DEAR, 2 / 3, pytest.approx(0.1)),
        ((Operation("const", UNKNOWN), *ops(ane=3, cpu=1), SILENT), None, None),
        ((*ops(ane=98), SILENT, SILENT), 1.0, None),
        ((*ops(ane=97), SILENT, SILENT), None, None),
    ],
    ids=["the share is unweighted", "one of five has no usage", "two percent are still reported", "more are not"],
)
def test_what_certification_makes_of_the_counts(body: Any, share: float | None, cost_share: Any) -> None:
    function = certified(*body)
    assert (figures.share_of(function), figures.cost_share_of(function)) == (share, cost_share)
    counts = list(function.operations.values())
    if body[0].operator == "const":
        assert {"const": 1} in counts and {"unknown": 1} in counts, "constants and unknowns are counted apart"
    assert function == certified(*body) and len(function.ops_sha256) == 64


@pytest.mark.parametrize(
    ("shares", "wire"), [([0.99, 0.95], 0.95), ([], None), ([0.99, None], None), ([None], None), ([0.0, 1.0], 0.0)]
)
def test_the_wire_value_is_the_minimum_and_fails_closed(shares: list[float | None], wire: float | None) -> None:
    assert compute_plan.worst(shares) == wire


# --- CPU operations --------------------------------------------------------------------------------------------------


def traced(*steps: tuple[str, str, str], cpu: str = "") -> Function:
    """A function of (operator, values read, value made); the operations named in *cpu* (by value made) are there."""
    operations = tuple(
        Operation(f"ios17.{operator}", CPU if made in cpu.split() else ANE, outputs=(made,), inputs=tuple(read.split()))
        for operator, read, made in steps
    )
    table = Operation("const", UNKNOWN, outputs=("table", "one"))
    return plan(table, *operations, outputs=("out",))


def refused(view: Function) -> str:
    with pytest.raises(EngineError) as found:
        compute_plan.cpu_stages(view)
    assert found.value.code is ErrorCode.INVALID_PLACEMENT
    return found.value.msg


ENCODER = (
    ("cast", "attention_mask", "kept"),
    ("sub", "kept one", "less"),
    ("mul", "less one", "mask"),
    ("expand_dims", "mask", "bias"),
    ("add", "bias one", "local"),
    ("cast", "input_ids", "ids"),
    ("gather", "table ids", "words"),
    ("expand_dims", "words", "rows"),
    ("mul", "rows one", "scaled"),
    ("cast", "scaled", "wide"),
    ("conv", "wide table", "hidden"),
    ("mul", "hidden one", "gate"),
    ("add", "gate local", "biased"),
    ("gather", "biased one", "first"),
    ("slice_by_index", "first", "cut"),
    ("squeeze", "cut", "flat"),
    ("softmax", "flat", "deep"),
    ("squeeze", "deep", "last"),
    ("cast", "last", "out"),
)


@pytest.mark.parametrize(
    ("cpu", "stages"),
    [
        ("", []),
        ("kept less mask bias local ids", ["mask_position"]),
        ("words rows", ["token_embedding"]),
        ("last out", ["pooling"]),
        ("kept bias ids words out", ["mask_position", "token_embedding", "pooling"]),
    ],
)
def test_set_up_and_read_out_may_stay_on_the_cpu(cpu: str, stages: list[str]) -> None:
    assert compute_plan.cpu_stages(traced(*ENCODER, cpu=cpu)) == stages


@pytest.mark.parametrize(
    "cpu", ["scaled", "wide", "hidden", "gate", "biased", "first", "cut", "flat", "deep"], ids=lambda made: made
)
def test_the_model_s_work_on_the_cpu_refuses_the_admission_whatever_the_operator(cpu: str) -> None:
    """The same ``mul``, ``cast`` and ``gather`` that set-up may keep there are refused in the body."""
    assert f"({cpu})" in refused(traced(*ENCODER, cpu=cpu))


LOOSE = Operation("ios17.cast", CPU)
MATMUL = Operation("ios17.cond", ANE, blocks=((Operation("ios17.matmul", CPU),),))


@pytest.mark.parametrize(
    ("view", "named"),
    [
        (traced(("conv", "input_ids", "x"), ("squeeze", "x", "out"), ("softmax", "out", "y"), cpu="out"), "(out)"),
        (plan(LOOSE, outputs=("out",)), "cast"),
        (plan(Operation("ios17.cast", CPU, inputs=("somewhere",))), "cast"),
        (traced(("mul", "one", "x"), cpu="x"), "(x)"),
        (plan(*ops(ane=3, gpu=1)), "GPU"),
        (plan(MATMUL), "matmul"),
    ],
    ids=["read by the body as well", "untraced", "from nowhere", "from constants", "on the GPU", "in a nested block"],
)
def test_what_is_not_traced_to_set_up_or_read_out_is_the_model_s_work(view: Function, named: str) -> None:
    assert named in refused(view)


def test_many_small_operations_are_too_many() -> None:
    mask = Operation("ios17.cast", CPU, inputs=("attention_mask",))
    assert compute_plan.cpu_stages(plan(*[mask] * compute_plan.STAGE_LIMIT)) == ["mask_position"]
    assert "at most" in refused(plan(*[mask] * (compute_plan.STAGE_LIMIT + 1)))


def test_the_plan_tool_counts_what_may_stay_with_its_stage() -> None:
    told = counted(traced(*ENCODER, cpu="mask gate words"))
    on_cpu = {operator: devices["cpu"] for operator, devices in told["operations"].items() if "cpu" in devices}
    assert on_cpu == {"ios17.mul@mask_position": 1, "ios17.gather@token_embedding": 1, "ios17.mul": 1}
    assert told["operations"]["ios17.mul"] == {"cpu": 1, "neuralEngine": 1}
    off_the_list = {operator.rpartition(".")[2] for operator in on_cpu} - compute_plan.CPU_ALLOWED
    assert off_the_list == {"mul"}, "certification compares the last part of a name with the list"


# What a builder's graph may leave on the CPU, one operation after the other: operators by stage.
MASK = {"cast", "sub", "mul", "expand_dims"}
OURS = {
    ("bert", "s16"): {"mask_position": MASK, "token_embedding": {"gather"}},
    ("bert", "packed64"): {"token_embedding": {"gather"}},
    ("cross", "s16"): {"mask_position": MASK, "token_embedding": {"gather"}},
    ("modernbert", "s16"): {"mask_position": MASK | {"add"}, "token_embedding": {"gather"}},
    ("modernbert", "packed64"): {"token_embedding": {"gather"}},
    ("qwen3", "s16"): {"mask_position": MASK | {"add"}, "token_embedding": {"gather"}},
}


@pytest.mark.parametrize(("name", "function"), OURS, ids=["-".join(one) for one in OURS])
def test_of_our_own_graphs_only_mask_and_look_up_may_leave_the_engine(
    name: str, function: str, bundles: Callable[[str], Bundle]
) -> None:
    bundle = bundles(name)
    built = MilFunction(bundle.path(bundle.manifest.artifacts[0].path), function)
    operations = tuple(Operation(op.operator, ANE, outputs=op.outputs, inputs=op.inputs) for op in built.operations)
    view = Function(tuple(built.spec.inputs), operations, tuple(built.spec.outputs))
    found: dict[str, set[str]] = {}
    for operation, stage in compute_plan.stages(view):
        if stage is not None:
            found.setdefault(stage, set()).add(operation.operator.removeprefix("ios18."))
    assert found == OURS[name, function]


def test_an_inventory_covers_each_layer_once_and_its_id_names_everything_that_selects_the_program() -> None:
    parts = dict.fromkeys(("bundle", "function", "units", "hints", "os_build", "version"), "said")
    make = functools.partial(compute_plan.inventory, layers=3, stages=["pooling"])
    first = make(**parts)
    assert [one.layers for one in first.executables] == [[0, 1, 2]] and first.cpu_stages == ["pooling"]
    ids = {make(**{**parts, key: "other"}).executables[0].id for key in parts}
    assert len(ids | {first.executables[0].id}) == 7
    assert make(**parts) == first


@pytest.mark.parametrize(
    ("kind", "label"), [("CPU", CPU), ("GPU", GPU), ("NeuralEngine", ANE), ("SomethingNew", UNKNOWN)]
)
def test_labels(kind: str, label: Device) -> None:
    assert compute_plan.device_of(type(f"ML{kind}ComputeDevice", (), {})()) is label
