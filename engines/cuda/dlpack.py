"""Device memory of ours as a DLPack capsule, which onnxruntime takes as a tensor without copying it.

DLPack is the C structure that array libraries hand each other tensors with (dmlc.github.io/dlpack, version 0.8). Pure
ctypes: no native library is touched here. The memory's owner keeps it until every tensor made of it is gone.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy.typing as npt

CUDA: Final = 2
"""kDLCUDA of DLDeviceType."""
KINDS: Final = {"i": 0, "u": 1, "f": 2}
"""numpy's kind -> DLDataTypeCode."""


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_LIVE: Final[dict[int, tuple[Any, ...]]] = {}
"""Address of a structure -> what keeps it alive, until its consumer calls the deleter."""
_forget = _Deleter(lambda address: _LIVE.pop(address, None) and None)
_new: Any = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def capsule(address: int, like: npt.NDArray[Any], index: int) -> Any:
    """Return device memory at *address* on GPU *index* as a contiguous tensor with the shape and dtype of *like*."""
    shape = (ctypes.c_int64 * like.ndim)(*like.shape)
    tensor = _Tensor(
        address, CUDA, index, like.ndim, KINDS[like.dtype.kind], 8 * like.dtype.itemsize, 1, shape, None, 0
    )
    managed = _Managed(tensor, None, _forget)
    place = ctypes.addressof(managed)
    _LIVE[place] = (managed, shape)
    return _new(place, b"dltensor", None)
