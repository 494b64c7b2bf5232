"""Tensors from the files of a checkpoint, none of which is used before its checksum fits.

The manifest says where everything is, and its offsets are checked; what a file's header says is not asked, only its
checksum. Files are read in stretches by several threads: a single one waits for the disk where it could sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from paceline.checkpoint.format.manifest import StoredObject, TensorFile
from paceline.errors import DamagedCheckpoint

__all__ = ["VerifiedReader"]

_BLOCK_NBYTES = 1 << 20
_STRETCH_NBYTES = 32 << 20
_THREADS = 4


class VerifiedReader:
    """The tensors of a checkpoint's files.

    Args:
        folder: where the files are.
        files: what the manifest told of them.
    """

    def __init__(self, folder: Path, files: Mapping[str, TensorFile]) -> None:
        self._folder, self._files = folder, files
        self._maps: dict[str, np.memmap] = {}
        self._read: dict[tuple[str, str], Tensor] = {}

    def check(self, names: Iterable[str], *, keep: Iterable[str] = ()) -> None:
        """Read the files `names` whole, and compare sizes and checksums with what the manifest told.

        Args:
            names: files.
            keep: those of them whose tensors are kept in memory.

        Raises:
            DamagedCheckpoint: they differ, or can't be read; the message names the file, and the tensor that differs.
        """
        kept = set(keep)
        handles: dict[str, int] = {}
        try:
            for name in names:
                handles[name] = self._open(name)
            with ThreadPoolExecutor(_THREADS) as pool:
                jobs: list[Callable[[], None]] = [
                    lambda name=name, stretch=stretch: self._check_stretch(
                        handles[name], name, stretch, keep=name in kept
                    )
                    for name in handles
                    for stretch in _stretches(self._files[name].tensors)
                ]
                jobs += [lambda name=name: self._check_header(handles[name], name) for name in handles]
                for done in [pool.submit(job) for job in jobs]:
                    done.result()
        finally:
            for handle in handles.values():
                os.close(handle)

    def tensor(self, file: str, label: str) -> Tensor:
        """Return a tensor: from memory where it is kept there, else mapped, so that what is not touched is not read.

        To write to it changes no file.

        Raises:
            KeyError: there is none.
        """
        if (file, label) in self._read:
            return self._read[file, label]
        one = self._files[file].tensors[label]
        if one.start == one.stop:
            return _empty(one)
        if file not in self._maps:
            self._maps[file] = np.memmap(self._folder / file, np.uint8, mode="c")
        part = torch.from_numpy(self._maps[file][one.start : one.stop])
        return part.view(getattr(torch, one.dtype)).view(one.shape)

    # ------------------------------------------------------------------ reading

    def _open(self, name: str) -> int:
        try:
            handle = os.open(self._folder / name, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name} is missing") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{name} can't be read: {error.strerror}") from error
        size, told = os.fstat(handle).st_size, self._files[name].nbytes
        if size != told:
            os.close(handle)
            raise DamagedCheckpoint(f"{name} has {size} bytes, should have {told}")
        return handle

    def _check_header(self, handle: int, name: str) -> None:
        file = self._files[name]
        buffer = memoryview(bytearray(min(_BLOCK_NBYTES, file.header_nbytes)))
        checksum = _summed(handle, name, 0, file.header_nbytes, lambda start, nbytes: buffer[:nbytes])
        self._compare(checksum, file.header_checksum, name, "the header")

    def _check_stretch(
        self, handle: int, name: str, stretch: Sequence[tuple[str, StoredObject]], *, keep: bool
    ) -> None:
        """Compare the checksums of neighbouring tensors."""
        buffer = memoryview(bytearray(0 if keep else _BLOCK_NBYTES))
        for label, one in stretch:
            if keep:
                self._read[name, label] = tensor = _empty(one)
                flat: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
                whole = memoryview(flat)
                checksum = _summed(
                    handle, name, one.start, one.stop, lambda at, n, whole=whole: whole[at : at + n]
                )
            else:
                checksum = _summed(handle, name, one.start, one.stop, lambda at, n: buffer[:n])
            self._compare(checksum, one.checksum, name, f"tensor {label!r}")

    def _compare(self, found: str, told: str, name: str, what: str) -> None:
        if found != told:
            raise DamagedCheckpoint(f"{name}: the checksum of {what} does not fit")


def _empty(one: StoredObject) -> Tensor:
    return torch.empty(one.shape, dtype=getattr(torch, one.dtype))


def _stretches(tensors: Mapping[str, StoredObject]) -> Iterator[list[tuple[str, StoredObject]]]:
    """Yield the tensors of a file in runs of neighbours, each about as long as the others."""
    run: list[tuple[str, StoredObject]] = []
    for label, one in tensors.items():
        run.append((label, one))
        if one.stop - run[0][1].start >= _STRETCH_NBYTES:
            yield run
            run = []
    if run:
        yield run


def _summed(handle: int, name: str, start: int, stop: int, place: Callable[[int, int], memoryview]) -> str:
    """Read the bytes start … stop - 1 and return their checksum.

    Args:
        handle, name: the file.
        start, stop: in the file.
        place: returns where to put so many bytes that begin at an offset from `start`.

    Raises:
        DamagedCheckpoint: the file ends before, or can't be read.
    """
    checksum, at = xxh3_64(), start
    while at < stop:
        block = place(at - start, min(_BLOCK_NBYTES, stop - at))
        try:
            nbytes = os.preadv(handle, [block], at)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} can't be read: {error.strerror}") from error
        if not nbytes:
            raise DamagedCheckpoint(f"{name} ended while it was read")
        checksum.update(block[:nbytes])
        at += nbytes
    return checksum.hexdigest()
