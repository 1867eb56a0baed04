"""Core ML packages on disk: written so that two builds agree byte for byte, and read without the framework.

coremltools names a package's items by random UUIDs and stamps the conversion date into the model; both are replaced
here. A package without those can have its directory digest pinned (ane.md 5).
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from engines.ane.artifact import MAIN
from engines.ane.signature import DTYPES, FunctionSpec, Tensor
from engines.protocol.errors import EngineError, ErrorCode

Target: TypeAlias = Literal["macos14", "macos15"]
NAMESPACE: Final = uuid.UUID("6f0d3d2e-5f0a-5b58-9d5e-0c6b8b1f7a10")
SUFFIX: Final = ".mlpackage"
SPEC: Final = Path("Data", "com.apple.CoreML", "model.mlmodel")
VOLATILE: Final = "com.github.apple.coremltools.conversion_date"
MAX_SPEC: Final = 256 * 1024 * 1024


def save(
    build: Mapping[str, Callable[[Any], Any]],
    path: Path,
    *,
    target: Target,
    metadata: Mapping[str, str],
    done: Callable[[int, int], None],
) -> None:
    """Convert and save functions as one artifact at *path*, which must not exist; no framework loads anything.

    *build*: function name -> call that makes its MIL function for an opset. ``macos15``: one multi-function package
    whose functions share their weights. ``macos14``: a folder of single-function packages ``<name>.mlpackage``, since
    that system knows one function a package. *done* gets how many are finished, of how many.

    Only the clean-up passes run (dead code, constants folded and shared): the graph is written in the form it should
    have, and the default pipeline leaves the very same operations in twice the time. So neither the int16 pass can
    reuse a stale unsigned type (apple/coremltools#2626) nor a guard of gather indices cost operations on the CPU.
    """
    import coremltools as ct
    from coremltools.converters.mil.mil import Program
    from coremltools.models.utils import MultiFunctionDescriptor, save_multifunction

    if path.exists():
        raise FileExistsError(f"{path} exists; remove it or choose another output folder")
    system = ct.target.macOS14 if target == "macos14" else ct.target.macOS15
    scratch_of = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    with scratch_of as scratch, _temporary_files_in(scratch):
        out, parts = Path(scratch, f"out{SUFFIX}"), Path(scratch, "parts")
        parts.mkdir()
        descriptor = MultiFunctionDescriptor()
        for count, (name, make) in enumerate(build.items(), 1):
            program = Program()
            program.add_function(MAIN, make(system))
            model = ct.convert(
                program,
                convert_to="mlprogram",
                minimum_deployment_target=system,
                compute_units=ct.ComputeUnit.CPU_AND_NE,
                pass_pipeline=ct.PassPipeline.CLEANUP,
                skip_model_load=True,
            )
            part = parts / f"{name}{SUFFIX}"
            model.save(str(part))
            if target == "macos14":
                _finish(part, {**metadata, "synapse.function": name})
            else:
                descriptor.add_function(str(part), src_function_name=MAIN, target_function_name=name)
            done(count, len(build))
        if target == "macos14":
            parts.rename(path)
            return
        descriptor.default_function_name = next(iter(build))
        save_multifunction(descriptor, str(out))
        _finish(out, metadata)
        out.rename(path)


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Let coremltools put its copies of a package into *folder*, which goes with the build.

    It keeps a copy of every model that it converts in the system's place for temporary files until the process ends,
    and a process that is killed never removes them.
    """
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _finish(package: Path, metadata: Mapping[str, str]) -> None:
    """Set the user metadata, and replace what differs between two builds: the date, and the manifest's random ids."""
    model = load_proto(package)
    user = model.description.metadata.userDefined
    user.pop(VOLATILE, None)
    user.update(metadata)
    (package / SPEC).write_bytes(model.SerializeToString(deterministic=True))
    file = package / "Manifest.json"
    document = json.loads(file.read_bytes())
    ids = {old: str(uuid.uuid5(NAMESPACE, item["path"])).upper() for old, item in document["itemInfoEntries"].items()}
    document["itemInfoEntries"] = {ids[old]: item for old, item in document["itemInfoEntries"].items()}
    document["rootModelIdentifier"] = ids[document["rootModelIdentifier"]]
    file.write_text(json.dumps(document, sort_keys=True, indent=4) + "\n")


def load_proto(package: Path) -> Any:
    """Parse the package's model specification; EngineError artifact_invalid when it isn't one."""
    from coremltools import proto  # the protobuf types only; no framework is touched

    file = package / SPEC
    try:
        with file.open("rb") as handle:
            data = handle.read(MAX_SPEC + 1)
    except OSError as exc:
        why = f"{package.name} is not a Core ML package: {exc.strerror or exc}"
        raise EngineError(ErrorCode.ARTIFACT_INVALID, why) from exc
    if len(data) > MAX_SPEC:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{file} is larger than {MAX_SPEC} bytes")
    model = proto.Model_pb2.Model()
    try:
        model.ParseFromString(data)
    except Exception as exc:  # DecodeError's home differs between protobuf versions; nothing else can go wrong here
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{package.name}: the model specification is damaged") from exc
    return model


def read_spec(package: Path) -> dict[str, FunctionSpec]:
    """Read the signatures of a ``.mlpackage`` by function name; only ML Programs with fixed array shapes are taken.

    A single-function package has the one name ``main``. A multi-function one has an empty top-level description, its
    inputs are per function. EngineError artifact_invalid, model_unsupported.
    """
    model = load_proto(package)
    if model.WhichOneof("Type") != "mlProgram":
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"{package.name} is no ML Program")
    found = {one.name: one for one in model.description.functions} or {MAIN: model.description}
    missing = set(found) - set(model.mlProgram.functions)
    if missing:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{package.name}: function {sorted(missing)[0]} has no program")
    return {
        name: FunctionSpec(*({f.name: _tensor(package, f) for f in side} for side in (one.input, one.output)))
        for name, one in found.items()
    }


def _tensor(package: Path, feature: Any) -> Tensor:
    kind = feature.type.multiArrayType
    if feature.type.WhichOneof("Type") != "multiArrayType" or kind.WhichOneof("ShapeFlexibility") is not None:
        why = f"{package.name}: {feature.name} is no array of one fixed shape; other shapes leave the Neural Engine"
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, why)
    return Tensor(tuple(kind.shape), DTYPES.get(kind.dataType, f"type {kind.dataType}"))
