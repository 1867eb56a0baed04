"""Hand-built plans: exactly upstream's number on the wire, our table beside it, the checked list of CPU operations."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engines.ane import compute_plan, placement
from engines.ane.compute_plan import Device, Function, Operation, PlanView
from engines.ane.plan import counted
from engines.protocol.errors import EngineError, ErrorCode
from synapse_host import evidence as documents
from synapse_host import gates
from tests.support.coreml_plan import from_coremltools

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


def plan(**functions: tuple[Operation, ...]) -> PlanView:
    return PlanView("program", {name: Function(("input_ids",), body) for name, body in functions.items()})


def test_the_reference_package_gives_upstream_s_number_to_the_last_digit() -> None:
    # ane.md 1.3: 846 on the ANE, 5 on the CPU, 1,042 constants without usage.
    assert placement.share(plan(main=ops(unknown=1042, ane=846, cpu=5))) == 846 / (846 + 5) == 0.9941245593419507


@pytest.mark.parametrize(("ane", "cpu"), [(11_660, 13), (20_712, 21), (38_816, 37), (75_024, 69)])
def test_tiled_reference_values(ane: int, cpu: int) -> None:
    got = placement.share(plan(main=ops(ane=ane, cpu=cpu)))
    assert got == ane / (ane + cpu) and 0.9988 < got < 0.9992


def test_everything_on_the_gpu_is_zero_not_absent() -> None:
    assert placement.share(plan(main=ops(gpu=75_093, unknown=10))) == 0.0


def test_nested_blocks_are_counted() -> None:
    body = Operation(
        "ios17.while_loop", CPU, blocks=(ops(ane=2), (Operation("ios17.cond", ANE, blocks=(ops(cpu=1),)),))
    )
    assert placement.share(plan(main=(body,))) == 3 / 5


def test_several_functions_main_wins_and_a_name_beats_main() -> None:
    view = plan(other=ops(cpu=1), main=ops(ane=1, cpu=1), s128=ops(ane=3, cpu=1))
    assert placement.share(view) == 0.5
    assert placement.share(view, "s128") == 0.75
    assert placement.share(view, "no such function") == 0.5


def test_without_main_the_function_with_fewest_inputs_is_taken() -> None:
    view = PlanView("program", {"a": Function(("x", "y"), ops(cpu=1)), "b": Function(("x",), ops(ane=1))})
    assert placement.share(view) == 1.0


@pytest.mark.parametrize(
    "view",
    [
        None,
        plan(main=()),
        plan(main=ops(unknown=40)),
        plan(main=(Operation("ios17.conv", UNKNOWN),)),
        PlanView("program", {}),
        PlanView("pipeline"),
        PlanView("other"),
    ],
    ids=["no plan", "no operations", "only constants", "all unknown", "no function", "pipeline", "other"],
)
def test_what_cannot_be_told_is_absent_never_zero_or_one(view: PlanView | None) -> None:
    assert placement.share(view) is None


def test_a_real_operation_without_usage_drops_out_like_a_constant() -> None:
    assert placement.share(plan(main=(*ops(ane=3, cpu=1), Operation("ios17.matmul", UNKNOWN)))) == 0.75


def test_constants_are_not_excluded_by_name() -> None:
    # If a plan did report a device for a constant, upstream's formula counts it.
    assert placement.share(plan(main=(Operation("const", CPU), Operation("ios17.conv", ANE)))) == 0.5


def test_a_neural_network_counts_its_layers() -> None:
    view = PlanView("neuralNetwork", {"main": Function((), ops(ane=3, cpu=1))})
    assert placement.share(view) == 0.75


def function_of(*body: Operation) -> documents.Function:
    """What certification's gates get to see of a plan."""
    told = {"name": "main", "kind": "bucket", "tokens": 128, **counted(plan(main=body))}
    return msgspec.convert(told, documents.Function)


def test_the_share_is_unweighted_and_the_cost_share_is_not() -> None:
    body = (Operation("ios17.cast", ANE, 0.01), Operation("ios17.conv", ANE, 0.09), Operation("ios17.matmul", CPU, 0.9))
    function = function_of(*body)
    assert gates.share_of(function) == placement.share(plan(main=body)) == 2 / 3
    assert gates.cost_share_of(function) == pytest.approx(0.1)


