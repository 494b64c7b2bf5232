"""Cases of the starvation benchmark: what trains, and what a rank does once it has no batches left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import unknown
from paceline.tools.bench.rank_jobs import StartRanks, run_rank_job
from paceline.tools.bench.starvation.starvation_settings import StarvationSettings
from paceline.tools.result_files import result_head

__all__ = [
    "STARVATION_CASES",
    "DryAction",
    "StarvationCase",
    "find_cases",
    "measure_starvation",
    "starvation_result",
]

DryAction = Literal[
    "ends",
    "idles",
    "barrier",
    "reduces one",
    "reduces many",
    "next epoch",
    "join",
    "stops early",
    "takes part",
]


@dataclass(frozen=True)
class StarvationCase:
    """One way to handle unequal numbers of batches.

    Attributes:
        name: unique.
        trainer: ``"DDP"``, ``"FSDP2"``, or one of Paceline's strategies.
        when_dry: the action of a rank that has no batches left, while others have.
        description: of that action.
        divide_by_initial: of torch's Join: divide gradients by the number of all ranks, or of those with batches.
    """

    name: str
    trainer: str
    when_dry: DryAction
    description: str
    divide_by_initial: bool = True

    @property
    def framework(self) -> str:
        """The framework with its strategy, as text."""
        return f"torch {self.trainer}" if self.trainer in ("DDP", "FSDP2") else f"Paceline, {self.trainer}"


_TAKES_PART = "takes part with 0 samples"

STARVATION_CASES = (
    StarvationCase("exits", "DDP", "ends", "its process ends"),
    StarvationCase("idles", "DDP", "idles", "does something else"),
    StarvationCase("barrier", "DDP", "barrier", "waits in a barrier"),
    StarvationCase("metric", "DDP", "reduces one", "all-reduces its metric, one number"),
    StarvationCase("larger", "DDP", "reduces many", "all-reduces more than the gradient has"),
    StarvationCase("next-epoch", "DDP", "next epoch", "begins its next epoch"),
    StarvationCase("fsdp2", "FSDP2", "idles", "does something else"),
    StarvationCase("join", "DDP", "join", "waits in Join, ÷ all ranks (default)"),
    StarvationCase("join-active", "DDP", "join", "waits in Join, ÷ ranks with data", divide_by_initial=False),
    StarvationCase("truncated", "DDP", "stops early", "all stop after min(batches)"),
    StarvationCase("bucketed", "bucketed", "takes part", _TAKES_PART),
    StarvationCase("sharded", "sharded", "takes part", _TAKES_PART),
    StarvationCase("full-shard", "full-shard", "takes part", _TAKES_PART),
)


def find_cases(names: Iterable[str]) -> list[StarvationCase]:
    """Return the cases with these names, in the order of `STARVATION_CASES`; all cases for no names.

    Raises:
        UsageError: a name is unknown.
    """
    wanted, valid = list(names), [case.name for case in STARVATION_CASES]
    for name in wanted:
        if name not in valid:
            raise unknown("case", name, valid)
    return [case for case in STARVATION_CASES if not wanted or case.name in wanted]


def measure_starvation(
    settings: StarvationSettings, cases: Sequence[StarvationCase], start: StartRanks
) -> list[dict[str, Any]]:
    """Run cases one after another and return their outcomes; see `CaseOutcome.to_json`.

    Args:
        settings: of all cases.
        cases: to run.
        start: starts one process, such as `paceline.launch.process.local_ranks.run_ranks`, which forks the ranks.

    Raises:
        RankFailed: that process ended with an error.
    """
    job = {"settings": settings.to_json(), "cases": [case.name for case in cases]}
    return run_rank_job(
        start,
        "paceline.tools.bench.starvation.starvation_worker",
        job,
        1,
        env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        folder_variables=["TMPDIR"],
    )


def starvation_result(
    settings: StarvationSettings, outcomes: Sequence[dict[str, Any]], command: str
) -> dict[str, Any]:
    """Return a measurement for JSON; `command` reproduces it."""
    head = result_head("starvation", (), command=command)
    return head | {"settings": settings.summary(), "scenes": list(outcomes)}
