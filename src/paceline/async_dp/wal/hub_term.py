"""Term of a hub: raised by every take-over, so that an older hub of the same run is recognised.

term.json in the hub's folder; while a standby copies an active hub into a folder, standby.json is there instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.async_dp.wal.durable_files import disk_errors, read_checked_file, write_checked_file
from paceline.errors import DamagedCheckpoint

__all__ = ["HubTerm", "StandbyMark"]

_T = TypeVar("_T")

_TERM_FILE, _STANDBY_FILE = "term.json", "standby.json"


class HubTerm(msgspec.Struct, frozen=True):
    """Term of a hub.

    Attributes:
        number: counts take-overs, from 1.
        since: number of the record with which it began; earlier records are those of the hub before.
        superseded_by: term of the hub that took over from this one; 0: none.
    """

    number: int = 1
    since: int = 0
    superseded_by: int = 0

    @staticmethod
    def read(folder: Path) -> HubTerm:
        """Return the term of the hub in a folder, the first one if nothing was written.

        Raises:
            DamagedCheckpoint: the file is damaged.
        """
        return _read(folder / _TERM_FILE, HubTerm) or HubTerm()

    def write(self, folder: Path) -> None:
        """Write it; it is on disk when this returns.

        Raises:
            CheckpointError: it can't be written.
        """
        _write(folder / _TERM_FILE, self)


class StandbyMark(msgspec.Struct, frozen=True):
    """Mark of a folder that is a standby's copy.

    Attributes:
        run: name of the run; empty: the active hub was never reached.
        term: of the active hub.
        in_sync: whether nothing was acknowledged to a worker that is not in the copy, when that was known last.
    """

    run: str = ""
    term: int = 0
    in_sync: bool = False

    @staticmethod
    def read(folder: Path) -> StandbyMark | None:
        """Return the mark of a folder, None if it has none.

        Raises:
            DamagedCheckpoint: the file is damaged.
        """
        return _read(folder / _STANDBY_FILE, StandbyMark)

    def write(self, folder: Path) -> None:
        """Write it; it is on disk when this returns.

        Raises:
            CheckpointError: it can't be written.
        """
        _write(folder / _STANDBY_FILE, self)

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the mark, if there is one."""
        (folder / _STANDBY_FILE).unlink(missing_ok=True)


def _read(path: Path, type: type[_T]) -> _T | None:
    try:
        return msgspec.convert(read_checked_file(path), type)
    except FileNotFoundError:
        return None
    except (DamagedCheckpoint, msgspec.ValidationError) as error:
        raise DamagedCheckpoint(
            f"{str(path)!r} can't be read: {error}", remedy="restore it from a copy"
        ) from error


def _write(path: Path, value: msgspec.Struct) -> None:
    with disk_errors(path, "free disk space, then try again"):
        write_checked_file(path, msgspec.to_builtins(value))
