"""What each rank of `measure.py` runs: ``auto`` until it has settled, then all contestants in turn.

torchrun … benchmarks/tuner/ranks.py JOB.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.parallel.data_parallel import DataParallel
from paceline.tools.bench.step.step_strategies import AUTO, StrategyVariant
from paceline.tools.bench.step.step_worker import gather_step_seconds, print_tick, time_interleaved
from paceline.tools.bench.step.strategy_trainers import build_trainer, random_batch, run_step, run_until_tuned
from paceline.tools.models.gpt_sizes import GptSize
from paceline.world import init, shutdown

_WARM_UP = 2  # the first step builds the buckets, those of torch's DDP the second


def main(job_file: str) -> None:
    """Do the job that a file describes; rank 0 writes what was found."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    os.environ["XDG_CACHE_HOME"] = job["cache"]  # nothing of earlier runs
    torch.set_num_threads(1)
    world = init()
    torchs = dist.new_group(backend="gloo")
    assert isinstance(torchs, dist.ProcessGroup), "every rank belongs to it"
    size = GptSize(**job["size"])
    contestants = [
        build_trainer(StrategyVariant.from_json(record), size, world.device, 0, torchs)
        for record in job["entries"]
    ]
    batch = random_batch(size, job["batch"], size.context, world.rank, world.device)
    auto = next(each for each in contestants if each.variant.strategy == AUTO)
    searched = run_until_tuned(auto, batch)
    for contestant in contestants:
        for _ in range(_WARM_UP):
            run_step(contestant, batch)
    print_tick()
    mine = time_interleaved(contestants, [batch], job["rounds"], job["steps"], print_tick)
    seconds = gather_step_seconds(mine, world)
    if world.rank == 0:
        assert isinstance(auto.model, DataParallel), "it is ours"
        tuning = auto.model.tuning
        assert tuning is not None, "there is something to tune"
        assert tuning.settled is not None, "it has settled"
        found = {
            "searched": searched,
            "sentences": [said.partition(" Kept in ")[0] for said in tuning.sentences],
            "settled": tuning.settled.to_json({}),
            "entries": job["entries"],
            "seconds": seconds,
        }
        Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
