"""Ranks of a benchmark: started with a JSON job, or already started by a launcher (torchrun, ``paceline lab``, …)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import UsageError
from paceline.world import ProcessPlace

__all__ = [
    "StartRanks",
    "check_launched_ranks",
    "network_name",
    "read_job",
    "run_rank_job",
    "under_launcher",
    "write_job_result",
]


class StartRanks(Protocol):
    """Runs ``python *argv`` as `ranks` processes of one world and returns when all have succeeded."""

    def __call__(self, argv: Sequence[str], ranks: int, *, env: Mapping[str, str]) -> None: ...


def run_rank_job(
    start: StartRanks,
    module: str,
    job: Mapping[str, Any],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    folder_variables: Sequence[str] = (),
) -> Any:
    """Run ``python -m module`` on ranks, with the path of a file that holds the job; return the result of rank 0.

    Args:
        start: starts the ranks, such as `paceline.launch.process.local_ranks.run_ranks`.
        module: the program.
        job: its input, as JSON takes it; ``"out"`` is added: the file for the result.
        ranks: number of processes.
        env: environment variables of the ranks.
        folder_variables: further variables, set to the job's temporary folder.

    Raises:
        RankFailed: a rank ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        path, out = Path(folder, "job.json"), Path(folder, "result.json")
        path.write_text(json.dumps({**job, "out": str(out)}), encoding="utf-8")
        variables = dict(env or {}) | dict.fromkeys(folder_variables, folder)
        start(["-m", module, str(path)], ranks, env=variables)
        return json.loads(out.read_text(encoding="utf-8"))


def read_job(path: str) -> dict[str, Any]:
    """Return the job that `run_rank_job` wrote."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_job_result(job: Mapping[str, Any], result: object) -> None:
    """Write the result of a job, on rank 0."""
    Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")


def under_launcher(place: ProcessPlace) -> bool:
    """Return whether a launcher started this process as a rank."""
    return place.source != "arguments"


def network_name(network: str | None, place: ProcessPlace) -> str:
    """Return the network between the ranks: as given by ``--network``, else loopback or "between hosts"."""
    between_hosts = under_launcher(place) and (place.nodes or 1) > 1
    return network or ("between hosts" if between_hosts else "loopback")


def check_launched_ranks(option: str, ranks: set[int], place: ProcessPlace) -> None:
    """Refuse numbers of ranks that differ from that of the launcher.

    Args:
        option: text of ``--nproc-per-node``, for the message.
        ranks: its numbers.
        place: of this process, which a launcher started.

    Raises:
        UsageError: they differ.
    """
    here = place.local_size or place.size
    if ranks != {here}:
        raise UsageError(
            f"--nproc-per-node {option}, but {place.source} started {here}",
            remedy="leave --nproc-per-node out under a launcher",
        )