def test_constants_and_unknowns_are_counted_apart() -> None:
    body = (Operation("const", UNKNOWN), *ops(ane=3, cpu=1), Operation("ios17.matmul", UNKNOWN))
    function = function_of(*body)
    counts = list(function.operations.values())
    assert {"const": 1} in counts and {"unknown": 1} in counts
    assert gates.share_of(function) is None, "one of five operations has no usage"
    assert gates.cost_share_of(function) is None, "no costs, no cost share"
    assert function == function_of(*body) and len(function.ops_sha256) == 64


def test_two_percent_without_usage_are_still_reported() -> None:
    silent = (Operation("ios17.conv", UNKNOWN),) * 2
    assert gates.share_of(function_of(*ops(ane=98), *silent)) == 1.0
    assert gates.share_of(function_of(*ops(ane=97), *silent)) is None


@pytest.mark.parametrize(
    ("shares", "wire"),
    [([0.99, 0.95], 0.95), ([0.99], 0.99), ([], None), ([0.99, None], None), ([None], None), ([0.0, 1.0], 0.0)],
)
def test_the_wire_value_is_the_minimum_and_fails_closed(shares: list[float | None], wire: float | None) -> None:
    assert placement.worst(shares) == wire


# --- CPU operations --------------------------------------------------------------------------------------------------


def cpu(*names: str) -> PlanView:
    return plan(main=(*ops(ane=3), *(Operation(f"ios17.{name}", CPU, outputs=(f"{name}_0",)) for name in names)))


def test_reference_cpu_operations_map_to_allowed_stages() -> None:
    # ane.md 1.3: one cast, two expand_dims, one gather, one tile.
    assert placement.cpu_stages(cpu("cast", "expand_dims", "expand_dims", "gather", "tile")) == [
        "mask_position",
        "token_embedding",
    ]
    assert placement.cpu_stages(cpu()) == []


@pytest.mark.parametrize("name", ["matmul", "conv", "softmax", "layer_norm", "linear", "gelu"])
def test_real_work_on_the_cpu_refuses_the_admission_by_name(name: str) -> None:
    with pytest.raises(EngineError) as refused:
        placement.cpu_stages(cpu("cast", name))
    assert refused.value.code is ErrorCode.INVALID_PLACEMENT and f"{name}_0" in refused.value.msg


def test_the_gpu_is_never_allowed_and_neither_are_many_small_operations() -> None:
    with pytest.raises(EngineError):
        placement.cpu_stages(plan(main=ops(ane=3, gpu=1)))
    with pytest.raises(EngineError):
        placement.cpu_stages(cpu(*["cast"] * (placement.STAGE_LIMIT + 1)))


def test_cpu_work_inside_a_nested_block_is_found() -> None:
    hidden = Operation("ios17.cond", ANE, blocks=((Operation("ios17.matmul", CPU),),))
    with pytest.raises(EngineError):
        placement.cpu_stages(plan(main=(hidden,)))


def test_an_inventory_covers_each_layer_once_and_its_id_names_everything_that_selects_the_program() -> None:
    def make(**changes: Any) -> Any:
        fields: dict[str, Any] = {
            "bundle": "b", "function": "s128", "units": "cpu_and_ne", "hints": "h", "os_build": "24A1",
            "version": "v", "layers": 3, "stages": ["pooling"],
        }  # fmt: skip
        return placement.inventory(**{**fields, **changes})

    first = make()
    assert [one.layers for one in first.executables] == [[0, 1, 2]] and first.cpu_stages == ["pooling"]
    ids = {
        make(**{key: "other"}).executables[0].id
        for key in ("bundle", "function", "units", "hints", "os_build", "version")
    }
    assert len(ids | {first.executables[0].id}) == 7
    assert make() == first


# --- walkers ---------------------------------------------------------------------------------------------------------


class MLCPUComputeDevice: ...


class MLGPUComputeDevice: ...


class MLNeuralEngineComputeDevice: ...


class MLSomethingNewComputeDevice: ...


