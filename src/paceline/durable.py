"""Files that outlive a crash: what is written has reached the disk, and is whole, old or new, at every instant."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["flush", "write_text", "write_whole"]


def flush(path: Path) -> None:
    """Wait until `path`, a file or a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
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
        flush(beside)
        os.replace(beside, path)
    flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Give the file at `path` this text; see `write_whole`."""
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
