"""The result of a measurement as JSON and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import durable
from paceline.bench.collectives.rows import Row
from paceline.bench.facts import versions
from paceline.errors import UsageError

__all__ = ["KIND", "SCHEMA", "Result", "installed", "read_result", "write_csv", "write_json"]

KIND, SCHEMA = "bench-collectives", 1

_COLUMNS = (
    *("backend", "op", "ranks", "nbytes", "dtype", "iterations", "median_s", "p95_s", "min_s", "max_s"),
    *("slowest_rank", "slowest_share", "algbw", "busbw", "correct"),
)


@dataclass(frozen=True)
class Result:
    """A measurement.

    Attributes:
        command: the line that made it.
        machine: where, as `paceline.bench.facts.machine_record` tells.
        settings: how, with the versions of what took part, what was left out and why, and whether it is complete.
        rows: what was found.
    """

    command: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: Sequence[Row]

    def to_json(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "command": self.command,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "rows": [row.to_json() for row in self.rows],
        }


def installed() -> dict[str, str]:
    """Return the versions of what bears on the times."""
    return versions(["paceline", "torch", "mpi4py", "mpich"])


def write_json(path: Path, result: Result) -> None:
    """Write a measurement; the file is whole or not there at all."""
    durable.write_json(path, result.to_json())


def read_result(path: Path) -> Result:
    """Return the measurement that `write_json` wrote.

    Raises:
        UsageError: the file can't be read, or holds something else.
    """
    remedy = "name a file that `paceline bench collectives --json FILE` wrote"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if (record["kind"], record["schema"]) != (KIND, SCHEMA):
            raise UsageError(f"{path} holds {record['kind']!r}, schema {record['schema']}", remedy=remedy)
        rows = [Row.from_json(row) for row in record["rows"]]
        return Result(record["command"], record["machine"], record["settings"], rows)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}", remedy=remedy) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no result of bench collectives ({error})", remedy=remedy) from error


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows as CSV, one line each; seconds, and bytes per second."""

    def write(beside: Path) -> None:
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row.to_json() for row in rows)

    durable.write_whole(path, write)
