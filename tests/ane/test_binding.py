"""The binding's calls against Apple's headers: a stand-in framework made from their facts answers only what they allow.

Nothing here proves that Apple's framework behaves so: it proves that every message exists for its receiver, on the
systems we ask for, with these arguments; that errors become typed codes, strides are honoured and nothing native is
imported early. Evidence comes from a Mac only.
"""

from __future__ import annotations

import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines.ane.binding as binding_module
from engines.ane import compute_plan, coreml
from engines.ane.backend import Source
from engines.ane.compute_plan import Device
from engines.ane.coreml import CoreML
from engines.ane.signature import DTYPES, FunctionSpec, Tensor
from engines.protocol.errors import ErrorCode
from tests.ane.conftest import refusal
from tests.ane.coreml_answers import FACTS, Op
from tests.ane.coreml_standin import FLOOR, Framework
from tests.support.worker_client import ROOT

BUNDLE = Path("/x/model.mlmodelc")


class Echo:
    """A function whose states repeat the ids."""

    spec = FunctionSpec(
        {"input_ids": Tensor((1, 4), "int32"), "attention_mask": Tensor((1, 4), "int32")},
        {"last_hidden_state": Tensor((1, 4, 8), "float16")},
    )
    operations = (
        Op("const", (), ("table",)),
        Op("ios17.gather", ("table", "input_ids"), ("rows",)),
        Op("ios17.conv", ("rows",), ("last_hidden_state",), ((Op("ios17.mul", ("rows",), ("inner",)),),)),
    )

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"last_hidden_state": np.repeat(feeds["input_ids"][..., None], 8, axis=2).astype(np.float16)}


def place(op: Op, units: int) -> str:
    return "cpu" if op.operator == "ios17.gather" else "ane"


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[Framework]:
    """The stand-in; a broken rule fails the test even where the binding swallowed it."""
    made = Framework(lambda path, function: Echo(), place).install(monkeypatch)
    yield made
    assert made.faults == [] and made.pools == 0


def handle(multi: bool = True, units: str = "cpu_and_ne") -> binding_module.Handle:
    return binding_module.Handle(Source(BUNDLE, "s16", multi), units)


def feeds(first: int = 5) -> dict[str, np.ndarray]:
    ids = np.arange(first, first + 4, dtype=np.int32)[None]
    return {"input_ids": ids, "attention_mask": np.ones((1, 4), np.int32)}


def test_pyobjc_is_pinned_to_one_release() -> None:
    """Its parts demand each other with ``>=``: pinning one alone brings a pair that was never tried together."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ane"]
    pins = dict(re.findall(r"(pyobjc-[\w-]+)(==[\d.]+); platform_system == 'Darwin'", " ".join(extras)))
    assert set(pins) == {"pyobjc-core", "pyobjc-framework-Cocoa", "pyobjc-framework-CoreML"}
    assert len(set(pins.values())) == 1 and " ".join(extras).count("pyobjc") == 3


def test_the_binding_s_numbers_are_the_headers() -> None:
    enums = FACTS["enums"]
    units = enums["MLComputeUnitsCPUOnly"], enums["MLComputeUnitsCPUAndNeuralEngine"]
    assert dict(zip(("cpu_only", "cpu_and_ne"), units, strict=True)) == binding_module.UNITS
    assert enums["MLReshapeFrequencyHintInfrequent"] == binding_module.INFREQUENT
    for kind, dtype in DTYPES.items():
        assert kind == enums[f"MLMultiArrayDataType{dtype.capitalize()}"]


def test_load_sets_units_function_and_hints_before_loading(framework: Framework) -> None:
    handle().close()
    sent = [message[1:] for message in framework.sent if message[0].startswith("ML")]
    wanted: list[tuple[Any, ...]] = [("setComputeUnits:", 3), ("setFunctionName:", "s16"), ("setReshapeFrequency:", 1)]
    wanted += [("setOptimizationHints:",), ("modelWithContentsOfURL:configuration:error:",)]
    assert [message for message in sent if message in wanted] == wanted


@pytest.mark.parametrize("os", [FLOOR, (15, 0)])
def test_a_single_function_package_asks_nothing_that_the_floor_lacks(os: tuple[int, int], framework: Framework) -> None:
    """``functionName`` is macOS 15's: a package of one function is loaded, run and planned without it."""
    framework.os = os
    one = handle(multi=False, units="cpu_only")
    assert one.run(feeds())["last_hidden_state"].shape == (1, 4, 8)
    assert one.signature() == Echo.spec and one.plan() is not None
    one.close()
    assert ("MLModelConfiguration", "setComputeUnits:", 0) in framework.sent
    assert binding_module.devices() == ["MLCPUComputeDevice", "MLNeuralEngineComputeDevice"]


