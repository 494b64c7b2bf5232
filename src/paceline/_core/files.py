"""Files that survive a crash: written atomically (old or new, never partial) and flushed to disk."""

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

_EARLY_NBYTES = 8 << 20  # between two early flushes
_SYNC_FILE_RANGE_WRITE = 2


def fsync(path: Path) -> None:
    """Wait until `path`, a file or a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Replace the file at `path` by one that `write` makes, once that is complete and on disk.

    Args:
        path: the file, whose folder exists; its permissions are kept.
        write: writes a file to the path that it is passed, in a temporary folder and with the same name.

    Raises:
        OSError: it can't be written; the old file is kept.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        write(temporary)
        if path.exists():
            shutil.copymode(path, temporary)
        fsync(temporary)
        os.replace(temporary, path)
    fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write text to `path`, see `write_atomic`."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object, *, indent: int | None = 1) -> None:
    """Write a value as JSON to `path`, see `write_atomic`.

    Raises:
        ValueError: a number is NaN or infinite, which JSON lacks.
    """
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


class EarlyFlush:
    """Writes to an open file and starts flushing early, so that the final `os.fsync` is short.

    Linux would keep written data in memory for a while (sync_file_range(2), SYNC_FILE_RANGE_WRITE). On other systems
    this is an ordinary write.

    Args:
        handle: the file's descriptor, at its beginning.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._at, self._begun = 0, 0

    def write(self, block: memoryview) -> int:
        """Write a part of `block`, and return its number of bytes."""
        nbytes = os.write(self._handle, block)
        self._at += nbytes
        if self._at - self._begun >= _EARLY_NBYTES:
            if (flush := _sync_file_range()) is not None:
                flush(self._handle, self._begun, self._at - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._at
        return nbytes


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
