"""Files that a command will write, checked before it measures: nothing measured shall be lost."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import UsageError

__all__ = ["check_writable"]

_REMEDY = "name a file in a folder that you may write to"


def check_writable(path: Path, option: str = "", *, make_folder: bool = False) -> None:
    """Refuse a file that can't be written.

    Args:
        path: the file.
        option: the one that named it, for the message.
        make_folder: make its folder rather than refuse one that is absent.

    Raises:
        UsageError: `path` is a folder or may not be written, or its folder is absent or can't be made.
    """
    folder, told = path.absolute().parent, f"{option} {path}".lstrip()
    if make_folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"can't write {told}: {error.strerror}", remedy=_REMEDY) from error
    if not folder.is_dir():
        raise UsageError(f"can't write {told}: no such folder", remedy=f"make {folder} first")
    if path.is_dir():
        raise UsageError(f"can't write {told}: it is a folder", remedy=_REMEDY)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"can't write {told}: no permission", remedy=_REMEDY)