@pytest.mark.parametrize(
    ("device", "label"),
    [
        (MLCPUComputeDevice(), CPU),
        (MLGPUComputeDevice(), GPU),
        (MLNeuralEngineComputeDevice(), ANE),
        (MLSomethingNewComputeDevice(), UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_labels(device: object, label: Device) -> None:
    assert compute_plan.device_of(device) is label


def test_a_coremltools_plan_is_read_through_its_own_dataclasses() -> None:
    structure = pytest.importorskip("coremltools").models.compute_plan

    def make(name: str, /, **values: Any) -> Any:
        """One of its dataclasses; what isn't given (native proxies above all) is None."""
        kind = getattr(structure, f"MLModelStructure{name}")
        return kind(**{field.name: values.get(field.name) for field in dataclasses.fields(kind)})

    def operation(name: str, *blocks: Any) -> Any:
        outputs = [make("ProgramNamedValueType", name=f"{name}.out")]
        return make("ProgramOperation", operator_name=name, outputs=outputs, blocks=list(blocks))

    inner = make("ProgramBlock", operations=[operation("ios17.mul")])
    body = [operation("const"), operation("ios17.conv"), operation("ios17.cond", inner)]
    function = make(
        "ProgramFunction",
        inputs=[make("ProgramNamedValueType", name="input_ids")],
        block=make("ProgramBlock", operations=body),
    )
    usage = {
        "ios17.conv": MLNeuralEngineComputeDevice(),
        "ios17.cond": MLCPUComputeDevice(),
        "ios17.mul": MLGPUComputeDevice(),
    }
    fake = SimpleNamespace(
        model_structure=SimpleNamespace(
            neuralnetwork=None, program=make("Program", functions={"main": function}), pipeline=None
        ),
        get_compute_device_usage_for_mlprogram_operation=lambda op: (
            SimpleNamespace(preferred_compute_device=usage[op.operator_name]) if op.operator_name in usage else None
        ),
        get_estimated_cost_for_mlprogram_operation=lambda op: (
            SimpleNamespace(weight=0.5) if op.operator_name in usage else None
        ),
    )
    view = from_coremltools(fake)
    assert [op.preferred for op in view.functions["main"].walk()] == [UNKNOWN, ANE, CPU, GPU]
    assert view.functions["main"].inputs == ("input_ids",)
    assert placement.share(view) == 1 / 3
    assert msgspec.json.decode(msgspec.json.encode(view), type=PlanView) == view, "a recorded plan is the same plan"


def call(value: Any) -> Any:
    """PyObjC spells a property as a method."""
    return lambda *args: value


def objc_operation(name: str, device: object | None, blocks: list[Any] | None = None) -> Any:
    return SimpleNamespace(
        operatorName=call(name), outputs=call([SimpleNamespace(name=call(f"{name}.out"))]), blocks=call(blocks or []),
        device=device,
    )  # fmt: skip


def test_a_pyobjc_plan_is_read_through_its_selectors() -> None:
    inner = SimpleNamespace(operations=call([objc_operation("ios17.mul", MLCPUComputeDevice())]))
    body = [
        objc_operation("const", None),
        objc_operation("ios17.conv", MLNeuralEngineComputeDevice()),
        objc_operation("ios17.cond", MLNeuralEngineComputeDevice(), [inner]),
    ]
    function = SimpleNamespace(
        inputs=call([SimpleNamespace(name=call("input_ids"))]), block=call(SimpleNamespace(operations=call(body)))
    )
    program = SimpleNamespace(functions=call({"s128": function, "s256": function}))
    fake = SimpleNamespace(
        modelStructure=call(SimpleNamespace(program=call(program), neuralNetwork=call(None), pipeline=call(None))),
        computeDeviceUsageForMLProgramOperation_=lambda op: (
            None if op.device is None else SimpleNamespace(preferredComputeDevice=call(op.device))
        ),
        estimatedCostOfMLProgramOperation_=lambda op: None,
    )
    view = compute_plan.from_objc(fake, only="s128")
    assert set(view.functions) == {"s128"}
    assert placement.share(view, "s128") == 2 / 3


@pytest.mark.parametrize(("pipeline", "kind"), [(object(), "pipeline"), (None, "other")])
def test_a_pipeline_has_no_share(pipeline: object | None, kind: str) -> None:
    fake = SimpleNamespace(
        modelStructure=call(SimpleNamespace(program=call(None), neuralNetwork=call(None), pipeline=call(pipeline)))
    )
    view = compute_plan.from_objc(fake)
    assert view.kind == kind and placement.share(view) is None
