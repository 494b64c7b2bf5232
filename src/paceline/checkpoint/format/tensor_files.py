"""Files of tensors: written with checksums while they are written, for the manifest.

The format is that of the safetensors library (8 bytes of length, a JSON header, the tensors without gaps). Its own
writer is not used, since checksums are computed while writing and nothing is copied first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from paceline._core.files import EarlyFlush, open_private
from paceline.checkpoint.format.manifest import BLOCK_NBYTES, StoredChunk, StoredFile
from paceline.checkpoint.parts.state_parts import TensorPart, dtype_name
from paceline.testing import fault_injection

__all__ = ["CODES", "ChecksummedFile", "block_checksums", "bytes_of", "write_parts", "write_safetensors"]

_STRIDE_NBYTES = 1 << 20  # written and hashed at once: it stays in the processor's cache in between

CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "complex128": "U8",
}  # fmt: skip
"""Names of dtypes in safetensors, which has none for complex128: stored as bytes."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.as_strided(
        (tensor.numel(),), (1,)
    )  # `reshape` may keep the stride of a dimension of size 1
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def block_checksums(data: memoryview, use: Callable[[memoryview], object] | None = None) -> str:
    """Return the checksums of a tensor's bytes, one per block, see `StoredChunk`.

    Args:
        data: the bytes.
        use: called with each run of them, while it is in the processor's cache.
    """
    digests = []
    for block in range(0, len(data), BLOCK_NBYTES):
        end = min(block + BLOCK_NBYTES, len(data))
        if use is None:
            digests.append(xxh3_64_hexdigest(data[block:end]))
            continue
        checksum = xxh3_64()
        for at in range(block, end, _STRIDE_NBYTES):
            stride = data[at : min(at + _STRIDE_NBYTES, end)]
            checksum.update(stride)
            use(stride)
        digests.append(checksum.hexdigest())
    return "".join(digests)


class ChecksummedFile:
    """A new file that is written from its beginning to its end, with checksums of what is written.

    Args:
        path: the file; it must not exist.

    Attributes:
        at: number of bytes written.

    Raises:
        OSError: it can't be written, here and in its methods.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0, opener=open_private)  # noqa: SIM115 — closed by `__exit__`
        self._stream = EarlyFlush(self._file.fileno())
        self._rest = xxh3_64()
        self._chunks: dict[str, StoredChunk] = {}
        self.at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes that belong to no tensor."""
        view = memoryview(data).cast("B")
        self._rest.update(view)
        self._put(view)
        return len(view)

    def write_tensor(self, data: memoryview) -> tuple[int, str]:
        """Write the bytes of a tensor; return where they start, and their checksums."""
        start = self.at
        return start, block_checksums(data, self._put)

    def _put(self, data: memoryview) -> None:
        fault_injection.before_write(len(data))
        self.at += len(data)
        while data:
            data = data[self._stream.write(data) :]

    def add(
        self, label: str, part: TensorPart, at: tuple[int, str], item: tuple[int, int] | None = None
    ) -> None:
        """Describe a tensor that was written.

        Args:
            label: of the part.
            part: the part.
            at: what `write_tensor` returned.
            item: start and length of the record that it is part of.
        """
        dtype = dtype_name(part.data)
        offsets, sizes = part.box.offsets, part.box.sizes
        self._chunks[label] = StoredChunk(part.name, dtype, part.shape, offsets, sizes, *at, item)

    def finish(self) -> StoredFile:
        """Flush the file to the disk, and return its description."""
        os.fsync(self._file.fileno())
        return StoredFile(self.at, self._rest.hexdigest(), self._chunks)


def write_parts(
    path: Path, parts: Mapping[str, TensorPart], read: Callable[[str], Tensor] | None = None
) -> StoredFile:
    """Write parts of tensors, contiguous on the CPU, to a new safetensors file, and flush it to the disk.

    Args:
        path: the file; it must not exist.
        parts: by their names in the file; with `read`, their data are on the device "meta".
        read: returns the data of a part, contiguous on the CPU, by its name in the file; called once for each.

    Returns:
        Its description.

    Raises:
        OSError: it can't be written.
    """
    order = sorted(parts, key=lambda label: -parts[label].data.element_size())  # so that each is aligned
    with ChecksummedFile(path) as file:
        file.write(_header({label: parts[label].data for label in order}, {}))
        for label in order:
            data = parts[label].data if read is None else read(label)
            file.add(label, parts[label], file.write_tensor(bytes_of(data)))
        return file.finish()


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write whole tensors to a new safetensors file, one after another, and flush it to the disk.

    Args:
        path: the file; it must not exist.
        tensors: by name, contiguous on the CPU; with `read`, on the device "meta".
        metadata: further texts for the header.
        read: returns the values of a tensor, contiguous on the CPU, by its name; called once for each.

    Raises:
        OSError: it can't be written.
    """
    order = sorted(tensors, key=lambda label: -tensors[label].element_size())
    with ChecksummedFile(path) as file:
        file.write(_header({label: tensors[label] for label in order}, metadata))
        for label in order:
            file.write_tensor(bytes_of(tensors[label] if read is None else read(label)))
        file.finish()


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    offset, entries = 0, {}
    for label, tensor in tensors.items():
        code = CODES[dtype_name(tensor)]
        shape = [tensor.nbytes] if tensor.dtype is torch.complex128 else list(tensor.shape)
        entries[label] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    head = {"__metadata__": {"format": "pt", **metadata}, **entries}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 16)  # of the largest element, since mapped tensors are used in place
    return len(text).to_bytes(8, "little") + text
