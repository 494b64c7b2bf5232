"""Files that outlive a crash: what is written has reached the disk, and is whole, old or new, at every instant."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["EarlyFlush", "fsync", "write_atomic", "write_json", "write_text"]


def fsync(path: Path) -> None:
    """Wait until `path`, a file or a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file beside its place, and put it there once it is complete and on disk.

    Args:
        path: the file, whose folder exists; its permissions stay.
        write: writes to the path that it is given, which has the name of `path` in another folder.

    Raises:
        OSError: it can't be written; what was there stays.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        beside = Path(folder, path.name)
        write(beside)
        if path.exists():
            shutil.copymode(path, beside)
        fsync(beside)
        os.replace(beside, path)
    fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Give the file at `path` this text; see `write_atomic`."""
    write_atomic(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object, *, indent: int | None = 1) -> None:
    """Give the file at `path` this value as JSON; see `write_atomic`.

    Raises:
        ValueError: a number of it is NaN or infinite, which JSON doesn't have.
    """
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


class EarlyFlush:
    """Writes to an open file and has the disk begin at once, so that waiting for it at the end is short.

    Linux would let what is written lie in memory for a while (sync_file_range(2), SYNC_FILE_RANGE_WRITE). Elsewhere
    this is an ordinary write. It is no promise: `os.fsync` is still to be called.

    Args:
        handle: of the file, at its beginning.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._at, self._begun = 0, 0

    def write(self, block: memoryview) -> int:
        """Write a part of `block`, and return how many bytes those were."""
        nbytes = os.write(self._handle, block)
        self._at += nbytes
        if self._at - self._begun >= _EARLY_NBYTES:
            _begin_to_flush(self._handle, self._begun, self._at - self._begun)
            self._begun = self._at
        return nbytes


_EARLY_NBYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2


def _begin_to_flush(handle: int, start: int, nbytes: int) -> None:
    call = _sync_file_range()
    if call is not None:
        call(handle, start, nbytes, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
