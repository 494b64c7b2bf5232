"""Reads tensors from the files of a checkpoint after comparing their checksums with the manifest.

Offsets come from the manifest, which is validated; a file's header is only hashed. Several threads read runs of
tensors: a single one would wait for the disk while it could hash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from paceline.checkpoint.format.manifest import StoredTensor, TensorFile
from paceline.errors import DamagedCheckpoint

__all__ = ["VerifiedReader"]

_BLOCK_NBYTES = 1 << 20
_RUN_NBYTES = 32 << 20
_THREADS = 4


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
