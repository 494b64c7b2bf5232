"""Result files that are whole, old or new, at every instant."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_text", "write_whole"]


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file beside `path`, and put it in its place once it is complete and on disk.

    Args:
        path: the file, whose folder exists.
        write: writes to the path that it is given, which has the suffix of `path`.
    """
    beside = path.with_name(f".{path.stem}-{os.getpid()}.tmp{path.suffix}")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Give the file at `path` this text."""
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))
