"""Journal of finished rows, from which an interrupted measurement is resumed; which cases are finished.

The journal is a file of JSON lines: a head with settings and machine, then a row per line. A row is on disk before the
next case begins; a last line that was cut off is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.tools.bench.collectives.collectives_cases import CollectiveCase
from paceline.tools.bench.collectives.collectives_rows import CollectiveRow, RowKey
from paceline.tools.bench.collectives.collectives_tables import list_differences

__all__ = ["RowJournal", "is_finished", "ordered_rows", "row_keys"]


_KIND = "bench-collectives-journal"


def row_keys(case: CollectiveCase, dtype: str) -> list[RowKey]:
    """Return the keys of a case's rows."""
    return [(backend, case.op, case.ranks, case.nbytes, dtype) for backend in case.backends]


def is_finished(case: CollectiveCase, dtype: str, kept: Iterable[RowKey]) -> bool:
    """Return whether all rows of a case are kept."""
    return set(row_keys(case, dtype)) <= set(kept)


def ordered_rows(
    cases: Iterable[CollectiveCase], dtype: str, rows: Iterable[CollectiveRow]
) -> list[CollectiveRow]:
    """Return the latest row for each key, in the order of the cases."""
    by_key = {row.key: row for row in rows}
    return [by_key[key] for case in cases for key in row_keys(case, dtype) if key in by_key]


class RowJournal:
    """Journal of finished rows.

    Args:
        path: the file; nothing is read or written yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        """Start an empty journal of a measurement with these settings on this machine."""
        self.path.write_bytes(b"")
        self._append([{"kind": _KIND, "schema": 1, "settings": dict(settings), "machine": dict(machine)}])

    def resume(self, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> list[CollectiveRow]:
        """Drop a line that was cut off and return the finished rows.

        Raises:
            UsageError: the file is not a journal, or has other settings or another machine; names them.
        """
        head, rows = self._read()
        for what, ours in (("settings", settings), ("machine", machine)):
            differing = list_differences(json.loads(json.dumps(ours)), head.get(what, {}))
            if differing:
                raise UsageError(
                    f"{self.path} was begun with other {what}: {'; '.join(differing)}",
                    remedy=f"give the same ones, or remove {self.path} and start without --resume",
                )
        whole = b"".join(line + b"\n" for line in self._whole_lines())
        with self.path.open("r+b") as file:
            file.truncate(len(whole))
        return rows

    def rows(self) -> list[CollectiveRow]:
        """Return the finished rows.

        Raises:
            UsageError: the file is not a journal.
        """
        return self._read()[1]

    def append(self, rows: Iterable[CollectiveRow]) -> None:
        """Add finished rows; they are on disk when this returns."""
        self._append(row.to_json() for row in rows)

    def _append(self, records: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def _whole_lines(self) -> list[bytes]:
        return self.path.read_bytes().split(b"\n")[:-1]

    def _read(self) -> tuple[dict[str, Any], list[CollectiveRow]]:
        try:
            head, *others = [json.loads(line) for line in self._whole_lines()]
            if head["kind"] == _KIND and head["schema"] == 1:
                return head, [CollectiveRow.from_json(record, str(self.path)) for record in others]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path} can't be read as a journal: {error}", remedy="remove it"
            ) from error
        raise UsageError(
            f"{self.path} is not a journal of this version", remedy="remove it, or name another file"
        )
