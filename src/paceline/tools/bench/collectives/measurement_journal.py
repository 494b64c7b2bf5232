"""The rows that are finished, kept line by line while a measurement goes on, so that it can be taken up again.

The first line tells what is measured and where, every other one is a row (JSON lines). A line is on disk before the
next case begins. What was being written when the machine stopped is a last line without its end; it is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.tools.bench.collectives.collectives_rows import Row

__all__ = ["Journal", "differences"]

_KIND = "bench-collectives-journal"


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return in words what two records of plain values say differently.

    Example:
        >>> differences({"dtype": "int32", "warmup": 2}, {"dtype": "float32", "warmup": 2})
        ["dtype: 'int32' against 'float32'"]
    """
    names = list(dict.fromkeys([*ours, *theirs]))
    return [
        f"{name}: {ours.get(name)!r} against {theirs.get(name)!r}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


class Journal:
    """A file of finished rows.

    Args:
        path: the file; nothing is read or written yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        """Start an empty journal of a measurement with these settings on this machine."""
        head = {"kind": _KIND, "schema": 1, "settings": dict(settings), "machine": dict(machine)}
        self.path.write_bytes(b"")
        self._append([head])

    def resume(self, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> list[Row]:
        """Return the finished rows, and be ready for more.

        Raises:
            UsageError: the file is no journal, or of other settings or another machine; the message names them.
        """
        head, rows = self._read()
        for what, ours in (("settings", settings), ("machine", machine)):
            differing = differences(json.loads(json.dumps(ours)), head.get(what, {}))
            if differing:
                raise UsageError(
                    f"{self.path} was begun with other {what}: {'; '.join(differing)}",
                    remedy=f"give the same ones, or remove {self.path} and start without --resume",
                )
        whole = b"".join(line + b"\n" for line in self._lines())
        with self.path.open("r+b") as file:
            file.truncate(len(whole))
        return rows

    def rows(self) -> list[Row]:
        """Return the finished rows.

        Raises:
            UsageError: the file is no journal.
        """
        return self._read()[1]

    def append(self, rows: Iterable[Row]) -> None:
        """Add finished rows; they are on disk when this returns."""
        self._append(row.to_json() for row in rows)

    def _append(self, records: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> list[bytes]:
        """Return the lines that have an end."""
        return self.path.read_bytes().split(b"\n")[:-1]

    def _read(self) -> tuple[dict[str, Any], list[Row]]:
        try:
            head, *others = [json.loads(line) for line in self._lines()]
            if head["kind"] == _KIND and head["schema"] == 1:
                return head, [Row.from_json(record) for record in others]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path} can't be read as a journal: {error}", remedy="remove it"
            ) from error
        raise UsageError(
            f"{self.path} is no journal of this version", remedy="remove it, or name another file"
        )
