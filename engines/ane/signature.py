"""The functions of a model by size, the tensors that each must take and return, and whether an artifact agrees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from engines.bundle.preparation import TensorRecord as Tensor
from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from engines.ane.inputs import InputRules

__all__ = ["DTYPES", "FunctionSpec", "Key", "Kind", "Tensor", "check_signature", "expected"]

HIDDEN: Final = "last_hidden_state"
SCORE: Final = "score"
DTYPES: Final = {131104: "int32", 65552: "float16", 65568: "float32"}
"""What a package and Apple's MLMultiArrayDataType call a dtype."""
Kind: TypeAlias = Literal["shape", "packed"]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One function of a model: a bucket or a packed width, in tokens."""

    kind: Kind
    tokens: int

    def __str__(self) -> str:
        return f"{'bucket' if self.kind == 'shape' else 'packed width'} {self.tokens}"


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """The tensors of one function by name: fixed shapes; int32, float16 or float32."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def expected(key: Key, rules: InputRules, *, task: str, hidden: int) -> FunctionSpec:
    """Return the signature a function must have: int32 ids, fixed shapes, one output."""
    width = key.tokens
    row, table = Tensor((1, width), "int32"), Tensor((1, 1, width, width), "float16")
    inputs = {"input_ids": row}
    if key.kind == "packed":
        inputs |= {"position_ids": row, "attention_bias": table}
        if rules.window is not None:
            inputs["local_bias"] = table
    else:
        inputs["attention_mask"] = row
        if rules.token_types:
            inputs["token_type_ids"] = row
    if task == "rerank":
        return FunctionSpec(inputs, {SCORE: Tensor((1,), "float16")})
    return FunctionSpec(inputs, {HIDDEN: Tensor((1, width, hidden), "float16")})


def check_signature(name: str, found: FunctionSpec, wanted: FunctionSpec) -> None:
    """Compare a function's signature with what the manifest implies; EngineError artifact_invalid names the part.

    The output dtype may be float16 or float32 (Core ML hands out either); everything else must be equal.
    """
    for what, have, need in (("input", found.inputs, wanted.inputs), ("output", found.outputs, wanted.outputs)):
        if set(have) != set(need):
            why = f"function {name} has {what}s {sorted(have)}, the model needs {sorted(need)}"
            raise EngineError(ErrorCode.ARTIFACT_INVALID, why)
        for tensor, spec in need.items():
            dtypes = ("float16", "float32") if what == "output" else (spec.dtype,)
            got = have[tensor]
            if got.shape != spec.shape or got.dtype not in dtypes:
                why = f"{what} {tensor} is {got.dtype} {list(got.shape)}, the manifest implies {spec.dtype}"
                raise EngineError(ErrorCode.ARTIFACT_INVALID, f"function {name}: {why} {list(spec.shape)}")
