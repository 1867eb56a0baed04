"""Runs first in a child whose PYTHONPATH names this folder: sends cuda-python's runtime calls to the stub libraries.

``cuda.bindings.runtime`` has NVIDIA's own runtime linked into it, which talks to the driver through private tables that
a stub can't answer. Its Cython layers call each other through function pointers in ``__pyx_capi__``; before the upper
layers import those of ``cuda.bindings._internal.runtime``, every pointer that the stub runtime has a function for is
replaced. The public Python layer (arguments, tuples, enums) stays NVIDIA's.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TARGET = "cuda.bindings._internal.runtime"
_KEPT: list[Any] = []
"""The replaced capsules: their names' memory is the new capsules' names."""


def redirect(module: Any) -> None:
    """Replace the function pointers of *module*."""
    runtime = ctypes.CDLL("libcudart.so.13")
    name_of, new = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_New
    name_of.restype, name_of.argtypes = ctypes.c_void_p, [ctypes.py_object]
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    table = module.__pyx_capi__
    for name in list(table):
        function = getattr(runtime, name.removeprefix("_"), None)
        if function is not None:
            _KEPT.append(table[name])
            table[name] = new(ctypes.cast(function, ctypes.c_void_p).value, name_of(table[name]), None)


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        redirect(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == TARGET else None
        if found is not None:
            found.loader = _Loader(found.loader)
        return found


if os.environ.get("CUDASHIM") == "1":
    sys.meta_path.insert(0, _Finder())
if os.environ.get("CUDASHIM_REPORT"):
    # The stub driver writes its report when it is unloaded, which a worker that ends at once never does.
    os._exit = ctypes.CDLL(None).exit
