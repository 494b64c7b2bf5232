"""What each rank of a measurement runs: ``python -m paceline.tools.bench.memory_worker job.json``."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.parallel.engine.comm import Comm
from paceline.tools.bench.cpu_allocations import Allocated
from paceline.tools.plan.memory.traced_training import SilentObserver, train_subject
from paceline.tools.plan.memory.training_subject import TrainingSetting, TrainingSubject, resolve_subject
from paceline.world import init, shutdown

__all__ = ["main"]


def main(argv: Sequence[str]) -> None:
    """Do the job that the file ``argv[0]`` describes."""
    job = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    setting = TrainingSetting.from_json(job["setting"])
    torch.manual_seed(0)
    torch.set_num_threads(job["threads"])
    world = init(setting.backend) if setting.ranks > 1 else None
    if setting.device == "cuda":
        torch.set_default_device("cuda" if world is None else world.device)
    subject = resolve_subject(job["subject"], job["inputs"])
    found = _measure(subject, setting, job["steps"])
    every: list[Any] = [found]
    if world is not None:
        every = [None] * world.size
        dist.all_gather_object(every, found)
    if world is None or world.rank == 0:
        Path(job["out"]).write_text(json.dumps(every), encoding="utf-8")
    if world is not None:
        shutdown()


def _measure(subject: TrainingSubject, setting: TrainingSetting, steps: int) -> dict[str, Any]:
    """Return the peak of this rank and, on the CPU, the operators in which it was reached."""
    _warm_up()
    gc.collect()
    gc.disable()  # cycles would be collected at other times than in a prediction
    if setting.device == "cuda":
        return _measure_gpu(subject, setting, steps)
    with Allocated() as allocated:
        train_subject(subject, setting, Comm(), SilentObserver(), steps)
    peak = allocated.at_peak()
    return {
        "peak_nbytes": allocated.nbytes,
        "peak_operators": list(peak.operators) if peak else [],
        "unreported_nbytes": allocated.unreported_nbytes,
    }


def _measure_gpu(subject: TrainingSubject, setting: TrainingSetting, steps: int) -> dict[str, Any]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train_subject(subject, setting, Comm(), SilentObserver(), steps)
    peak = torch.cuda.max_memory_allocated() - before
    return {"peak_nbytes": peak, "peak_operators": [], "unreported_nbytes": 0}


def _warm_up() -> None:
    """Load what the first use of torch loads, so that it is not measured."""
    with torch.autograd.profiler.profile(profile_memory=True):
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()


if __name__ == "__main__":
    main(sys.argv[1:])
