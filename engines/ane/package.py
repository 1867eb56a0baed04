"""Core ML packages on disk: written so that two builds agree byte for byte, and read without the framework.

coremltools names a package's items by random UUIDs and stamps the conversion date into the model; both are replaced
here. A package without those can have its directory digest pinned (ane.md 5).
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from engines.protocol.errors import EngineError, ErrorCode

Target: TypeAlias = Literal["macos14", "macos15"]
SUFFIX: Final = ".mlpackage"
MAIN: Final = "main"
SPEC: Final = Path("Data", "com.apple.CoreML", "model.mlmodel")
NAMESPACE: Final = uuid.UUID("6f0d3d2e-5f0a-5b58-9d5e-0c6b8b1f7a10")
VOLATILE: Final = "com.github.apple.coremltools.conversion_date"
MAX_SPEC: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output: fixed shape and dtype (``int32``, ``float16``, ``float32``)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """The signature of one function, as the package states it."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PackageSpec:
    """Signatures by function name, and the user metadata. A single-function package has the one name ``main``."""

    functions: dict[str, FunctionSpec]
    metadata: dict[str, str] = field(default_factory=dict)
    version: int = 0


def convert(function: Any, *, target: Target) -> Any:
    """Return an unsaved coremltools model of one MIL function; nothing is loaded into a framework.

    Only the clean-up passes run (dead code, constants folded and shared): the graph is written in the form it should
    have, and the default pipeline leaves the very same operations in twice the time. So neither the int16 pass can
    reuse a stale unsigned type (apple/coremltools#2626) nor a guard of gather indices cost operations on the CPU.
    """
    import coremltools as ct
    from coremltools.converters.mil.mil import Program

    program = Program()
    program.add_function(MAIN, function)
    return ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.macOS14 if target == "macos14" else ct.target.macOS15,
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        pass_pipeline=ct.PassPipeline.CLEANUP,
        skip_model_load=True,
    )


def opset(target: Target) -> Any:
    """Return the MIL opset a graph for *target* is built with."""
    import coremltools as ct

    return ct.target.iOS17 if target == "macos14" else ct.target.iOS18


def save(
    build: Mapping[str, Callable[[], Any]],
    path: Path,
    *,
    target: Target,
    metadata: Mapping[str, str],
    done: Callable[[str], None] = lambda name: None,
) -> None:
    """Convert and save functions as one artifact at *path*, which must not exist.

    *build*: function name -> call that makes its MIL function. ``macos15``: one multi-function package whose functions
    share their weights. ``macos14``: a folder of single-function packages ``<name>.mlpackage``, since that system knows
    one function a package. *done* is called after each function.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; remove it or choose another output folder")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch_name:
        scratch = Path(scratch_name)
        parts: dict[str, Path] = {}
        for name, make in build.items():
            parts[name] = scratch / f"{name}{SUFFIX}"
            convert(make(), target=target).save(str(parts[name]))
            done(name)
        if target == "macos14":
            out = scratch / "out"
            out.mkdir()
            for name, part in parts.items():
                part.rename(out / part.name)
                finish(out / part.name, {**metadata, "synapse.function": name})
        else:
            out = scratch / f"out{SUFFIX}"
            _merge(parts, out)
            finish(out, metadata)
        out.rename(path)


def _merge(parts: Mapping[str, Path], out: Path) -> None:
    from coremltools.models.utils import MultiFunctionDescriptor, save_multifunction

    descriptor = MultiFunctionDescriptor()
    for name, part in parts.items():
        descriptor.add_function(str(part), src_function_name=MAIN, target_function_name=name)
    descriptor.default_function_name = next(iter(parts))
    save_multifunction(descriptor, str(out))


def finish(package: Path, metadata: Mapping[str, str]) -> None:
    """Set the user metadata and make the package's bytes reproducible."""
    model = load_proto(package)
    user = model.description.metadata.userDefined
    for key in list(user):
        if key == VOLATILE:
            del user[key]
    for key, value in metadata.items():
        user[key] = value
    (package / SPEC).write_bytes(model.SerializeToString(deterministic=True))
    rewrite_manifest(package)


def rewrite_manifest(package: Path) -> None:
    """Replace the random item ids of ``Manifest.json`` by ids made from each item's path."""
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
        raise EngineError(
            ErrorCode.ARTIFACT_INVALID, f"{package.name} is not a Core ML package: {exc.strerror or exc}"
        ) from exc
    if len(data) > MAX_SPEC:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{file} is larger than {MAX_SPEC} bytes")
    model = proto.Model_pb2.Model()
    try:
        model.ParseFromString(data)
    except Exception as exc:  # DecodeError's home differs between protobuf versions; nothing else can go wrong here
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{package.name}: the model specification is damaged") from exc
    return model


def read_spec(package: Path) -> PackageSpec:
    """Read the signatures of a ``.mlpackage``; only ML Programs with fixed array shapes are taken.

    A multi-function package has an empty top-level description, its inputs are per function.
    """
    model = load_proto(package)
    if model.WhichOneof("Type") != "mlProgram":
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"{package.name} is no ML Program")
    description = model.description
    found = {f.name: f for f in description.functions} or {MAIN: description}
    functions = {
        name: FunctionSpec(
            {feature.name: _tensor(package, feature) for feature in one.input},
            {feature.name: _tensor(package, feature) for feature in one.output},
        )
        for name, one in found.items()
    }
    missing = set(functions) - set(model.mlProgram.functions)
    if missing:
        raise EngineError(ErrorCode.ARTIFACT_INVALID, f"{package.name}: function {sorted(missing)[0]} has no program")
    return PackageSpec(functions, dict(description.metadata.userDefined), model.specificationVersion)


_DTYPES: Final = {65568: "float32", 131104: "int32", 65552: "float16", 65600: "float64"}


def _tensor(package: Path, feature: Any) -> Tensor:
    kind = feature.type.multiArrayType
    if feature.type.WhichOneof("Type") != "multiArrayType" or kind.WhichOneof("ShapeFlexibility") is not None:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{package.name}: {feature.name} is no array of one fixed shape; flexible shapes leave the Neural Engine",
        )
    return Tensor(tuple(kind.shape), _DTYPES.get(kind.dataType, f"type {kind.dataType}"))


def operators(package: Path, function: str) -> set[str]:
    """Return the operator names of one function, nested blocks included."""
    found: set[str] = set()

    def walk(block: Any) -> None:
        for operation in block.operations:
            found.add(operation.type)
            for inner in operation.blocks:
                walk(inner)

    program = load_proto(package).mlProgram.functions[function]
    for block in program.block_specializations.values():
        walk(block)
    return found
