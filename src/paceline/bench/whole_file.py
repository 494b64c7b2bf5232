"""Result files that are whole, old or new, at every instant."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_text", "write_whole"]


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file beside its place, and put it there once it is complete and on disk.

    Args:
        path: the file, whose folder exists.
        write: writes to the path that it is given, which has the name of `path` in another folder.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        beside = Path(folder, path.name)
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)


def write_text(path: Path, text: str) -> None:
    """Give the file at `path` this text."""
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
