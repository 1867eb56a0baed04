"""A stand-in for PyObjC and Core ML, made from the facts of ``coreml_interfaces.json``. Nothing here is Apple's.

A message is answered only as the headers allow: the class has that selector, of that kind (class or instance), since a
system no newer than the pretended one, with as many arguments of those types; an error out-argument is given as None
and comes back beside the result; everything happens in an autorelease pool. Whatever breaks a rule raises as PyObjC
would and is kept in :attr:`Framework.faults`, so that no ``except`` of the binding hides it. A test asks for that list.

What a loaded function computes and where it "runs" is given by the test; its numbers mean nothing.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ane.coreml_answers import FACTS, PLACES, Answers, Loaded, MilFunction, Op

FLOOR, NEWEST = (14, 4), (26, 5)
BASICS = {"+alloc": ["10.0", "id", []], "-init": ["10.0", "id", []]}
# Foundation isn't in that list; these few are the same in every release of it.
FOUNDATION = {
    "NSURL": {
        "+fileURLWithPath:": ["10.0", "NSURL", ["NSString"]],
        "-path": ["10.0", "NSString", []],
        "-lastPathComponent": ["10.6", "NSString", []],
    },
    "NSError": {"-localizedDescription": ["10.0", "NSString", []]},
    "NSMutableDictionary": {"+dictionary": ["10.0", "NSDictionary<id,id>", []]},
}


class ObjCError(Exception):
    """objc.error."""


BRIDGED: dict[str, type[Exception]] = {
    "NSRangeException": IndexError,
    "NSInvalidArgumentException": ValueError,
    "NSMallocException": MemoryError,
    "NSUnknownKeyException": KeyError,
}
"""Objective-C exceptions that PyObjC raises as exceptions of Python's own; every other one is an objc.error."""


class ObjCClass(type):
    """The type of every Objective-C class here: an unknown attribute is a message to the class."""

    _framework: Framework

    def __getattr__(cls, name: str) -> Any:
        return cls._framework.message(cls, None, name)


