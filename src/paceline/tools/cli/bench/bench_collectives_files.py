"""Files of ``paceline bench collectives``, checked before it measures: JSON, CSV, charts, and the journal of rows."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline._core.json_codec import encode
from paceline.errors import UsageError
from paceline.tools.bench.collectives.collectives_request import CollectivesRequest
from paceline.tools.bench.collectives.collectives_rows import (
    CollectiveRow,
    CollectivesResult,
    benchmarked_versions,
    write_collectives_csv,
    write_collectives_json,
)
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.resume_journal import RowJournal
from paceline.tools.report.charts.collective_charts import BackendSeries, bandwidth_by_size, time_by_size
from paceline.tools.result_files import check_writable, checked_files, machine_record, paceline_command

__all__ = ["CollectivesFiles", "chart_writers", "plan_files"]

_Writer = Callable[[Path, CollectivesResult], object]


@dataclass(frozen=True)
class CollectivesFiles:
    """Files that will be written.

    Attributes:
        writer_of: writer of each file.
        kept: the journal of finished rows, which stays while the measurement is not complete; None: a temporary one.
    """

    writer_of: Mapping[Path, _Writer]
    kept: Path | None

    @contextlib.contextmanager
    def journal(self, settings: CollectiveSettings, *, resume: bool) -> Iterator[RowJournal]:
        """Yield the journal, begun or resumed; an empty one is removed afterwards.

        Raises:
            UsageError: it is of another measurement.
        """
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            journal = RowJournal(self.kept or Path(folder, "journal.jsonl"))
            head = encode(settings) | {"versions": benchmarked_versions()}, machine_record()
            if resume and journal.path.exists():
                journal.resume(*head)
            else:
                journal.begin(*head)
            try:
                yield journal
            finally:
                if journal.path.exists() and not journal.rows():
                    journal.path.unlink()

    def interruption(self, rows: int) -> str:
        """Return the message for a measurement that ended early, with the number of finished rows."""
        if not rows:
            return "Interrupted before the first rows were finished; nothing was written"
        if self.kept is None:
            return f"Interrupted: {rows} rows were finished\n  → with --out or --json they are kept, for --resume"
        return f"Interrupted: {rows} rows are kept in {self.kept}\n  → run the same command with --resume"

    def write(
        self, request: CollectivesRequest, rows: Sequence[CollectiveRow], *, complete: bool
    ) -> list[Path]:
        """Write every file and return their paths; remove the journal once the result is complete."""
        settings = encode(request.settings) | {
            "versions": benchmarked_versions(),
            "left_out": list(request.left_out),
            "complete": complete,
        }
        result = CollectivesResult(paceline_command(), machine_record(), settings, rows)
        for path, write in self.writer_of.items():
            write(path, result)
        if complete and self.kept is not None:
            self.kept.unlink(missing_ok=True)
        return list(self.writer_of)


def plan_files(
    ops: Sequence[str], json_file: Path | None, csv_file: Path | None, out: Path | None, *, resume: bool
) -> CollectivesFiles:
    """Return the files that will be written, after checking that they can be.

    Raises:
        UsageError: a file can't be written or is named twice, charts can't be drawn, there is nothing to resume, or an
            interrupted measurement would be overwritten.
    """
    in_folder: dict[str, _Writer] = {
        "collectives.json": write_collectives_json,
        "collectives.csv": _write_csv,
        **chart_writers(ops),
    }
    writer_of = checked_files(
        json_file,
        write_collectives_json,
        out,
        in_folder,
        csv_file=csv_file,
        write_csv=_write_csv,
        make_folders=True,
    )
    if out is not None:
        kept = out / "collectives.journal.jsonl"
    else:
        kept = None if json_file is None else json_file.with_suffix(".journal.jsonl")
    if kept is not None:
        check_writable(kept)
    _check_journal(kept, next(iter(writer_of), None), resume=resume)
    return CollectivesFiles(writer_of, kept)


def _write_csv(path: Path, result: CollectivesResult) -> None:
    write_collectives_csv(path, result.rows)


def _check_journal(kept: Path | None, result: Path | None, *, resume: bool) -> None:
    if kept is None:
        if resume:
            raise UsageError(
                "--resume: no measurement is named", remedy="give the --out or --json of that measurement"
            )
        return
    if not resume and kept.exists():
        raise UsageError(
            f"{kept} holds finished rows of a measurement that was interrupted",
            remedy=f"resume it with --resume, or remove {kept} to start anew",
        )
    if resume and not kept.exists() and result is not None and result.exists():
        raise UsageError(
            f"nothing to resume: {result} exists, and {kept} does not", remedy="leave --resume out"
        )


def chart_writers(ops: Sequence[str]) -> dict[str, _Writer]:
    """Return the writer of each chart: ``all-reduce-time.png``, ``all-reduce-busbw.svg`` …"""
    return {
        f"{op}-{quantity}{suffix}": partial(_write_chart, op=op, quantity=quantity)
        for op in ops
        for quantity in ("time", "busbw")
        for suffix in (".png", ".svg")
    }


def _write_chart(path: Path, result: CollectivesResult, *, op: str, quantity: str) -> None:
    """Draw the median times, or the bus bandwidths, of one operation; nothing if it has no rows yet."""
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    rows = sorted((row for row in result.rows if row.op == op), key=lambda row: row.nbytes)
    if not rows:
        return
    for row in rows:
        value = row.times.median_s if quantity == "time" else row.busbw
        lines.setdefault((row.backend, row.ranks), []).append((row.nbytes, value))
    series = [BackendSeries(backend, ranks, points) for (backend, ranks), points in sorted(lines.items())]
    title = f"{op} of {rows[0].dtype}, {result.settings['network']}"
    if quantity == "time":
        time_by_size(series, title=title).save(path)
    else:
        bandwidth_by_size(series, title=title, bandwidth="busbw").save(path)
