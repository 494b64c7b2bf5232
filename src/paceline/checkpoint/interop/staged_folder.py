"""Folders that appear once all of their files are complete."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline._core.files import fsync, make_private_folder
from paceline.errors import UsageError

__all__ = ["staged_folder"]


@contextmanager
def staged_folder(target: Path, *, last: str = "") -> Iterator[Path]:
    """Yield an empty folder, whose files become those of `target` once the block has ended without an error.

    A new folder appears with all of its files. Files are added to an existing one, `last` as the last of them.

    Args:
        target: the folder; it may exist, but must not have any of the files.
        last: name of the file without which the others count for nothing.

    Raises:
        UsageError: the folder can't be written.
    """
    staging = (target if target.is_dir() else target.parent) / f".{target.name}.tmp-{uuid.uuid4().hex[:12]}"
    try:
        make_private_folder(staging)
        yield staging
        fsync(staging)
        if target.is_dir():
            for file in sorted(staging.iterdir(), key=lambda file: file.name == last):
                os.replace(file, target / file.name)
            fsync(target)
        else:
            os.rename(staging, target)
        fsync(target.parent)
    except OSError as error:
        raise UsageError(
            f"can't write {str(target)!r}: {error.strerror or error}",
            remedy="name a folder that you may write to, with enough room",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
