"""Program of a rank that `paceline.launch_notebook` starts; its argument is the folder that connects them."""

from __future__ import annotations

import linecache
import os
import pickle
import stat
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

__all__ = ["FailedCall", "NotebookCall", "main", "read_pickle"]


@dataclass(frozen=True)
class NotebookCall:
    """What the ranks do.

    Attributes:
        packed: function and arguments.
        cells: lines of the notebook's cells, by the file names in their code.
    """

    packed: bytes
    cells: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class FailedCall:
    """How a rank failed.

    Attributes:
        time: when, in unix seconds.
        summary: type and message of the exception.
        traceback: its text.
        packed: the exception; empty if it can't be pickled.
    """

    time: float
    summary: str
    traceback: str
    packed: bytes

    @classmethod
    def of(cls, error: BaseException) -> FailedCall:
        """Return the record of an exception that left the function."""
        import cloudpickle

        inner = error.__traceback__.tb_next if error.__traceback__ else None  # without this program's frame
        text = "".join(traceback.format_exception(type(error), error, inner))
        try:
            packed = cloudpickle.dumps(error)
        except Exception:  # noqa: BLE001 — whatever the exception holds: its text is there
            packed = b""
        return cls(
            time.time(), "".join(traceback.format_exception_only(type(error), error)).strip(), text, packed
        )

    @classmethod
    def read(cls, folder: Path, rank: int) -> FailedCall | None:
        """Return the record of a rank, None if it left none."""
        path = folder / f"failed{rank}"
        return read_pickle(path) if path.exists() else None

    def exception(self) -> BaseException | None:
        """Return the exception; None if it can't be read in this process."""
        try:
            return pickle.loads(self.packed) if self.packed else None
        except Exception:  # noqa: BLE001 — an exception class may take other arguments than it keeps
            return None


def read_pickle(path: Path) -> Any:
    """Return the object in a file of the folder that connects the processes.

    Reading a pickle executes what it says, so nobody else may be able to write it.

    Raises:
        UsageError: the file or its folder belongs to another user, or others can use it.
    """
    with open(path, "rb") as file:
        for name, status in ((path.parent, path.parent.lstat()), (path, os.fstat(file.fileno()))):
            closed = status.st_mode & (0o077 if stat.S_ISDIR(status.st_mode) else 0o022) == 0
            if status.st_uid != os.geteuid() or not closed or stat.S_ISLNK(status.st_mode):
                raise UsageError(
                    f"{name} is not this user's alone, so it is not read",
                    remedy="set TMPDIR to a folder of your own; nothing else may change what is in it",
                )
        return pickle.load(file)


def main(folder: Path, rank: int) -> int:
    """Call the function, write its result (rank 0) or how it failed, and return the exit status."""
    import cloudpickle

    from paceline.world import shutdown

    try:
        call: NotebookCall = read_pickle(folder / "call")
        for name, lines in call.cells.items():
            linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
        function, args = pickle.loads(call.packed)
        result = function(*args)
        if rank == 0:
            (folder / "result").write_bytes(cloudpickle.dumps(result))
        shutdown()
    except BaseException as error:  # noqa: BLE001 — the notebook shows it
        (folder / f"failed{rank}").write_bytes(pickle.dumps(FailedCall.of(error)))
        return 1
    return 0


if __name__ == "__main__":
    # The notebook's classes are of the module __main__, too; the records above must not be.
    from paceline.launch.process import notebook_rank

    sys.exit(notebook_rank.main(Path(sys.argv[1]), int(os.environ["RANK"])))
