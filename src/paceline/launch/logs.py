"""Where the ranks of a run write: rank 0 to the terminal, each other one to a file of its own for every start."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

__all__ = ["Logs"]


class Logs:
    """Log files of one host, as long as a with-statement lasts or, in a folder that was named, for good.

    Those of the first start are ``rank<k>.log``, those after restart n ``restart<n>/rank<k>.log``.

    Args:
        folder: where; None: kept only to explain a failure.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __enter__(self) -> Logs:
        self._private = None if self._folder else Path(tempfile.mkdtemp(prefix="paceline-run-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)

    def of(self, rank: int, restart: int) -> Path | None:
        """Return the file for a rank after so many restarts, None for the terminal; its folder is made."""
        if rank == 0:
            return None
        base = self._folder or self._private
        assert base is not None
        folder = base / f"restart{restart}" if restart else base
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank{rank}.log"
