"""The program of a rank that carries out schedules: ``python -m paceline.tools.bench.schedule_worker JOB``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives.run_schedule import SEGMENT_NBYTES, ScheduleRun, run_schedule
from paceline.errors import CollectiveError
from paceline.tools.bench.collectives import exact_buffers
from paceline.tools.bench.progress_bar import TurnBar
from paceline.tools.bench.schedule_benchmark import ELEMENT_NBYTES, Case
from paceline.world import World, init, shutdown

__all__ = ["work"]

_WHOLE = 1 << 62  # chunks travel whole, as they are priced


def work(job: Mapping[str, Any]) -> None:
    """Carry out all cases of a job as this rank, each so many times, and write what rank 0 knows then."""
    world = init(job["backend"], device="cpu", timeout=job["timeout"])
    cases = [Case.from_json(stored) for stored in job["cases"]]
    found: list[dict[str, Any]] = [{"case": case.to_json(), "seconds": [], "receipts": []} for case in cases]
    title = f"{world.size} ranks, {job['network']}"
    with TurnBar(title, len(cases) * job["iterations"], shown=world.rank == 0) as tick:
        for _ in range(job["iterations"]):
            for case, of_case in zip(cases, found, strict=True):
                seconds, outcome = _one(world, case, job)
                of_case["seconds"].append(seconds)
                of_case["receipts"] = _told(outcome, case)
                tick()
    if world.rank == 0:
        Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")
    shutdown()


def _one(world: World, case: Case, job: Mapping[str, Any]) -> tuple[float, ScheduleRun]:
    """Carry out a case, check its result, and return the seconds of the slowest rank."""
    schedule = case.schedule()
    tensor = torch.zeros(job["nbytes"] // ELEMENT_NBYTES // case.ranks * case.ranks)
    output = torch.full_like(tensor, -1) if case.op in ("all-to-all", "send-recv") else None
    _fill(case, tensor, world.rank)
    dist.barrier()
    start = time.perf_counter()
    outcome = run_schedule(
        schedule,
        tensor,
        output,
        orderly=not job["stream"],
        segment_nbytes=SEGMENT_NBYTES if job["stream"] else _WHOLE,
        receipts=True,
        check=False,
        timeout=job["timeout"],
    )
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    if not _is_right(case, outcome.result, world.rank):
        raise CollectiveError(f"{case.op} by {case.label} gave a wrong result", rank=world.rank)
    return took.item(), outcome


def _told(outcome: ScheduleRun, case: Case) -> list[str]:
    """Return the receipts, which the root has, in words on all ranks."""
    words: list[object] = [[str(receipt) for receipt in outcome.receipts or []]]
    dist.broadcast_object_list(words, src=case.root)
    return words[0]  # type: ignore[return-value]


def _fill(case: Case, tensor: torch.Tensor, rank: int) -> None:
    """Write what a rank brings: numbers that tell ranks, shares and places apart, and whose sums are exact."""
    for share, chunk in enumerate(tensor.chunk(case.ranks)):
        if case.op in ("reduce-scatter", "scatter", "all-to-all"):
            exact_buffers.write(chunk, rank + share)
        elif case.op not in ("all-gather", "gather") or share == rank:
            exact_buffers.write(chunk, rank)


def _is_right(case: Case, result: torch.Tensor, rank: int) -> bool:
    """Return whether a rank got what it must get; of what others than the root have left, nothing is asked."""
    if case.op in ("reduce", "gather") and rank != case.root:
        return True
    if case.op == "reduce-scatter":
        return exact_buffers.is_sum(result, case.ranks, first=rank)
    if case.op == "scatter":
        return exact_buffers.is_written(result, case.root + rank)
    source_of = {"broadcast": case.root, "send-recv": (rank - 1) % case.ranks}
    for share, chunk in enumerate(result.chunk(case.ranks)):
        if case.op in ("reduce", "all-reduce"):
            right = exact_buffers.is_sum(chunk, case.ranks)
        elif case.op == "all-to-all":
            right = exact_buffers.is_written(chunk, share + rank)
        else:
            right = exact_buffers.is_written(chunk, source_of.get(case.op, share))
        if not right:
            return False
    return True


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
