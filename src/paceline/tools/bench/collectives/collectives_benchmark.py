"""Runs the process sets of a measurement one after another; what is finished is in the journal."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.tools.bench.collectives.benchmark_cases import Case, process_sets
from paceline.tools.bench.collectives.collectives_rows import Key, Row
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.measurement_journal import Journal
from paceline.tools.bench.step.step_benchmark import StartRanks

__all__ = ["Starters", "finished", "in_order", "keys_of", "measure"]

Starters = Mapping[str, StartRanks]
"""What starts the processes of the backends whose `Backend.starter` is the key; it returns when all have ended well."""


def measure(
    settings: CollectiveSettings,
    cases: Sequence[Case],
    starters: Starters,
    journal: Journal,
) -> None:
    """Measure whatever of the cases is not in the journal yet.

    Args:
        settings: how to measure.
        cases: all cases.
        starters: start the ranks, such as ``{RANKS: paceline.launch.process.local_ranks.run_ranks}``.
        journal: begun, or resumed.

    Raises:
        RankFailed: a rank ended with an error; the rows of finished cases are in the journal.
    """
    for each in process_sets(cases):
        there = {row.key for row in journal.rows()}
        left = [case for case in each.cases if not finished(case, settings.dtype, there)]
        if not left:
            continue
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            job = Path(folder, "job.json")
            described = {
                "settings": settings.to_json(),
                "cases": [asdict(case) for case in left],
                "init_method": _meeting(settings.rendezvous, Path(folder)),
                "journal": str(journal.path.absolute()),
            }
            job.write_text(json.dumps(described), encoding="utf-8")
            starters[each.starter](
                ["-m", "paceline.tools.bench.collectives.collectives_worker", str(job)], each.ranks, env={}
            )


def _meeting(rendezvous: str, folder: Path) -> str:
    """Return where the ranks of one process set meet: a file in `folder`, or a port that is free now."""
    if rendezvous == "file":
        return Path(folder, "rendezvous").as_uri()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def keys_of(case: Case, dtype: str) -> list[Key]:
    """Return what tells the rows of a case apart from others."""
    return [(backend, case.op, case.ranks, case.nbytes, dtype) for backend in case.backends]


def finished(case: Case, dtype: str, there: Iterable[Key]) -> bool:
    """Return whether all rows of a case are there."""
    return set(keys_of(case, dtype)) <= set(there)


def in_order(cases: Iterable[Case], dtype: str, rows: Iterable[Row]) -> list[Row]:
    """Return the rows in the order of the cases, each case's latest."""
    by_key = {row.key: row for row in rows}
    return [by_key[key] for case in cases for key in keys_of(case, dtype) if key in by_key]
