"""Files that outlive a crash: what is written has reached the disk, and is whole at every instant."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["flush", "replace_text"]


def flush(path: Path) -> None:
    """Wait until `path`, a file or a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Give the file at `path` new content; at every instant it is whole, old or new, for other processes too.

    Raises:
        OSError: it can't be written; the old content stays.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    beside = Path(name)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), _mode(path))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush(path.parent)


def _mode(path: Path) -> int:
    """Return the permissions of the file, or of a new one: a temporary file may be read by its owner alone."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask
