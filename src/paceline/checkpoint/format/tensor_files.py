"""Tensor files of a checkpoint: written with a checksum per tensor, verified before use.

The format is that of the safetensors library (8 bytes of length, a JSON header, the tensors without gaps). Its own
writer is not used, since checksums are computed while writing and nothing is copied first. When reading, offsets come
from the manifest, which is validated; a file's header is only hashed. Several threads read runs of tensors: a single
one would wait for the disk while it could hash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from paceline._core.files import EarlyFlush, open_private
from paceline.checkpoint.format.manifest import StoredTensor, TensorFile
from paceline.errors import DamagedCheckpoint
from paceline.testing import fault_injection

__all__ = ["VerifiedReader", "dtype_name", "write_safetensors"]

_BLOCK_NBYTES = 1 << 20  # read or written, and hashed, at once: it stays in the processor's cache in between
_RUN_NBYTES = 32 << 20
_THREADS = 4

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
    with open(path, "xb", buffering=0, opener=open_private) as file:
        stream = EarlyFlush(file.fileno())
        _write(stream, memoryview(header))
        for label in order:
            tensor = tensors[label]
            flat: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
            data, checksum = memoryview(flat), xxh3_64()
            for start in range(0, len(data), _BLOCK_NBYTES):
                block = data[start : start + _BLOCK_NBYTES]
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
    fault_injection.before_write(len(block))
    while block:
        block = block[stream.write(block) :]


class VerifiedReader:
    """The tensors of a checkpoint's files.

    Args:
        folder: the checkpoint.
        files: their descriptions in the manifest.
    """

    def __init__(self, folder: Path, files: Mapping[str, TensorFile]) -> None:
        self._folder, self._files = folder, files
        self._maps: dict[str, np.memmap] = {}
        self._kept: dict[tuple[str, str], Tensor] = {}

    def verify(self, names: Iterable[str], *, keep: Iterable[str] = ()) -> None:
        """Read files whole, and compare their sizes and checksums with the manifest.

        Args:
            names: the files.
            keep: those of them whose tensors stay in memory.

        Raises:
            DamagedCheckpoint: they differ, or can't be read; names the file, and the tensor that differs.
        """
        kept = set(keep)
        handles: dict[str, int] = {}
        try:
            for name in names:
                handles[name] = self._open(name)
            with ThreadPoolExecutor(_THREADS) as pool:
                jobs = [
                    pool.submit(self._verify_run, handles[name], name, run, name in kept)
                    for name in handles
                    for run in _runs(self._files[name].tensors)
                ]
                jobs += [pool.submit(self._verify_header, handle, name) for name, handle in handles.items()]
                for job in jobs:
                    job.result()
        finally:
            for handle in handles.values():
                os.close(handle)

    def tensor(self, file: str, label: str) -> Tensor:
        """Return a tensor: kept in memory, or mapped, so that only used pages are read. Writing changes no file.

        Raises:
            KeyError: there is no such tensor.
        """
        if (file, label) in self._kept:
            return self._kept[file, label]
        stored = self._files[file].tensors[label]
        if stored.start == stored.stop:
            return _empty(stored)
        if file not in self._maps:
            self._maps[file] = np.memmap(self._folder / file, np.uint8, mode="c")
        part = torch.from_numpy(self._maps[file][stored.start : stored.stop])
        return part.view(getattr(torch, stored.dtype)).view(tuple(stored.shape))

    def _open(self, name: str) -> int:
        try:
            handle = os.open(self._folder / name, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name} is missing") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{name} can't be read: {error.strerror}") from error
        size, expected = os.fstat(handle).st_size, self._files[name].nbytes
        if size != expected:
            os.close(handle)
            raise DamagedCheckpoint(f"{name} has {size} bytes instead of {expected}")
        return handle

    def _verify_header(self, handle: int, name: str) -> None:
        file = self._files[name]
        if _read_checksum(handle, name, 0, file.header_nbytes) != file.header_checksum:
            raise DamagedCheckpoint(f"{name}: wrong checksum of the header")

    def _verify_run(
        self, handle: int, name: str, run: Sequence[tuple[str, StoredTensor]], keep: bool
    ) -> None:
        for label, stored in run:
            target = None
            if keep:
                self._kept[name, label] = tensor = _empty(stored)
                flat: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
                target = memoryview(flat)
            if _read_checksum(handle, name, stored.start, stored.stop, target) != stored.checksum:
                raise DamagedCheckpoint(f"{name}: wrong checksum of tensor {label!r}")


def _empty(stored: StoredTensor) -> Tensor:
    return torch.empty(tuple(stored.shape), dtype=getattr(torch, stored.dtype))


def _runs(tensors: Mapping[str, StoredTensor]) -> Iterator[list[tuple[str, StoredTensor]]]:
    """Yield the tensors of a file in runs of neighbours of about the same size."""
    run: list[tuple[str, StoredTensor]] = []
    for label, stored in tensors.items():
        run.append((label, stored))
        if stored.stop - run[0][1].start >= _RUN_NBYTES:
            yield run
            run = []
    if run:
        yield run


def _read_checksum(handle: int, name: str, start: int, stop: int, target: memoryview | None = None) -> str:
    """Read bytes start … stop - 1 of file `name`, into `target` if given, and return their checksum.

    Raises:
        DamagedCheckpoint: the file ends before, or can't be read.
    """
    scratch = memoryview(bytearray(min(_BLOCK_NBYTES, stop - start) if target is None else 0))
    checksum, at = xxh3_64(), start
    while at < stop:
        size = min(_BLOCK_NBYTES, stop - at)
        block = scratch[:size] if target is None else target[at - start : at - start + size]
        try:
            nbytes = os.preadv(handle, [block], at)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} can't be read: {error.strerror}") from error
        if not nbytes:
            raise DamagedCheckpoint(f"{name} ended while it was read")
        checksum.update(block[:nbytes])
        at += nbytes
    return checksum.hexdigest()
