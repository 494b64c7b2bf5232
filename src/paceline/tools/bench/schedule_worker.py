"""Program of each rank that runs schedules: ``python -m paceline.tools.bench.schedule_worker JOB``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline._core.json_codec import decode
from paceline.collectives.run_schedule import SEGMENT_NBYTES, ScheduleRun, run_schedule
from paceline.errors import CollectiveError
from paceline.tools.bench.collectives.exact_buffers import holds_pattern, holds_sum, write_pattern
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.rank_jobs import read_job, write_job_result
from paceline.tools.bench.schedule_benchmark import ELEMENT_NBYTES, ScheduleCase
from paceline.world import World, init, shutdown
from paceline.world.value_collectives import broadcast_value

__all__ = ["main"]

_UNLIMITED_NBYTES = 1 << 62  # of a segment: chunks travel whole, as they are priced


def main(path: str) -> None:
    """Run all cases of the job in the file `path` as this rank; rank 0 writes the result."""
    job = read_job(path)
    world = init(job["backend"], device="cpu", timeout=job["timeout"])
    cases = [decode(record, ScheduleCase, "case") for record in job["cases"]]
    found: list[dict[str, Any]] = [{"seconds": [], "receipts": []} for _ in cases]
    title = f"{world.size} ranks, {job['network']}"
    with ProgressBar(title, len(cases) * job["iterations"], shown=world.rank == 0) as advance:
        for _ in range(job["iterations"]):
            for case, of_case in zip(cases, found, strict=True):
                seconds, outcome = _run_once(world, case, job)
                of_case["seconds"].append(seconds)
                of_case["receipts"] = _broadcast_receipts(outcome, case)
                advance()
    if world.rank == 0:
        write_job_result(job, found)
    shutdown()


def _run_once(world: World, case: ScheduleCase, job: Mapping[str, Any]) -> tuple[float, ScheduleRun]:
    """Run a case, check its result, and return the seconds of the slowest rank."""
    schedule = case.schedule()
    tensor = torch.zeros(job["nbytes"] // ELEMENT_NBYTES // case.ranks * case.ranks)
    output = torch.full_like(tensor, -1) if case.op in ("all-to-all", "send-recv") else None
    _write_input(case, tensor, world.rank)
    dist.barrier()
    start = time.perf_counter()
    outcome = run_schedule(
        schedule,
        tensor,
        output,
        orderly=not job["stream"],
        segment_nbytes=SEGMENT_NBYTES if job["stream"] else _UNLIMITED_NBYTES,
        receipts=True,
        check=False,
        timeout=job["timeout"],
    )
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    if not _result_is_right(case, outcome.result, world.rank):
        raise CollectiveError(f"{case.op} by {case.label} gave a wrong result", rank=world.rank)
    return took.item(), outcome


def _broadcast_receipts(outcome: ScheduleRun, case: ScheduleCase) -> list[str]:
    """Return the receipts, which only the root has, as text on all ranks."""
    return broadcast_value([str(receipt) for receipt in outcome.receipts or []], case.root)


def _write_input(case: ScheduleCase, tensor: torch.Tensor, rank: int) -> None:
    """Write numbers that differ between ranks, shares and positions, and whose sums are exact."""
    for share, chunk in enumerate(tensor.chunk(case.ranks)):
        if case.op in ("reduce-scatter", "scatter", "all-to-all"):
            write_pattern(chunk, rank + share)
        elif case.op not in ("all-gather", "gather") or share == rank:
            write_pattern(chunk, rank)


def _result_is_right(case: ScheduleCase, result: torch.Tensor, rank: int) -> bool:
    """Return whether a rank has the right result; where only the root has one, the others are not checked."""
    if case.op in ("reduce", "gather") and rank != case.root:
        return True
    if case.op == "reduce-scatter":
        return holds_sum(result, case.ranks, first=rank)
    if case.op == "scatter":
        return holds_pattern(result, case.root + rank)
    source_of = {"broadcast": case.root, "send-recv": (rank - 1) % case.ranks}
    for share, chunk in enumerate(result.chunk(case.ranks)):
        if case.op in ("reduce", "all-reduce"):
            right = holds_sum(chunk, case.ranks)
        elif case.op == "all-to-all":
            right = holds_pattern(chunk, share + rank)
        else:
            right = holds_pattern(chunk, source_of.get(case.op, share))
        if not right:
            return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