def test_several_functions_a_package_need_macos_15(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CoreML()
    monkeypatch.setattr("engines.ane.coreml.mac_version", lambda: "14.7.1")
    refused = refusal(lambda: backend.open(Source(BUNDLE, "s16", True), units="cpu_and_ne"))
    assert refused.code is ErrorCode.MODEL_UNSUPPORTED and "--target macos14" in refused.msg
    backend.open(Source(BUNDLE, "main", False), units="cpu_and_ne").close()


def test_bindings_that_cannot_be_imported_are_missing(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of different releases lie there, are found, and fail to load."""
    backend = CoreML()
    monkeypatch.setattr("engines.ane.coreml.floor", lambda: "ok")
    assert coreml.probe().code == "ok"
    monkeypatch.setitem(sys.modules, "CoreML", None)
    refused = refusal(lambda: backend.open(Source(BUNDLE, "main", False), units="cpu_and_ne"))
    assert refused.code is ErrorCode.BACKEND_MISSING and "one release" in refused.msg
    told = coreml.probe()
    assert (told.status, told.code) == ("refused", "bindings_missing") and "CoreML" in str(told.observed["bindings"])


def test_padded_outputs_are_read_by_their_strides_and_inputs_are_reused(framework: Framework) -> None:
    one = handle()
    first = one.run(feeds(first=5))["last_hidden_state"]
    second = one.run(feeds(first=9))["last_hidden_state"]
    assert first.dtype == np.float32 and first.flags.c_contiguous and first.shape == (1, 4, 8)
    assert first[0, :, 0].tolist() == [5, 6, 7, 8] and (first == first[..., :1]).all()
    assert second[0, :, 7].tolist() == [9, 10, 11, 12], "the arrays are filled anew"
    assert [message[1] for message in framework.sent].count("initWithDictionary:error:") == 1, "made once per function"
    assert framework.buffers == 2, "one view an input, however often it runs; outputs are copied"
    one.close()


PREDICT = "-[MLModel predictionFromFeatures:error:]"
LOAD = "+[MLModel modelWithContentsOfURL:configuration:error:]"
COMPILE = "+[MLModel compileModelAtURL:error:]"
POINTER, BYTES = "-[MLMultiArray dataPointer]", "-[MLMultiArray getBytesWithHandler:]"


@pytest.mark.parametrize(
    ("message", "text", "code"),
    [
        (LOAD, "Unable to load model", ErrorCode.ARTIFACT_INVALID),
        (LOAD, "The resource could not be found", ErrorCode.ARTIFACT_INVALID),
        (LOAD, "E5 program load failure: no memory (transient)", ErrorCode.ANE_RESOURCES_EXHAUSTED),
        (LOAD, "ANE: resources exhausted", ErrorCode.ANE_RESOURCES_EXHAUSTED),
        (LOAD, "NSInvalidArgumentException", ErrorCode.INFERENCE_FAILED),
        (COMPILE, "no such package", ErrorCode.ARTIFACT_INVALID),
        (COMPILE, "NSInvalidArgumentException", ErrorCode.INFERENCE_FAILED),
        (PREDICT, "prediction pipeline error", ErrorCode.INFERENCE_FAILED),
        (PREDICT, "NSInternalInconsistencyException", ErrorCode.INFERENCE_FAILED),
        (PREDICT, "NSInvalidArgumentException", ErrorCode.INFERENCE_FAILED),
        (PREDICT, "NSRangeException", ErrorCode.INFERENCE_FAILED),
        (PREDICT, "NSUnknownKeyException", ErrorCode.INFERENCE_FAILED),
        (PREDICT, "NSMallocException", ErrorCode.OOM),
    ],
)
def test_an_error_or_exception_of_the_framework_is_typed_and_the_worker_lives(
    message: str, text: str, code: ErrorCode, framework: Framework
) -> None:
    def answer(*given: Any) -> Any:
        if text.startswith("NS"):
            raise framework.exception(text)
        return framework.answers.error(text)

    framework.answers.table[message] = answer
    work = lambda: binding_module.compile_package(BUNDLE) if message == COMPILE else handle().run(feeds())  # noqa: E731
    refused = refusal(work)
    assert refused.code is code and text in refused.msg


def test_a_compiled_package_lies_where_the_framework_says(framework: Framework, tmp_path: Path) -> None:
    framework.scratch = tmp_path
    (tmp_path / "m.mlpackage").mkdir()
    assert binding_module.compile_package(tmp_path / "m.mlpackage").name == "m.mlmodelc"


@pytest.mark.parametrize(
    ("message", "answer", "part"),
    [
        (POINTER, lambda made: types.SimpleNamespace(as_buffer=lambda n: memoryview(bytearray(n // 2))), "bytes of 16"),
        (BYTES, lambda made, handler: None, "0 bytes"),
        (BYTES, lambda made, handler: handler(b"12", 2), "2 bytes"),
        ("-[MLMultiArray dataType]", lambda made: 65600, "65600"),
    ],
    ids=["half a buffer", "never", "short", "float64"],
)
def test_an_array_that_is_not_as_promised_fails_the_request_and_not_the_worker(
    message: str, answer: Any, part: str, framework: Framework
) -> None:
    framework.answers.table[message] = answer
    refused = refusal(lambda: handle().run(feeds()))
    assert refused.code is ErrorCode.INFERENCE_FAILED and part in refused.msg


def test_a_buffer_may_be_longer_than_the_array(framework: Framework) -> None:
    framework.answers.table[BYTES] = lambda made, handler: handler(bytes(9999), 9999)
    assert handle().run(feeds())["last_hidden_state"].shape == (1, 4, 8)


def test_a_bug_of_ours_is_not_taken_for_the_bridge_s(framework: Framework) -> None:
    with pytest.raises(ValueError, match="broadcast"):
        one = handle()
        one.run(feeds())
        one.run({"input_ids": np.zeros((1, 9), np.int32)})


def test_a_plan_is_the_loaded_function_s_with_where_and_why(framework: Framework) -> None:
    one = handle()
    function = one.plan()
    one.close()
    assert function is not None
    assert function.inputs == ("input_ids", "attention_mask") and function.outputs == ("last_hidden_state",)
    walked = [(op.operator, op.preferred, op.inputs, op.outputs) for op in function.walk()]
    assert walked == [
        ("const", Device.UNKNOWN, (), ("table",)),
        ("ios17.gather", Device.CPU, ("table", "input_ids"), ("rows",)),
        ("ios17.conv", Device.ANE, ("rows",), ("last_hidden_state",)),
        ("ios17.mul", Device.ANE, ("rows",), ("inner",)),
    ]
    assert compute_plan.share(function) == 2 / 3 and compute_plan.cpu_stages(function) == ["token_embedding"]


@pytest.mark.parametrize(
    ("functions", "multi", "chosen"),
    [
        ({"other": 1, "main": 2, "s16": 3}, True, "s16"),
        ({"other": 1, "main": 2, "s16": 3}, False, "main"),
        ({"a": 2, "b": 1}, False, "b"),
        ({"main": 1}, True, None),
        ({}, False, None),
        (None, False, None),
    ],
    ids=["by name", "main", "fewest inputs", "not there", "no function", "no program"],
)
def test_a_plan_is_judged_by_one_function(
    functions: dict[str, int] | None, multi: bool, chosen: str | None, framework: Framework
) -> None:
    """*functions*: how many inputs each has; its one output is called as it is."""

    def made(name: str, count: int) -> Any:
        block = framework.make("MLModelStructureProgramBlock", operations=[], outputNames=[name])
        one = framework.make("MLModelStructureProgramNamedValueType", name="x")
        return framework.make("MLModelStructureProgramFunction", inputs=[one] * count, block=block)

    program = None
    if functions is not None:
        found = {name: made(name, count) for name, count in functions.items()}
        program = framework.make("MLModelStructureProgram", functions=found)
    structure = framework.make("MLModelStructure", program=program)
    framework.answers.table["-[MLComputePlan modelStructure]"] = lambda plan: structure
    function = handle(multi).plan()
    assert (None if function is None else function.outputs) == (None if chosen is None else (chosen,))


@pytest.mark.parametrize("text", ["no plan on this system", None], ids=["an error", "never"])
def test_a_plan_that_fails_or_never_comes_is_a_line_and_no_value(
    text: str | None, framework: Framework, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    framework.no_plan = text
    if text is None:
        monkeypatch.setattr(binding_module, "PLAN_TIMEOUT_S", 0.01)
        loading = "+[MLComputePlan loadContentsOfURL:configuration:completionHandler:]"
        framework.answers.table[loading] = lambda _, url, config, handler: None
    assert handle().plan() is None
    assert "no compute plan for model.mlmodelc" in capsys.readouterr().err


# --- the stand-in itself: each kind of wrong message is refused ------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (lambda ml: ml.MLModel.loadModelWithURL_error_(None, None), "is not in the headers"),
        (lambda ml: ml.MLModel.compileModelAtURL_error_(None), "takes 2 arguments, got 1"),
        (lambda ml: ml.MLModel.predictionFromFeatures_error_(None, None), "is a instance method"),
        (lambda ml: ml.MLMultiArray.alloc().alloc(), "is a class method"),
        (lambda ml: ml.MLModelConfiguration.alloc().init().setComputeUnits_("cpu"), "'cpu' is no q"),
        (lambda ml: ml.MLFeatureValue.featureValueWithMultiArray_([1]), "is no MLMultiArray"),
        (lambda ml: ml.MLMultiArray.alloc().initWithShape_dataType_error_([1], 65568, "x"), "is no out NSError"),
        (lambda ml: ml.MLMultiArray.alloc().getBytesWithHandler_(lambda data: None), "is no block(^v,q)"),
        (lambda ml: ml.MLModelConfiguration.alloc().setFunctionName_("s"), "is macOS 15.0's, this is 14.4"),
        (lambda ml: ml.MLAllComputeDevices(1), "takes 0 arguments"),
        (lambda ml: ml.MLDictionaryFeatureProvider.alloc().initWithDictionary_error_({}, None) + 1, None),
    ],
)
def test_the_stand_in_refuses(
    message: Callable[[Any], Any], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Framework(lambda path, function: Echo(), os=FLOOR).install(monkeypatch)
    with pytest.raises((AttributeError, TypeError)), made.pool():
        message(sys.modules["CoreML"])
    assert [fault in one for one in made.faults] == ([True] if fault else []), made.faults  # type: ignore[operator]


def test_the_stand_in_refuses_a_message_outside_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Framework(lambda path, function: Echo()).install(monkeypatch)
    with pytest.raises(RuntimeError, match="outside an autorelease pool"):
        sys.modules["CoreML"].MLModelConfiguration.alloc()
    assert made.faults


@pytest.mark.skipif(sys.platform == "darwin", reason="off a Mac")
def test_off_a_mac_the_backend_is_missing() -> None:
    assert refusal(CoreML().require).code is ErrorCode.BACKEND_MISSING and CoreML().runtime == "coreml-macos-none"
