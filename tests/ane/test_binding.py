"""The binding's calls against what is published: size, one source a call, and a stand-in framework that checks
arguments.

Nothing here proves that Apple's framework behaves so: it proves that every selector has the right number of arguments,
errors become typed codes, strides are honoured and nothing native is imported early. Evidence comes from a Mac only.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines.ane.binding as binding_module
from engines.ane.backend import Source
from engines.ane.coreml import CoreML
from engines.protocol.errors import EngineError, ErrorCode

FILE = Path(binding_module.__file__)


def test_the_binding_stays_small_and_cites_a_source_per_call() -> None:
    text = FILE.read_text()
    assert text.count("\n") < 200
    selectors = set(re.findall(r"\b([a-z]\w*_(?:\w*_)*)\(", text)) - {"autorelease_pool"}
    calls = {name for name in selectors if name.endswith("_") and not name.startswith("_")}
    assert {"predictionFromFeatures_error_", "modelWithContentsOfURL_configuration_error_"} <= calls
    assert text.count("[A]") >= 20 and text.count("[P]") >= 6


def test_the_framework_is_imported_inside_functions_only() -> None:
    for line in FILE.read_text().splitlines():
        if re.match(r"\s*(import|from) (CoreML|objc|Foundation)", line):
            assert line.startswith("    "), line


# --- a stand-in framework --------------------------------------------------------------------------------------------


class Error:
    def __init__(self, text: str) -> None:
        self.text = text

    def localizedDescription(self) -> str:
        return self.text


class Pool:
    depth = 0

    def __enter__(self) -> None:
        Pool.depth += 1

    def __exit__(self, *exc: object) -> None:
        Pool.depth -= 1


class MultiArray:
    """An MLMultiArray whose last axis is padded, as Neural Engine outputs are (200 -> 224 elements)."""

    views = 0
    """How often a buffer over its memory was made: the real one leaks an object each time."""

    def __init__(self) -> None:
        self.pad = 0

    @classmethod
    def alloc(cls) -> MultiArray:
        return cls()

    def initWithShape_dataType_error_(self, shape: Any, kind: int, error: None) -> tuple[Any, Any]:
        assert Pool.depth and error is None
        self._shape, self._kind = [int(n) for n in shape], kind
        self._dtype = np.dtype({131104: "int32", 65552: "float16", 65568: "float32"}[kind])
        row = self._shape[-1] + self.pad
        strides = [row if n == len(self._shape) - 2 else 0 for n in range(len(self._shape))]
        strides[-1] = 1
        for axis in range(len(self._shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * (
                self._shape[axis + 1] + (self.pad if axis + 1 == len(strides) - 1 else 0)
            )
        self._strides = strides
        span = 1 + sum((n - 1) * s for n, s in zip(self._shape, strides, strict=True))
        self._memory = bytearray(span * self._dtype.itemsize)
        return self, None

    def shape(self) -> list[int]:
        return self._shape

    def strides(self) -> list[int]:
        return self._strides

    def dataType(self) -> int:
        return self._kind

    def dataPointer(self) -> Any:
        memory = self._memory
        MultiArray.views += 1
        return types.SimpleNamespace(as_buffer=lambda count: memoryview(memory)[:count])

    def getBytesWithHandler_(self, handler: Any) -> None:
        assert Pool.depth
        handler(bytes(self._memory), len(self._memory))

    def dense(self) -> np.ndarray:
        flat = np.frombuffer(self._memory, self._dtype)
        return np.lib.stride_tricks.as_strided(flat, self._shape, [s * self._dtype.itemsize for s in self._strides])


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.load_error: str | None = None
        self.predict_error: str | None = None


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """CoreML, Foundation and objc as far as the binding uses them; every selector checks its argument count."""
    record = Recorder()

    class Config:
        @classmethod
        def alloc(cls) -> Config:
            return cls()

        def init(self) -> Config:
            self.name = None
            return self

        def setComputeUnits_(self, units: int) -> None:
            record.calls.append(("units", units))

        def setFunctionName_(self, name: str) -> None:
            self.name = name
            record.calls.append(("function", name))

        def optimizationHints(self) -> Any:
            return types.SimpleNamespace(setReshapeFrequency_=lambda n: record.calls.append(("reshape", n)))

        def setOptimizationHints_(self, hints: Any) -> None:
            record.calls.append(("hints", None))

    class FeatureValue:
        @staticmethod
        def featureValueWithMultiArray_(array: MultiArray) -> Any:
            return types.SimpleNamespace(multiArrayValue=lambda: array)

    class Provider:
        @classmethod
        def alloc(cls) -> Provider:
            return cls()

        def initWithDictionary_error_(self, values: Any, error: None) -> tuple[Any, Any]:
            record.calls.append(("provider", sorted(values)))
            self.values = dict(values)
            return self, None

    class Model:
        @staticmethod
        def modelWithContentsOfURL_configuration_error_(url: Any, config: Config, error: None) -> tuple[Any, Any]:
            assert Pool.depth and error is None
            record.calls.append(("load", url))
            record.config = config  # type: ignore[attr-defined]
            return (None, Error(record.load_error)) if record.load_error else (Model(), None)

        def predictionFromFeatures_error_(self, provider: Provider, error: None) -> tuple[Any, Any]:
            assert Pool.depth and error is None
            if record.predict_error:
                return None, Error(record.predict_error)
            ids = provider.values["input_ids"].multiArrayValue().dense()
            out = MultiArray()
            out.pad = 24
            out.initWithShape_dataType_error_([1, ids.shape[1], 8], 65552, None)
            out.dense()[...] = np.repeat(ids[..., None], 8, axis=2)
            value = types.SimpleNamespace(multiArrayValue=lambda: out)
            return types.SimpleNamespace(
                featureNames=lambda: ["last_hidden_state"], featureValueForName_=lambda name: value
            ), None

    class Plan:
        @staticmethod
        def loadContentsOfURL_configuration_completionHandler_(url: Any, config: Config, handler: Any) -> None:
            record.calls.append(("plan", config is record.config))  # type: ignore[attr-defined]
            handler(None, Error("no plan on this system"))

    core = types.ModuleType("CoreML")
    core.MLModelConfiguration = Config  # type: ignore[attr-defined]
    core.MLModel = Model  # type: ignore[attr-defined]
    core.MLMultiArray = MultiArray  # type: ignore[attr-defined]
    core.MLFeatureValue = FeatureValue  # type: ignore[attr-defined]
    core.MLDictionaryFeatureProvider = Provider  # type: ignore[attr-defined]
    core.MLComputePlan = Plan  # type: ignore[attr-defined]
    foundation = types.ModuleType("Foundation")
    foundation.NSURL = types.SimpleNamespace(  # type: ignore[attr-defined]
        fileURLWithPath_=lambda path: types.SimpleNamespace(path=path, lastPathComponent=lambda: Path(path).name)
    )
    foundation.NSMutableDictionary = types.SimpleNamespace(dictionary=dict)  # type: ignore[attr-defined]
    objc = types.ModuleType("objc")
    objc.autorelease_pool = Pool  # type: ignore[attr-defined]
    for module in (core, foundation, objc):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return record


def handle(multi: bool = True, units: str = "cpu_and_ne") -> binding_module.Handle:
    return binding_module.Handle(Source(Path("/x/model.mlmodelc"), "s16", multi), units)


def feeds(width: int = 4, first: int = 5) -> dict[str, np.ndarray]:
    ids = np.arange(first, first + width, dtype=np.int32)[None]
    return {"input_ids": ids, "attention_mask": np.ones((1, width), np.int32)}


def test_load_sets_units_function_and_hints_before_loading(framework: Recorder) -> None:
    handle().close()
    assert framework.calls[:4] == [("units", 3), ("function", "s16"), ("reshape", 1), ("hints", None)]
    assert framework.calls[4][0] == "load"


def test_a_single_function_package_gets_no_function_name(framework: Recorder) -> None:
    handle(multi=False, units="cpu_only").close()
    assert ("function", "s16") not in framework.calls and framework.calls[0] == ("units", 0)


def test_padded_outputs_are_read_by_their_strides_and_inputs_are_reused(framework: Recorder) -> None:
    MultiArray.views = 0
    one = handle()
    first = one.run(feeds(first=5))["last_hidden_state"]
    second = one.run(feeds(first=9))["last_hidden_state"]
    assert first.dtype == np.float32 and first.flags.c_contiguous and first.shape == (1, 4, 8)
    assert first[0, :, 0].tolist() == [5, 6, 7, 8] and (first == first[..., :1]).all()
    assert second[0, :, 7].tolist() == [9, 10, 11, 12], "the arrays are filled anew"
    assert [name for name, _ in framework.calls].count("provider") == 1, "made once per function"
    assert MultiArray.views == 2, "one view an input, however often it runs; outputs are copied"
    one.close()
    assert Pool.depth == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Unable to load model", ErrorCode.ARTIFACT_INVALID),
        ("The resource could not be found", ErrorCode.ARTIFACT_INVALID),
        ("E5 program load failure: no memory (transient)", ErrorCode.ANE_RESOURCES_EXHAUSTED),
        ("ANE: resources exhausted", ErrorCode.ANE_RESOURCES_EXHAUSTED),
    ],
)
def test_load_errors_are_typed(text: str, code: ErrorCode, framework: Recorder) -> None:
    framework.load_error = text
    with pytest.raises(EngineError) as refused:
        handle()
    assert refused.value.code is code and text in refused.value.msg and Pool.depth == 0


def test_a_failed_prediction_is_inference_failed(framework: Recorder) -> None:
    framework.predict_error = "prediction pipeline error"
    with pytest.raises(EngineError) as refused:
        handle().run(feeds())
    assert refused.value.code is ErrorCode.INFERENCE_FAILED and Pool.depth == 0


def test_a_plan_uses_the_load_s_configuration_and_its_error_is_a_line_and_no_value(
    framework: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert handle().plan() is None
    assert ("plan", True) in framework.calls
    assert "no compute plan" in capsys.readouterr().err


def test_a_short_buffer_is_noticed(framework: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        MultiArray, "dataPointer", lambda self: types.SimpleNamespace(as_buffer=lambda n: memoryview(bytearray(n // 2)))
    )
    with pytest.raises(RuntimeError, match="bytes"):
        handle().run(feeds())


@pytest.mark.parametrize("given", [[], [b"12"], [b"1" * 4096, b"2"]])
def test_an_output_that_is_not_given_once_and_whole_is_noticed(
    given: list[bytes], framework: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(self: MultiArray, handler: Any) -> None:
        for data in given:
            handler(data, len(data))

    monkeypatch.setattr(MultiArray, "getBytesWithHandler_", give)
    with pytest.raises(RuntimeError, match="bytes"):
        handle().run(feeds())


def test_a_plan_asks_nothing_that_macos_14_lacks(framework: Recorder) -> None:
    """``functionName`` is macOS 15's; a single-function package must be planned without it."""
    assert handle(multi=False).plan() is None
    assert ("plan", True) in framework.calls


@pytest.mark.skipif(sys.platform == "darwin", reason="off a Mac")
def test_open_off_a_mac_is_backend_missing() -> None:
    backend = CoreML()
    with pytest.raises(EngineError) as refused:
        backend.open(Source(Path("/x"), "s", True), units="cpu_and_ne")
    assert refused.value.code is ErrorCode.BACKEND_MISSING
    assert backend.os_build() == "none" and backend.runtime == "coreml-macos-none"
