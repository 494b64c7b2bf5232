"""Files that survive a crash: written atomically (old or new, never partial) and flushed to disk.

[Note: private files] Weights, and what reveals them, are for their owner alone, whatever the umask: files 0600, folders
0700. A folder with the setgid bit (``chgrp team runs; chmod g+s runs``) is shared with its group: what is made in it
has the permissions that the folder gives the group, and sub-folders inherit the bit. What exists keeps its permissions.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "EarlyFlush",
    "fsync",
    "make_private_folder",
    "open_private",
    "write_atomic",
    "write_bytes",
    "write_json",
    "write_text",
]

_EARLY_NBYTES = 8 << 20  # between two early flushes
_SYNC_FILE_RANGE_WRITE = 2


def fsync(path: Path) -> None:
    """Wait until `path`, a file or a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, and return its descriptor; a new file is private, see [Note: private files]. Fits `open`'s opener.

    Raises:
        OSError: it can't be opened.
    """
    try:
        handle = os.open(path, flags | os.O_EXCL if flags & os.O_CREAT else flags, 0o600)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        return os.open(path, flags & ~os.O_CREAT)
    if flags & os.O_CREAT and (shared := _group_mode(Path(path).parent)):
        os.fchmod(handle, 0o600 | shared & 0o060)
    return handle


def make_private_folder(path: Path) -> None:
    """Make a folder, and its parents where they are missing; it is private, see [Note: private files].

    Raises:
        OSError: it can't be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    if shared := _group_mode(path.parent):
        path.chmod(stat.S_ISGID | 0o700 | shared)


def _group_mode(folder: Path) -> int:
    """Return the permissions that a folder grants its group if it is shared with it, else 0."""
    mode = folder.stat().st_mode
    return mode & 0o070 if mode & stat.S_ISGID else 0


def write_atomic(path: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Replace the file at `path` by one that `write` makes, once that is complete and on disk.

    Args:
        path: the file, whose folder exists; its permissions are kept.
        write: writes a file to the path that it is passed, in a temporary folder and with the same name.
        private: make a new file private, see [Note: private files].

    Raises:
        OSError: it can't be written; the old file is kept.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        write(temporary)
        if path.exists():
            shutil.copymode(path, temporary)
        elif private:
            temporary.chmod(0o600 | _group_mode(path.parent) & 0o060)
        fsync(temporary)
        os.replace(temporary, path)
    fsync(path.parent)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write text to `path`, see `write_atomic`."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), private=private)


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write bytes to `path`, see `write_atomic`."""
    write_atomic(path, lambda temporary: temporary.write_bytes(content), private=private)


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
