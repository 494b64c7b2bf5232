"""The ledger: the plain values of every record of a run as a line of JSON, for people and reports.

Lines are written after their records have reached the disk, without waiting for them. So a line proves that its record
was there; after a crash lines may be missing, or the last be cut off, until the hub opens the folder again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.async_dp.wal.hub_folder import LEDGER
from paceline.errors import DamagedCheckpoint

__all__ = ["LedgerStatus", "ledger_status", "read_ledger"]

_MAX_LINE_NBYTES = 1 << 20  # values take 64 KiB at most, and up to six times as much in JSON


def read_ledger(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the values of a run's records in order, with their numbers as ``"n"``; a hub may be writing them.

    Args:
        folder: of the hub; without a ledger there are no records.

    Raises:
        DamagedCheckpoint: a line before the last is not one of a ledger; names it.
    """
    path = Path(folder, LEDGER)
    try:
        file = open(path, "rb")  # noqa: SIM115 — closed below
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # being written, or cut off by a crash
            values = _parse(line)
            if values is None:
                raise DamagedCheckpoint(
                    f"line {number} of {str(path)!r} can't be read: {line[:60]!r}",
                    remedy="resume the run, which repairs the ledger where it can; or remove that line",
                )
            yield values


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """State of a ledger.

    Attributes:
        last: number of the record of the last line that is in order; −1: none.
        end: end of that line, in bytes.
        highest: largest record number in any line; −1: none.
        bad_line: first line that is not in order, from 1 where reading started; 0: none.
    """

    last: int = -1
    end: int = 0
    highest: int = -1
    bad_line: int = 0


def ledger_status(path: Path, base: int, offset: int = 0) -> LedgerStatus:
    """Check a ledger; without a file it is empty.

    A line is in order if its record follows that of the line before. A gap is accepted where the journal can't fill it:
    a ledger that was removed starts later.

    Args:
        path: the file.
        base: number of the first record in the journal.
        offset: start of the line of record `base`, if known; what is before need not be read then.

    Raises:
        OSError: it can't be read.
    """
    if not path.exists():
        return LedgerStatus()
    with open(path, "rb") as file:
        if offset and _number_before(file, offset) == base - 1:
            file.seek(offset)
            return _check_lines(file, base, base - 1, offset)
        file.seek(0)
        return _check_lines(file, base, -1, 0)


def _check_lines(file: BinaryIO, base: int, last: int, end: int) -> LedgerStatus:
    """Check the rest of a ledger that is in order up to `end`, the line of record `last`."""
    highest, bad_line, previous, at = last, 0, last, end
    for line_number, line in enumerate(file, 1):
        at += len(line)
        number = _number_of(line)
        if number == previous + 1 or last < number <= base:
            highest = max(highest, number)
            if not bad_line and line.endswith(b"\n"):
                last, end, previous = number, at, number
                continue
        bad_line, previous = bad_line or line_number, number
    return LedgerStatus(last, end, highest, bad_line)


def _number_before(file: BinaryIO, offset: int) -> int:
    """Return the record number in the line that ends at `offset`; −1 if none does."""
    start = max(0, offset - _MAX_LINE_NBYTES)
    file.seek(start)
    data = file.read(offset - start)
    if len(data) < offset - start or not data.endswith(b"\n"):
        return -1
    return _number_of(data[data.rfind(b"\n", 0, -1) + 1 :])


def _number_of(line: bytes) -> int:
    values = _parse(line)
    return values["n"] if values else -1


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line, None if it is not one of a ledger."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or type(values.get("n")) is not int or values["n"] < 0:
        return None
    return values
