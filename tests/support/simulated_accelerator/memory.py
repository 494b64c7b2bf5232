"""Memory of the simulated device: tensors of device "sim" whose bytes are those of CPU tensors, their twins.

A tensor of the device is made through DLPack, so its storage has an address, a size and an end that calls back.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Allocation",
    "allocation_of",
    "extent",
    "freed",
    "live",
    "new_tensor",
    "poison",
    "release",
    "twin_of",
]

INTEGER_POISON = 0x5A5A5A5A5A5A5A5B  # large, odd, and cut to narrower types still both
EXTERNAL_DEVICE = 12  # kDLExtDev, torch's PrivateUse1


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_CODES = {  # DLDataTypeCode and bits
    torch.bool: (6, 8),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
}


class Allocation:
    """Memory of one storage.

    Attributes:
        twin: the CPU tensor that has the bytes, flat.
        stream: number of the stream it was allocated on.
        node: number of the node in that pass.
        of_pass: the backward pass that allocated it, if one did.
        used_on: numbers of the streams named by ``record_stream``.
        owner: the simulator it was allocated in.
    """

    __slots__ = (
        "end",
        "managed",
        "node",
        "numbers",
        "of_pass",
        "owner",
        "pointer",
        "stream",
        "twin",
        "used_on",
        "views",
    )

    def __init__(self, twin: Tensor, stream: int, owner: Any) -> None:
        self.twin, self.stream, self.owner = twin, stream, owner
        self.pointer = twin.data_ptr()
        self.used_on: set[int] = set()
        self.of_pass: Any = None
        self.node = 0
        self.views: dict[Any, Tensor] = {}


live: dict[int, Allocation] = {}  # by address
freed: deque[int] = deque()  # addresses of storages that died since the queues last looked


class _StorageEnd(weakref.ref):
    """Reports the end of a storage.

    torch keeps the Python object of a storage as long as the storage itself, and Python calls back with no exception
    set. DLPack's own deleter does not suffice: it is called in the middle of C++ exceptions.
    """

    __slots__ = ("pointer",)


def _ended(end: _StorageEnd, append: Any = freed.append) -> None:
    append(end.pointer)


_released: deque[Any] = deque(maxlen=4096)  # torch reads a structure once more after the end of its storage


def release(pointer: int) -> Allocation:
    """Forget the memory at `pointer`, whose storage has died."""
    allocation = live.pop(pointer)
    _released.append((allocation.managed, allocation.numbers))
    return allocation


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def poison(twin: Tensor) -> None:
    """Overwrite memory with NaN, or with a large odd number where there is no NaN."""
    if twin.dtype.is_floating_point or twin.dtype.is_complex:
        twin.fill_(float("nan"))
    elif twin.dtype == torch.bool:
        twin.fill_(True)
    else:
        bits = twin.dtype.itemsize * 8
        twin.fill_(INTEGER_POISON & ((1 << (bits - 1)) - 1))


def new_tensor(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, stream: int, owner: Any
) -> tuple[Tensor, Allocation]:
    """Return a tensor of the device with memory of its own, which is not poisoned yet."""
    if dtype not in _CODES:
        raise TypeError(f"the simulated device has no {dtype}; it has {', '.join(map(str, _CODES))}")
    count = 1
    for extent, step in zip(size, stride, strict=True):
        if extent == 0:
            count = 0
            break
        count += (extent - 1) * step
    twin = torch.empty(count or 1, dtype=dtype, device="cpu")
    allocation = Allocation(twin, stream, owner)
    ndim = len(size)
    numbers = (ctypes.c_int64 * (2 * ndim))(*size, *stride)
    address = ctypes.addressof(numbers)
    code, bits = _CODES[dtype]
    managed = _DLManagedTensor(
        (allocation.pointer, EXTERNAL_DEVICE, 0, ndim, code, bits, 1, address, address + 8 * ndim, 0),
        None,
        None,
    )
    allocation.managed, allocation.numbers = managed, numbers
    live[allocation.pointer] = allocation
    capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    allocation.end = end = _StorageEnd(tensor.untyped_storage(), _ended)
    end.pointer = allocation.pointer
    return tensor, allocation


def extent(twin: Tensor) -> tuple[int, int]:
    """Return the first address that a CPU tensor uses and the one behind its last."""
    start = twin.data_ptr()
    if not twin.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(twin.shape, twin.stride(), strict=True))
    return start, start + (last + 1) * twin.itemsize


def allocation_of(tensor: Tensor) -> Allocation:
    """Return the memory behind a tensor of the device."""
    return live[tensor.untyped_storage().data_ptr()]


def twin_of(tensor: Tensor) -> Tensor:
    """Return the CPU tensor with the bytes, size and strides of `tensor`, a tensor of the device."""
    offset, dtype = tensor.storage_offset(), tensor.dtype
    pointer = tensor.data_ptr()
    if pointer == 0:  # no elements
        pointer = tensor.untyped_storage().data_ptr()
    else:
        pointer -= offset * dtype.itemsize
    allocation = live[pointer]
    key = (tensor.shape, tensor.stride(), offset, dtype)
    view = allocation.views.get(key)
    if view is None:
        twin = allocation.twin
        if dtype is twin.dtype:
            view = twin.as_strided(tensor.shape, tensor.stride(), offset)
        else:
            view = torch.empty(0, dtype=dtype).set_(
                twin.untyped_storage(), offset, tensor.shape, tensor.stride()
            )
        allocation.views[key] = view
    return view
