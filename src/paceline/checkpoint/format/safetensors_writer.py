"""Writes tensors to a safetensors file, with a checksum each.

The format is that of the safetensors library (8 bytes of length, a JSON header, the tensors without gaps). Its own
writer is not used, since checksums are computed while writing and nothing is copied first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from paceline._core.files import EarlyFlush
from paceline.checkpoint.format.manifest import StoredTensor, TensorFile
from paceline.testing import fault_injection

__all__ = ["dtype_name", "write_safetensors"]

BLOCK_NBYTES = 1 << 20
"""Written and hashed at once, so that it stays in the processor's cache in between."""

_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "complex128": "U8",
}  # fmt: skip
"""Names of dtypes in safetensors, which has none for complex128: stored as bytes."""


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> TensorFile:
    """Write `tensors` to a new file, flush it to the disk, and return its description for a manifest.

    Args:
        path: the file; it must not exist.
        tensors: on the CPU, contiguous.
        metadata: further texts for the header.

    Raises:
        OSError: it can't be written.
    """
    order = sorted(tensors, key=lambda label: -tensors[label].element_size())  # so that each is aligned
    header = _header({label: tensors[label] for label in order}, metadata or {})
    offset, stored = len(header), {}
    with open(path, "xb", buffering=0) as file:
        stream = EarlyFlush(file.fileno())
        _write(stream, memoryview(header))
        for label in order:
            tensor = tensors[label]
            flat: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
            data, checksum = memoryview(flat), xxh3_64()
            for start in range(0, len(data), BLOCK_NBYTES):
                block = data[start : start + BLOCK_NBYTES]
                checksum.update(block)
                _write(stream, block)
            stop, shape = offset + tensor.nbytes, tuple(tensor.shape)
            stored[label] = StoredTensor(dtype_name(tensor), shape, offset, stop, checksum.hexdigest())
            offset = stop
        os.fsync(file.fileno())
    return TensorFile(offset, len(header), xxh3_64_hexdigest(header), stored)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    offset, entries = 0, {}
    for label, tensor in tensors.items():
        code = _CODES[dtype_name(tensor)]
        shape = [tensor.nbytes] if tensor.dtype is torch.complex128 else list(tensor.shape)
        entries[label] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    head = {"__metadata__": {"format": "pt", **metadata}, **entries}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 16)  # of the largest element, since mapped tensors are used in place
    return len(text).to_bytes(8, "little") + text


def _write(stream: EarlyFlush, block: memoryview) -> None:
    fault_injection.writing(len(block))
    while block:
        block = block[stream.write(block) :]
