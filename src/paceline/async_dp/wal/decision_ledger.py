"""The ledger: the plain values of every record of a run, a line of JSON each, for people and the report.

Lines are written after their records have reached the disk, and are not waited for. So a line is proof that its record
was there; and after a crash lines may be missing, or the last be cut off, until the hub opens the folder again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.async_dp.wal.hub_folder import LEDGER, write_at
from paceline.errors import DamagedCheckpoint

__all__ = ["DecisionLedger", "LedgerStatus", "read_ledger", "ledger_status"]

_LONGEST_LINE_NBYTES = 1 << 20
"""The values of a record take 64 KiB, and six times as much in JSON at the most."""


def read_ledger(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the values of the records of a run in order, with their numbers as ``"n"``; a hub may be writing them.

    Args:
        folder: of the hub. Where it has no ledger yet, there are no records.

    Raises:
        DamagedCheckpoint: a line before the last is none of a ledger; the message says which.
    """
    path = Path(folder, LEDGER)
    try:
        file = open(path, "rb")  # noqa: SIM115 — closed below
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # it is being written, or a hub died as it was
            values = _values_of(line)
            if values is None:
                raise DamagedCheckpoint(
                    f"line {number} of {str(path)!r} can't be read: {line[:60]!r}",
                    remedy="resume the run, which repairs what it can; or remove that line",
                )
            yield values


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """What a ledger holds.

    Attributes:
        last: number of the record of its last line that is in order; −1: there is none.
        end: where that line ends.
        told: the largest number in a line, however much before it is not in order.
        bad_line: the first line that is not in order, from 1 where reading began; 0: there is none.
    """

    last: int = -1
    end: int = 0
    told: int = -1
    bad_line: int = 0


def ledger_status(path: Path, base: int, place: int = 0) -> LedgerStatus:
    """Return what the ledger at `path` holds; nothing if there is none.

    A line is in order if its record follows that of the line before. A gap is let pass where the journal could not
    fill it: a ledger that was removed begins anew later.

    Args:
        path: the file.
        base: the journal has the records from this number on.
        place: where the line of the record `base` begins, if it was noted; what is before need not be read then.

    Raises:
        OSError: it can't be read.
    """
    if not path.exists():
        return LedgerStatus()
    with open(path, "rb") as file:
        if place and _number_before(file, place) == base - 1:
            file.seek(place)
            return _standing(file, base, LedgerStatus(base - 1, place, base - 1))
        file.seek(0)
        return _standing(file, base, LedgerStatus())


def _standing(file: BinaryIO, base: int, known: LedgerStatus) -> LedgerStatus:
    """Read on in a ledger from where it is known to be in order."""
    last, end, told, bad, before, at = known.last, known.end, known.told, 0, known.last, known.end
    for number, line in enumerate(file, 1):
        at += len(line)
        n = _number_of(line)
        if n == before + 1 or last < n <= base:
            told = max(told, n)
            if not bad and line.endswith(b"\n"):
                last, end, before = n, at, n
                continue
        bad, before = bad or number, n
    return LedgerStatus(last, end, told, bad)


def _number_before(file: BinaryIO, place: int) -> int:
    """Return the number in the line that ends at `place`; −1 if none does."""
    start = max(0, place - _LONGEST_LINE_NBYTES)
    file.seek(start)
    data = file.read(place - start)
    if len(data) < place - start or not data.endswith(b"\n"):
        return -1
    return _number_of(data[data.rfind(b"\n", 0, -1) + 1 :])


def _number_of(line: bytes) -> int:
    values = _values_of(line)
    return values["n"] if values else -1


def _values_of(line: bytes) -> dict[str, Any] | None:
    """Return the values in a line, None if it is no line of a ledger."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or type(values.get("n")) is not int or values["n"] < 0:
        return None
    return values


class DecisionLedger:
    """A ledger that is being written.

    Args:
        path: the file; it is made if it is not there.
        end: where its last line ends; what is behind is cut off.

    Attributes:
        path, end: as above.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, path: Path, end: int) -> None:
        self.path, self.end = path, end
        self._waiting: list[bytes] = []
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.ftruncate(self._handle, end)
        except OSError:
            os.close(self._handle)
            raise

    @property
    def waiting(self) -> int:
        """How many lines are not written."""
        return len(self._waiting)

    def add(self, line: bytes) -> None:
        """Have a line wait, which ends as lines do."""
        self._waiting.append(line)

    def write(self) -> None:
        """Write the lines that wait.

        Raises:
            OSError: they can't be written, and go on waiting.
        """
        if not self._waiting:
            return
        data = b"".join(self._waiting)
        try:
            write_at(self._handle, [data], self.end)
        except OSError:
            with contextlib.suppress(OSError):  # what stays is written over
                os.ftruncate(self._handle, self.end)
            raise
        self.end += len(data)
        self._waiting = []

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        os.fdatasync(self._handle)

    def close(self) -> None:
        """Close the file; what waits is lost."""
        os.close(self._handle)
