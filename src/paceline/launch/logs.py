"""The files of the ranks of a run: where they write, and in which they are asked to leave."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

__all__ = ["Logs"]


class Logs:
    """Files of one host, as long as a with-statement lasts; logs in a folder that was named, for good.

    Rank 0 writes to the terminal. Logs of the first start are ``rank<k>.log``, those after restart n
    ``restart<n>/rank<k>.log``.

    Args:
        folder: where logs go; None: kept only to explain a failure.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def __enter__(self) -> Logs:
        self._private = Path(tempfile.mkdtemp(prefix="paceline-run-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._private, ignore_errors=True)

    def leave_file(self, local_rank: int) -> Path:
        """Return the file in which a rank is asked to leave (`paceline.orderly`)."""
        return self._private / f"leave{local_rank}"

    def of(self, rank: int, restart: int) -> Path | None:
        """Return the file for a rank after so many restarts, None for the terminal; its folder is made."""
        if rank == 0:
            return None
        base = self._folder or self._private
        folder = base / f"restart{restart}" if restart else base
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank{rank}.log"
