"""What ``paceline bench collectives`` writes where, checked before it measures: nothing measured shall be lost."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.collectives.journal import Journal
from paceline.bench.collectives.request import Request
from paceline.bench.collectives.results import Result, installed, write_csv, write_json
from paceline.bench.collectives.rows import Row
from paceline.bench.collectives.settings import CollectiveSettings
from paceline.bench.facts import machine_record
from paceline.cli import collective_charts
from paceline.cli.writable import check_writable
from paceline.errors import UsageError

__all__ = ["Files", "plan_files", "write_files"]

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
        collective_charts.check()
        writer_of[out / "collectives.json"] = write_json
        writer_of[out / "collectives.csv"] = lambda path, result: write_csv(path, result.rows)
        writer_of |= collective_charts.writers(out, ops)
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
