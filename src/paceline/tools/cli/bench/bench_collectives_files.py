"""What ``paceline bench collectives`` writes where, checked before it measures: nothing measured shall be lost.

The charts of ``paceline bench collectives``: time and bus bandwidth against size, for each operation.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.errors import UsageError
from paceline.tools.bench.collectives.collectives_request import Request
from paceline.tools.bench.collectives.collectives_rows import Result, Row, installed, write_csv, write_json
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.measurement_journal import Journal
from paceline.tools.report.charts.chart_style import Chart
from paceline.tools.report.charts.collective_charts import BackendSeries, bandwidth_by_size, time_by_size
from paceline.tools.result_files import check_writable, machine_record, require_matplotlib

__all__ = ["Files", "bandwidth", "check", "plan_files", "times", "write_files", "writers"]

_Writer = Callable[[Path, Result], object]


@dataclass(frozen=True)
class Files:
    """What will be written.

    Attributes:
        writer_of: what writes each file.
        kept: the journal of finished rows, which stays while the measurement is not complete; None: nothing stays.
    """

    writer_of: Mapping[Path, _Writer]
    kept: Path | None

    @contextlib.contextmanager
    def journal(self, settings: CollectiveSettings, *, resume: bool) -> Iterator[Journal]:
        """Give the journal, begun or taken up again; one that is of no more use is removed afterwards.

        Raises:
            UsageError: it is of another measurement.
        """
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            journal = Journal(self.kept or Path(folder, "journal.jsonl"))
            head = settings.to_json() | {"versions": installed()}, machine_record()
            if resume and journal.path.exists():
                journal.resume(*head)
            else:
                journal.begin(*head)
            try:
                yield journal
            finally:
                if journal.path.exists() and not journal.rows():
                    journal.path.unlink()

    def how_to_go_on(self, rows: int) -> str:
        """Return what to tell the user of a measurement that ended early."""
        if not rows:
            return "Interrupted before the first rows were finished; nothing was written"
        if self.kept is None:
            return f"Interrupted: {rows} rows were finished\n  → with --out or --json they are kept, for --resume"
        return (
            f"Interrupted: {rows} rows are kept in {self.kept}\n  → go on with the same command and --resume"
        )


def plan_files(
    ops: Sequence[str], json_file: Path | None, csv_file: Path | None, out: Path | None, *, resume: bool
) -> Files:
    """Return what will be written where, once it is clear that it can be.

    Raises:
        UsageError: a file can't be written or is named twice, charts can't be drawn, there is nothing to resume, or
            there is an interrupted measurement that nobody wants to resume.
    """
    writer_of: dict[Path, _Writer] = {}
    kept = None
    if json_file is not None:
        writer_of[json_file] = write_json
        kept = json_file.with_suffix(".journal.jsonl")
    if csv_file is not None:
        if csv_file == json_file:
            raise UsageError(f"--json and --csv both name {csv_file}", remedy="name two files")
        writer_of[csv_file] = lambda path, result: write_csv(path, result.rows)
    if out is not None:
        check()
        writer_of[out / "collectives.json"] = write_json
        writer_of[out / "collectives.csv"] = lambda path, result: write_csv(path, result.rows)
        writer_of |= writers(out, ops)
        kept = out / "collectives.journal.jsonl"
    for path in [*writer_of, *([] if kept is None else [kept])]:
        check_writable(path, make_folder=True)
    _check_journal(kept, next(iter(writer_of), None), resume=resume)
    return Files(writer_of, kept)


def _check_journal(kept: Path | None, result: Path | None, *, resume: bool) -> None:
    if resume and kept is None:
        raise UsageError(
            "--resume: nothing tells of what", remedy="give the --out or --json of that measurement"
        )
    if kept is None:
        return
    if not resume and kept.exists():
        raise UsageError(
            f"{kept} holds finished rows of a measurement that was interrupted",
            remedy=f"go on with it by --resume, or remove {kept} to start anew",
        )
    if resume and not kept.exists() and result is not None and result.exists():
        raise UsageError(
            f"nothing to resume: {result} is there, and {kept} is not", remedy="leave --resume out"
        )


def write_files(
    files: Files, asked: Request, rows: Sequence[Row], command: str, *, complete: bool
) -> list[Path]:
    """Write every file and return which; the journal goes once a complete result is there. No rows, no files."""
    if not rows:
        return []
    settings = asked.settings.to_json() | {"versions": installed(), "left_out": list(asked.left_out)}
    result = Result(command, machine_record(), settings | {"complete": complete}, rows)
    for path, write in files.writer_of.items():
        write(path, result)
    if complete and files.kept is not None:
        files.kept.unlink(missing_ok=True)
    return list(files.writer_of)


def check() -> None:
    """Raise a `UsageError` if charts can't be drawn here."""
    require_matplotlib()


def writers(folder: Path, ops: Iterable[str]) -> dict[Path, Callable[[Path, Result], object]]:
    """Return what draws each chart of the operations: ``all-reduce-time.png``, ``all-reduce-busbw.svg`` …"""
    return {
        folder / f"{op}-{name}{suffix}": partial(_write, op=op, draw=draw)
        for op in ops
        for name, draw in (("time", times), ("busbw", bandwidth))
        for suffix in (".png", ".svg")
    }


def _write(path: Path, result: Result, *, op: str, draw: Callable[[Sequence[Row], str], Chart]) -> None:
    rows = [row for row in result.rows if row.op == op]
    if rows:
        chart = draw(rows, f"{op} of {rows[0].dtype}, {result.settings['network']}")
        chart.save(path)


def times(rows: Sequence[Row], title: str) -> Chart:
    """Return the chart of the median times of one operation."""
    return time_by_size(_lines(rows, lambda row: row.times.median_s), title=title)


def bandwidth(rows: Sequence[Row], title: str) -> Chart:
    """Return the chart of the bus bandwidths of one operation."""
    return bandwidth_by_size(_lines(rows, lambda row: row.busbw), title=title, bandwidth="busbw")


def _lines(rows: Sequence[Row], value_of: Callable[[Row], float]) -> list[BackendSeries]:
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.nbytes):
        points.setdefault((row.backend, row.ranks), []).append((row.nbytes, value_of(row)))
    return [BackendSeries(backend, ranks, found) for (backend, ranks), found in sorted(points.items())]
