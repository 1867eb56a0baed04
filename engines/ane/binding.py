"""The last calls into Apple's framework, through PyObjC. Never executed until evidence from a Mac exists.

Sources, named at each call: [A] Apple's CoreML headers (developer.apple.com/documentation/coreml, macOS 14.4 and 15
SDK); [P] PyObjC 12.2 (CoreML/_metadata.py for out-arguments, blocks and enums; Modules/objc/varlist.m and
objc_support.m for memory; Modules/objc/libffi_support.m for calls). PyObjC turns ``selector:with:error:`` into
``selector_with_error_``, all arguments in order, and returns an error out-argument beside the result [P]. It releases
the GIL around every message [P], so the peer watcher and progress run during a long load. Arrays belong to
Objective-C: no Python object is inside them, so Core ML may drop them on any thread (apple/coremltools#2827 crashes
otherwise). Every use sits in an autorelease pool: outputs are autoreleased, and a Python thread has no pool. What the
bridge itself raises there becomes ``inference_failed``: the request fails and the worker lives (:func:`_calls`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engines.ane.backend import Source
from engines.ane.compute_plan import Function, from_objc
from engines.ane.signature import DTYPES, FunctionSpec, Tensor
from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engines.ane.inputs import Feeds

PLAN_TIMEOUT_S: Final = 540.0  # below the 600 s silence window: a plan that takes longer is no plan
UNITS: Final = {"cpu_only": 0, "cpu_and_ne": 3}  # [A] MLComputeUnits; MLComputeUnitsAll (2) is never used
INFREQUENT: Final = 1  # [A] MLReshapeFrequencyHintInfrequent; [P] the same
KINDS: Final = {dtype: kind for kind, dtype in DTYPES.items()}  # [A] MLMultiArrayDataType; [P] the same
EXHAUSTED: Final = ("no memory", "resource exhaust", "resources exhaust", "insufficient", "program load failure")


def _fail(code: ErrorCode, what: str, error: Any) -> EngineError:
    text = str(error.localizedDescription()) if error is not None else "no reason given"  # [A] NSError
    exhausted = any(word in text.lower() for word in EXHAUSTED)
    return EngineError(ErrorCode.ANE_RESOURCES_EXHAUSTED if exhausted else code, f"{what}: {text[:500]}")


@contextmanager
def _calls(what: str) -> Iterator[None]:
    """Run calls in an autorelease pool of their own.

    EngineError inference_failed (oom for NSMallocException) for an Objective-C exception, an answer of a type or name
    unknown here (KeyError), and a buffer of another size than promised (RuntimeError). [P] objc_util.m: an Objective-C
    exception is an objc.error, or by its name a ValueError, IndexError, MemoryError or KeyError; each carries
    ``_pyobjc_info_``. A ValueError without it is a bug of ours and ends the worker.
    """
    import objc

    with objc.autorelease_pool():  # [P] objc/__init__.py: a context manager
        try:
            yield
        except Exception as exc:
            if not isinstance(exc, (KeyError, RuntimeError, objc.error)) and not hasattr(exc, "_pyobjc_info_"):
                raise
            code = ErrorCode.OOM if isinstance(exc, MemoryError) else ErrorCode.INFERENCE_FAILED
            raise EngineError(code, f"{what}: {type(exc).__name__}: {exc}"[:500]) from exc


def devices() -> list[str]:
    """Return the class names of what Core ML can compute on."""
    import CoreML

    with _calls("listing devices"):
        # [A] MLAllComputeDevices(), macOS 14; [P] a function that returns an array
        return [type(device).__name__ for device in CoreML.MLAllComputeDevices()]


def compile_package(package: Path) -> Path:
    """Compile a ``.mlpackage`` and return the temporary ``.mlmodelc``, which is the caller's to move."""
    import CoreML
    import Foundation

    with _calls(f"compiling {package.name}"):
        url = Foundation.NSURL.fileURLWithPath_(str(package))
        # [A] +[MLModel compileModelAtURL:error:], a temporary location; [P] argument 3 is an out-argument
        compiled, error = CoreML.MLModel.compileModelAtURL_error_(url, None)
        if compiled is None:
            raise _fail(ErrorCode.ARTIFACT_INVALID, f"compiling {package.name}", error)
        return Path(str(compiled.path()))  # [A] NSURL.path


