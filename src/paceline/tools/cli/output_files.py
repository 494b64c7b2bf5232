"""Files that a command will write, checked before it measures: nothing measured shall be lost.

What commands that write a profile share: the file is checked first, then gains their entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.cost_model.profile import Profile

__all__ = ["check_writable", "checked_files", "load_or_new", "now"]

W = TypeVar("W", bound=Callable[..., Any])


_REMEDY = "name a file in a folder that you may write to"


def check_writable(path: Path, option: str = "", *, make_folder: bool = False) -> None:
    """Refuse a file that can't be written.

    Args:
        path: the file.
        option: the one that named it, for the message.
        make_folder: make its folder rather than refuse one that is absent.

    Raises:
        UsageError: `path` is no ordinary file or may not be written, or its folder is absent or can't be made.
    """
    folder, told = path.absolute().parent, f"{option} {path}".lstrip()
    try:
        if make_folder:
            folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise UsageError(f"can't write {told}: no such folder", remedy=f"make {folder} first")
        if path.is_dir():
            raise UsageError(f"can't write {told}: it is a folder", remedy=_REMEDY)
        if path.exists() and not path.is_file():  # a device or a pipe would be replaced, not written to
            raise UsageError(f"can't write {told}: it is no ordinary file", remedy=_REMEDY)
        # It is written beside its place and put there once it is whole, so its folder counts too.
        if not all(os.access(each, os.W_OK) for each in (folder, path) if each.exists()):
            raise UsageError(f"can't write {told}: no permission", remedy=_REMEDY)
    except OSError as error:
        raise UsageError(f"can't write {told}: {error.strerror}", remedy=_REMEDY) from error


def checked_files(
    json_file: Path | None, write_json: W, out: Path | None, writer_of_name: Mapping[str, W]
) -> dict[Path, W]:
    """Return what writes which files, once it is clear that they can be written.

    Args:
        json_file: the file of ``--json``; None: not asked for. write_json: writes it.
        out: the folder of ``--out``, made where it is absent; None: not asked for.
        writer_of_name: what writes the files in it, charts among them.

    Raises:
        UsageError: a file can't be written, or charts can't be drawn.
    """
    writer_of: dict[Path, W] = {}
    if json_file is not None:
        check_writable(json_file, "--json")
        writer_of[json_file] = write_json
    if out is not None:
        from paceline.tools.report.charts.chart_style import require_matplotlib

        require_matplotlib()
        in_folder = {out / name: writer for name, writer in writer_of_name.items()}
        for path in in_folder:
            check_writable(path, "--out", make_folder=True)
        writer_of |= in_folder
    return writer_of


def load_or_new(path: Path) -> Profile:
    """Return the profile in a file that will be written, or a new one if it is not there yet.

    Raises:
        UsageError: it can't be written, or holds something else.
    """
    from paceline.cost_model.profile import Profile

    check_writable(path, "--profile", make_folder=True)
    return Profile.load(path) if path.exists() else Profile()


def now() -> str:
    """Return the time of day as a profile says it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
