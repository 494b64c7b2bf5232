"""Runs the process sets of the collectives benchmark one after another."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline._core.json_codec import encode
from paceline.tools.bench.collectives.collectives_cases import CollectiveCase, process_sets
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.resume_journal import RowJournal, is_finished
from paceline.tools.bench.rank_jobs import StartRanks

__all__ = ["RankStarters", "measure_collectives"]

RankStarters = Mapping[str, StartRanks]
"""Starts ranks, by the name of the launcher (`benchmarked_backends.BenchmarkedBackend.launcher`)."""


def measure_collectives(
    settings: CollectiveSettings,
    cases: Sequence[CollectiveCase],
    starters: RankStarters,
    journal: RowJournal,
) -> None:
    """Measure the cases that are not in the journal yet.

    Args:
        settings: of the measurement.
        cases: all cases.
        starters: start the ranks, such as ``{LOCAL_RANKS: paceline.launch.process.local_ranks.run_ranks}``.
        journal: begun, or resumed.

    Raises:
        RankFailed: a rank ended with an error; the rows of finished cases are in the journal.
    """
    for each in process_sets(cases):
        kept = {row.key for row in journal.rows()}
        left = [case for case in each.cases if not is_finished(case, settings.dtype, kept)]
        if not left:
            continue
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            path = Path(folder, "job.json")
            job = {
                "settings": encode(settings),
                "cases": encode(left),
                "init_method": _init_method(settings.rendezvous, Path(folder)),
                "journal": str(journal.path.absolute()),
            }
            path.write_text(json.dumps(job), encoding="utf-8")
            module = "paceline.tools.bench.collectives.collectives_worker"
            starters[each.launcher](["-m", module, str(path)], each.ranks, env={})


def _init_method(rendezvous: str, folder: Path) -> str:
    """Return the rendezvous of one process set: a file in `folder`, or a port that is free now."""
    if rendezvous == "file":
        return Path(folder, "rendezvous").as_uri()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
