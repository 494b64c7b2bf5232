"""Tensors to a safetensors file that has reached the disk, a checksum each.

Files are as the safetensors library writes them (8 bytes of length, a JSON header, the tensors side by side), so
anybody can read them. They are written here, since checksums are taken on the way and nothing is copied first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from paceline._core.files import EarlyFlush
from paceline.checkpoint.format.manifest import StoredObject, TensorFile
from paceline.testing import fault_injection

__all__ = ["dtype_name", "write_file"]

BLOCK_NBYTES = 1 << 20
"""Written and summed at once: it stays in the processor's cache between the two."""

_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "complex128": "U8",
}  # fmt: skip
"""Names in safetensors; it has none for complex128, which goes as bytes."""


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> TensorFile:
    """Write `tensors` to a new file, wait until they are on the disk, and return what a manifest says of it.

    Args:
        path: the file; it must not exist.
        tensors: on the CPU, contiguous.
        metadata: texts that the file's header is to hold as well.

    Raises:
        OSError: it can't be written.
    """
    order = sorted(tensors, key=lambda label: -tensors[label].element_size())  # so that each is aligned
    header = _header({label: tensors[label] for label in order}, metadata or {})
    at, stored = len(header), {}
    with open(path, "xb", buffering=0) as file:
        stream = EarlyFlush(file.fileno())
        _write(stream, memoryview(header))
        for label in order:
            tensor = tensors[label]
            checksum = xxh3_64()
            for block in _blocks(_bytes(tensor)):
                checksum.update(block)
                _write(stream, block)
            stop = at + tensor.nbytes
            stored[label] = StoredObject(
                dtype_name(tensor), tuple(tensor.shape), at, stop, checksum.hexdigest()
            )
            at = stop
        os.fsync(file.fileno())
    return TensorFile(at, len(header), xxh3_64_hexdigest(header), stored)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    at, entries = 0, {}
    for label, tensor in tensors.items():
        code = _CODES[dtype_name(tensor)]
        shape = [tensor.nbytes] if tensor.dtype is torch.complex128 else list(tensor.shape)
        entries[label] = {"dtype": code, "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(
        {"__metadata__": {"format": "pt", **metadata}, **entries}, separators=(",", ":")
    ).encode()
    text += b" " * (-(len(text) + 8) % 16)  # of the largest element: mapped, tensors are used where they lie
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(flat)


def _blocks(whole: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(whole), BLOCK_NBYTES):
        yield whole[start : start + BLOCK_NBYTES]


def _write(stream: EarlyFlush, block: memoryview) -> None:
    fault_injection.before_write(len(block))
    while block:
        block = block[stream.write(block) :]
