"""Program of each rank of a memory measurement: ``python -m paceline.tools.bench.memory_worker job.json``."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist

from paceline._core.json_codec import decode
from paceline.parallel.engine.comm import Comm
from paceline.tools.bench.peak_memory import CpuAllocations
from paceline.tools.bench.rank_jobs import read_job, write_job_result
from paceline.tools.plan.memory.traced_training import Silent, train
from paceline.tools.plan.memory.training_subject import Setting, Subject, subject_of
from paceline.world import init, shutdown

__all__ = ["main"]


def main(path: str) -> None:
    """Run the job in the file `path`."""
    job = read_job(path)
    setting = decode(job["setting"], Setting, "setting")
    torch.manual_seed(0)
    torch.set_num_threads(job["threads"])
    world = init(setting.backend) if setting.ranks > 1 else None
    if setting.device == "cuda":
        torch.set_default_device("cuda" if world is None else world.device)
    subject = subject_of(job["subject"], job["inputs"])
    found = _measure(subject, setting, job["steps"])
    every: list[Any] = [found]
    if world is not None:
        every = [None] * world.size
        dist.all_gather_object(every, found)
    if world is None or world.rank == 0:
        write_job_result(job, every)
    if world is not None:
        shutdown()


def _measure(subject: Subject, setting: Setting, steps: int) -> dict[str, Any]:
    """Return the peak of this rank and, on the CPU, the operators that reached it."""
    with torch.autograd.profiler.profile(profile_memory=True):  # load what the first use of torch loads
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    gc.collect()
    gc.disable()  # cycles would be collected at other times than in a prediction
    if setting.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(subject, setting, Comm(), Silent(), steps)
        peak = torch.cuda.max_memory_allocated() - before
        return {"peak_nbytes": peak, "peak_operators": [], "unreported_nbytes": 0}
    with CpuAllocations() as allocated:
        train(subject, setting, Comm(), Silent(), steps)
    at_peak = allocated.at_peak()
    return {
        "peak_nbytes": allocated.nbytes,
        "peak_operators": list(at_peak.operators) if at_peak else [],
        "unreported_nbytes": allocated.unreported_nbytes,
    }


if __name__ == "__main__":
    main(sys.argv[1])
