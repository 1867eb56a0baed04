"""Which functions a model has, which of them are resident, and the worker's hard cap (ane.md 4 and 7).

A shape is one loaded function of one bucket, a packed width one loaded packed function; both count against the same
cap. The host decides what to admit and evict; here is only what no host may exceed. A worker holds one model, so the
cap of a model keeps the worker's own (8 functions), too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from engines.ane import placement
from engines.ane.package import FunctionSpec, Tensor
from engines.protocol.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from engines.ane.backend import Program
    from engines.ane.inputs import InputRules
    from engines.protocol.messages import Inventory

PER_MODEL: Final = 4

Kind: TypeAlias = Literal["shape", "packed"]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One function of a model: a bucket or a packed width, in tokens."""

    kind: Kind
    tokens: int

    def __str__(self) -> str:
        return f"{'bucket' if self.kind == 'shape' else 'packed width'} {self.tokens}"


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded function, what it was admitted with, and its placement share (None where the plan gives none)."""

    program: Program
    inventory: Inventory
    share: float | None


class Shapes:
    """The functions of one model. *opener* loads one of them, all or nothing."""

    def __init__(
        self,
        available: Iterable[Key],
        opener: Callable[[Key], Resident],
    ) -> None:
        self.available = frozenset(available)
        self._opener = opener
        self._resident: dict[Key, Resident] = {}

    def admit(self, key: Key) -> Inventory:
        """Load *key* unless it is resident; the same inventory then.

        EngineError: invalid_shape, unsupported_packed_width, ane_residency_limit, and what the opener raises.
        """
        found = self._resident.get(key)
        if found is not None:
            return found.inventory
        self._check_known(key)
        if len(self._resident) >= PER_MODEL:
            raise EngineError(
                ErrorCode.ANE_RESIDENCY_LIMIT, f"{PER_MODEL} functions of this model are resident; evict one first"
            )
        resident = self._opener(key)
        self._resident[key] = resident
        return resident.inventory

    def evict(self, key: Key) -> None:
        """Release *key*; one that isn't resident is fine, one the model doesn't have is refused."""
        self._check_known(key)
        resident = self._resident.pop(key, None)
        if resident is not None:
            resident.program.close()

    def program(self, key: Key) -> Program:
        """Return the loaded function, or refuse with ``shape_not_admitted``: nothing loads implicitly."""
        self._check_known(key)
        resident = self._resident.get(key)
        if resident is None:
            have = ", ".join(str(one) for one in sorted(self._resident)) or "nothing"
            raise EngineError(ErrorCode.SHAPE_NOT_ADMITTED, f"{key} is not resident (resident: {have})")
        return resident.program

    def resident(self, kind: Kind) -> tuple[int, ...]:
        """Return the resident buckets or packed widths, ascending."""
        return tuple(sorted(key.tokens for key in self._resident if key.kind == kind))

    @property
    def share(self) -> float | None:
        """The wire's placement share: the minimum over the resident functions, absent when any has none."""
        return placement.worst(resident.share for resident in self._resident.values())

    def close(self) -> None:
        """Release everything; idempotent."""
        while self._resident:
            _, resident = self._resident.popitem()
            resident.program.close()

    def _check_known(self, key: Key) -> None:
        if key not in self.available:
            sizes = [str(one.tokens) for one in sorted(self.available) if one.kind == key.kind]
            code = ErrorCode.INVALID_SHAPE if key.kind == "shape" else ErrorCode.UNSUPPORTED_PACKED_WIDTH
            raise EngineError(code, f"the model has no {key} (it has: {', '.join(sizes) or 'none'})")


def expected(key: Key, rules: InputRules, *, task: str, hidden: int) -> FunctionSpec:
    """Return the signature a function must have: int32 ids, fixed shapes, one output."""
    width = key.tokens
    inputs = {"input_ids": Tensor((1, width), "int32")}
    if key.kind == "packed":
        inputs["position_ids"] = Tensor((1, width), "int32")
        inputs["attention_bias"] = Tensor((1, 1, width, width), "float16")
        if rules.window is not None:
            inputs["local_bias"] = Tensor((1, 1, width, width), "float16")
    else:
        inputs["attention_mask"] = Tensor((1, width), "int32")
        if rules.token_types:
            inputs["token_type_ids"] = Tensor((1, width), "int32")
    if task == "rerank":
        return FunctionSpec(inputs, {"score": Tensor((1,), "float16")})
    return FunctionSpec(inputs, {"last_hidden_state": Tensor((1, width, hidden), "float16")})


def check_signature(name: str, found: FunctionSpec, wanted: FunctionSpec) -> None:
    """Compare a function's signature with what the manifest implies; EngineError artifact_invalid names the part.

    The output dtype may be float16 or float32 (Core ML hands out either); everything else must be equal.
    """
    for what, have, need in (("input", found.inputs, wanted.inputs), ("output", found.outputs, wanted.outputs)):
        if set(have) != set(need):
            raise EngineError(
                ErrorCode.ARTIFACT_INVALID,
                f"function {name} has {what}s {sorted(have)}, the model needs {sorted(need)}",
            )
        for tensor, spec in need.items():
            dtypes = ("float16", "float32") if what == "output" else (spec.dtype,)
            if have[tensor].shape != spec.shape or have[tensor].dtype not in dtypes:
                raise EngineError(
                    ErrorCode.ARTIFACT_INVALID,
                    f"function {name}: {what} {tensor} is {have[tensor].dtype} {list(have[tensor].shape)}, "
                    f"the manifest implies {spec.dtype} {list(spec.shape)}",
                )