class Framework:
    """CoreML, Foundation and objc of one pretended system.

    *load* opens a function by bundle and name (None where the configuration names none); *place* says where an
    operation prefers to run with the given compute units: ``ane``, ``cpu``, ``gpu``, or None for no usage.
    """

    def __init__(
        self,
        load: Callable[[Path, str | None], Loaded] = MilFunction,
        place: Callable[[Op, int], str | None] = lambda op, units: "ane" if units else "cpu",
        *,
        os: tuple[int, int] = NEWEST,
    ) -> None:
        self.load, self.place, self.os = load, place, os
        self.faults: list[str] = []
        self.sent: list[tuple[str, ...]] = []
        """(class, selector, plain arguments) of every message, in order."""
        self.no_plan: str | None = None
        """Text of the error a plan ends with, if any."""
        self.predicted: Callable[[int], None] = lambda units: None
        """Called with the model's compute units before each prediction."""
        self.scratch: Path | None = None
        """Where compiled bundles appear; None for the system's place for temporary files."""
        self.pad = 24
        self.buffers = 0
        """How often a buffer over an array's memory was made: the real bridge leaks an object each time."""
        self._pools = threading.local()
        self.answers = Answers(self)
        self.classes: dict[str, Any] = {}
        for name in [*FACTS["classes"], *FOUNDATION]:
            self.classes[name] = ObjCClass(name, (_Instance,), {"_framework": self})

    # --- the modules -------------------------------------------------------------------------------------------------

    def install(self, patch: pytest.MonkeyPatch) -> Framework:
        """Put CoreML, Foundation and objc in the place of the real ones for a test."""
        core, foundation, objc = (types.ModuleType(name) for name in ("CoreML", "Foundation", "objc"))
        for name, made in self.classes.items():
            setattr(foundation if name in FOUNDATION else core, name, made)
        core.MLAllComputeDevices = self._devices  # type: ignore[attr-defined]
        objc.autorelease_pool = self.pool  # type: ignore[attr-defined]
        objc.error = ObjCError  # type: ignore[attr-defined]
        for module in (core, foundation, objc):
            patch.setitem(sys.modules, module.__name__, module)
        return self

    def _devices(self, *given: Any) -> list[Any]:
        introduced, _, arguments = FACTS["functions"]["MLAllComputeDevices"]
        self._allow("MLAllComputeDevices", introduced)
        if len(given) != len(arguments):
            raise self.fault(TypeError, f"MLAllComputeDevices takes {len(arguments)} arguments, got {len(given)}")
        return [self.make(PLACES["cpu"]), self.make(PLACES["ane"])]

    def pool(self) -> _Pool:
        """Return a new autorelease pool for this thread."""
        return _Pool(self._pools)

    @property
    def pools(self) -> int:
        """How many autorelease pools are open on this thread."""
        return getattr(self._pools, "depth", 0)

    # --- messages ----------------------------------------------------------------------------------------------------

    def fault(self, kind: type[Exception], text: str) -> Exception:
        """Keep a broken rule and return what PyObjC would raise for it."""
        self.faults.append(text)
        return kind(text)

    def exception(self, name: str, reason: str = "out of sorts") -> Exception:
        """Return what the bridge raises for an Objective-C exception of that name."""
        made = BRIDGED.get(name, ObjCError)(f"{name} - {reason}")
        made._pyobjc_info_ = {"name": name, "reason": reason}  # type: ignore[attr-defined]
        return made

    def make(self, kind: str, /, **state: Any) -> Any:
        """Return a new instance of a class, its properties as given."""
        made = object.__new__(self.classes[kind])
        made.__dict__["_state"] = state
        return made

    def fact(self, name: str, signed: str) -> Any:
        """Return [introduced, result, arguments] of ``+selector`` or ``-selector``, None where there is no such one."""
        if name in FOUNDATION:
            return {**BASICS, **FOUNDATION[name]}.get(signed)
        about = FACTS["classes"][name]
        inherited = [FACTS["protocols"][one]["methods"].get(signed) for one in about["protocols"]]
        return next((one for one in (about["methods"].get(signed), *inherited, BASICS.get(signed)) if one), None)

    def _allow(self, what: str, introduced: str) -> None:
        if tuple(int(part) for part in introduced.split(".")) > self.os:
            raise self.fault(AttributeError, f"{what} is macOS {introduced}'s, this is {self.os[0]}.{self.os[1]}")

    def message(self, kind: type, receiver: Any, name: str) -> Callable[..., Any]:
        """Return what a selector of a class (*receiver* None) or an instance is called with."""
        if name.startswith("__"):
            raise AttributeError(name)
        selector, (sign, other) = name.replace("_", ":"), ("+-" if receiver is None else "-+")
        what = f"{sign}[{kind.__name__} {selector}]"
        found = self.fact(kind.__name__, sign + selector)
        if found is None:
            wrong = self.fact(kind.__name__, other + selector) is not None
            reason = f"is a {'class' if other == '+' else 'instance'} method" if wrong else "is not in the headers"
            raise self.fault(AttributeError, f"{what} {reason}")
        introduced, result, arguments = found
        self._allow(what, introduced)

        def call(*given: Any) -> Any:
            if not self.pools:
                raise self.fault(RuntimeError, f"{what} outside an autorelease pool")
            if len(given) != len(arguments):
                raise self.fault(TypeError, f"{what} takes {len(arguments)} arguments, got {len(given)}")
            for value, wanted in zip(given, arguments, strict=True):
                if not self.fits(value, wanted):
                    raise self.fault(TypeError, f"{what}: {value!r} is no {wanted}")
            self.sent.append((kind.__name__, selector, *(v for v in given if isinstance(v, (int, str)))))
            gives_error = any(wanted.startswith("out ") for wanted in arguments)
            inputs = [v for v, wanted in zip(given, arguments, strict=True) if not wanted.startswith("out ")]
            answer = self._answer(kind, receiver, sign, selector, inputs)
            value = answer[0] if gives_error else answer
            assert result == "v" or self.fits(value, result), f"{what} answers {value!r}, not {result}"
            return answer

        return call

    def _answer(self, kind: type, receiver: Any, sign: str, selector: str, given: list[Any]) -> Any:
        answer = self.answers.table.get(f"{sign}[{kind.__name__} {selector}]")
        if answer is not None:
            return answer(receiver, *given)
        if selector == "alloc":
            return self.make(kind.__name__)
        if selector == "init":
            return receiver
        if selector.startswith("set") and len(given) == 1:
            receiver._state[selector[3].lower() + selector[4:-1]] = given[0]
            return None
        if receiver is not None and not given and selector in receiver._state:
            return receiver._state[selector]
        raise self.fault(NotImplementedError, f"the stand-in doesn't play {sign}[{kind.__name__} {selector}]")

    def fits(self, value: Any, wanted: str) -> bool:
        """Tell whether a Python value is, for the bridge, of an argument's or result's type."""
        if wanted.startswith("out "):
            return value is None
        if wanted in "qI":
            return isinstance(value, int) and not isinstance(value, bool)
        if wanted == "d":
            return isinstance(value, (int, float))
        if wanted.startswith("block("):
            arity = len([one for one in wanted[6:-1].split(",") if one])
            try:
                inspect.signature(value).bind(*[None] * arity)
            except TypeError:
                return False
            return True
        if wanted == "id" or wanted.startswith("^") or value is None:
            return True
        if wanted.startswith("id<"):
            about = FACTS["classes"].get(type(value).__name__, {"protocols": []})
            return wanted[3:-1] in about["protocols"]
        outer, _, inner = wanted.partition("<")
        if outer in ("NSArray", "NSSet"):
            return isinstance(value, (list, tuple, set)) and all(self.fits(one, inner[:-1]) for one in value)
        if outer == "NSDictionary":
            key_type, _, value_type = inner[:-1].partition(",")
            return isinstance(value, dict) and all(
                self.fits(key, key_type) and self.fits(one, value_type) for key, one in value.items()
            )
        plain = {"NSString": str, "NSNumber": (int, float)}.get(outer)
        return isinstance(value, plain) if plain is not None else type(value) is self.classes.get(outer)


class _Instance:
    """An Objective-C object: an unknown attribute is a message to it."""

    _framework: Framework
    _state: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self._framework.message(type(self), self, name)


class _Pool:
    """objc.autorelease_pool, counted a thread."""

    def __init__(self, pools: threading.local) -> None:
        self._pools = pools

    def __enter__(self) -> None:
        self._pools.depth = getattr(self._pools, "depth", 0) + 1

    def __exit__(self, *exc: object) -> None:
        self._pools.depth -= 1