class Handle:
    """One MLModel. [A] A model's synchronous prediction is for one thread at a time; this worker has one."""

    def __init__(self, source: Source, units: str) -> None:
        import CoreML
        import Foundation

        self._ml, self._ns, self._name = CoreML, Foundation, source.path.name
        with _calls(f"loading {source.path.name} {source.function}"):
            self._url = Foundation.NSURL.fileURLWithPath_(str(source.path))  # [A] NSURL fileURLWithPath:
            config = CoreML.MLModelConfiguration.alloc().init()
            config.setComputeUnits_(UNITS[units])  # [A] MLModelConfiguration.computeUnits
            if source.multi:
                config.setFunctionName_(source.function)  # [A] MLModelConfiguration.functionName, macOS 15
            hints = config.optimizationHints()  # [A] MLModelConfiguration.optimizationHints, macOS 14.4
            hints.setReshapeFrequency_(INFREQUENT)  # [A] MLOptimizationHints.reshapeFrequency
            config.setOptimizationHints_(hints)  # [A] a copied property: it must be set back
            self._config, self._only = config, source.function if source.multi else None
            # [A] +[MLModel modelWithContentsOfURL:configuration:error:]; [P] argument 4 is an out-argument
            model, error = CoreML.MLModel.modelWithContentsOfURL_configuration_error_(self._url, config, None)
            if model is None:
                raise _fail(ErrorCode.ARTIFACT_INVALID, f"loading {source.path.name} {source.function}", error)
            self._model: Any = model
            self._inputs: dict[str, tuple[Any, Any]] = {}
            self._provider: Any = None

    def signature(self) -> FunctionSpec:
        """[A] MLModel.modelDescription; MLModelDescription.inputDescriptionsByName; MLMultiArrayConstraint."""

        def tensors(features: Any) -> dict[str, Tensor]:
            constraints = {str(name): features[name].multiArrayConstraint() for name in features}
            return {
                name: Tensor(tuple(int(n) for n in one.shape()), DTYPES.get(int(one.dataType()), "unknown"))
                for name, one in constraints.items()
            }

        with _calls("signature"):
            about = self._model.modelDescription()
            return FunctionSpec(tensors(about.inputDescriptionsByName()), tensors(about.outputDescriptionsByName()))

    def run(self, feeds: Feeds) -> dict[str, npt.NDArray[np.float32]]:
        """Fill the function's own arrays, predict, and copy the outputs out by their strides."""
        with _calls("prediction"):
            if self._provider is None:
                self._provider = self._make_provider(feeds)
            for name, value in feeds.items():
                self._inputs[name][1][...] = value
            # [A] -[MLModel predictionFromFeatures:error:]; [P] argument 3 is an out-argument
            result, error = self._model.predictionFromFeatures_error_(self._provider, None)
            if result is None:
                raise _fail(ErrorCode.INFERENCE_FAILED, "prediction", error)
            names = result.featureNames()  # [A] MLFeatureProvider.featureNames, then MLFeatureValue.multiArrayValue
            return {str(name): _read(result.featureValueForName_(name).multiArrayValue()) for name in names}

    def _make_provider(self, feeds: Feeds) -> Any:
        values = self._ns.NSMutableDictionary.dictionary()  # [A] NSMutableDictionary
        for name, value in feeds.items():
            shape = [int(n) for n in value.shape]
            # [A] -[MLMultiArray initWithShape:dataType:error:]; Core ML owns the memory
            kind = KINDS[value.dtype.name]
            array, error = self._ml.MLMultiArray.alloc().initWithShape_dataType_error_(shape, kind, None)
            if array is None:
                raise _fail(ErrorCode.OOM, f"input {name}", error)
            self._inputs[name] = array, _writable(array)
            values[name] = self._ml.MLFeatureValue.featureValueWithMultiArray_(array)
        # [A] -[MLDictionaryFeatureProvider initWithDictionary:error:]; kept for the function's whole life
        provider, error = self._ml.MLDictionaryFeatureProvider.alloc().initWithDictionary_error_(values, None)
        if provider is None:
            raise _fail(ErrorCode.INFERENCE_FAILED, "input provider", error)
        return provider

    def plan(self) -> Function | None:
        """[A] +[MLComputePlan loadContentsOfURL:configuration:completionHandler:], macOS 14.4, as it was loaded."""
        got: list[Any] = []
        done = threading.Event()

        def handler(plan: Any, error: Any) -> None:  # [P] block (plan, error); called on a queue of Core ML's
            got.extend((plan, error))
            done.set()

        try:
            with _calls("compute plan"):
                self._ml.MLComputePlan.loadContentsOfURL_configuration_completionHandler_(
                    self._url, self._config, handler
                )
                if not done.wait(PLAN_TIMEOUT_S) or got[0] is None:
                    raise _fail(ErrorCode.PLACEMENT_UNREPORTED, "compute plan", got[1] if got else None)
                return from_objc(got[0], self._only)
        except Exception as exc:  # any plan error is a line on stderr and no value (ane.md 1.1, 6)
            print(f"no compute plan for {self._name}: {exc}", file=sys.stderr)
            return None

    def close(self) -> None:
        """Drop the model inside a pool of its own: without it capacity isn't returned until some later pool drains."""
        with _calls("release"):
            self._provider, self._model, self._config = None, None, None
            self._inputs.clear()


def _layout(array: Any) -> tuple[int, Callable[[Any], Any]]:
    """Return the bytes from the first to the last element, and what makes a buffer of them an array by its strides."""
    import numpy as np

    kind = np.dtype(DTYPES[int(array.dataType())])  # [A] MLMultiArray.dataType, .shape, .strides (in elements)
    shape, strides = [int(n) for n in array.shape()], [int(n) * kind.itemsize for n in array.strides()]
    nbytes = kind.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    count = nbytes // kind.itemsize
    return nbytes, lambda buffer: np.lib.stride_tricks.as_strided(np.frombuffer(buffer, kind, count), shape, strides)


def _writable(array: Any) -> Any:
    """Return a numpy view of an array of ours, for its whole life: each as_buffer() leaks a small object [P]."""
    nbytes, strided = _layout(array)
    # [A] MLMultiArray.dataPointer; [P] a varlist, whose as_buffer(count) over void counts bytes (a void's size is 1)
    buffer = array.dataPointer().as_buffer(nbytes)
    if buffer.nbytes != nbytes:
        raise RuntimeError(f"the binding gave {buffer.nbytes} bytes of {nbytes}")
    return strided(buffer)


def _read(array: Any) -> Any:
    """Copy an output out as dense float32, by its strides: rows of a Neural Engine output may be padded."""
    nbytes, strided = _layout(array)
    got: list[bytes] = []
    # [A] -[MLMultiArray getBytesWithHandler:], macOS 12.3; [P] the block gets a copy of (bytes, size), on this thread
    array.getBytesWithHandler_(lambda data, size: got.append(bytes(data)))
    if len(got) != 1 or len(got[0]) < nbytes:
        raise RuntimeError(f"the binding gave {len(got[0]) if got else 0} bytes of {nbytes}")
    return strided(got[0]).astype("float32", order="C", copy=True)
