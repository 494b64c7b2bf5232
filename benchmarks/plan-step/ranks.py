"""What each rank of `measure.py` runs: the parts of a step into a profile, then whole steps of all contestants in turn.

    torchrun … benchmarks/plan-step/ranks.py JOB.json

Both happen in the same processes, one after the other, so that profile and steps are of the same ranks on the same
links. Rank 0 writes both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import Source
from paceline.tools.bench.step.step_strategies import StrategyVariant
from paceline.tools.bench.step.step_worker import gather_step_seconds, print_tick, time_interleaved
from paceline.tools.bench.step.strategy_trainers import build_trainer, random_batch, run_step
from paceline.tools.bench.step_parts.parts_settings import PartsSettings
from paceline.tools.bench.step_parts.parts_worker import measure_parts
from paceline.tools.bench.step_parts.training_workload import reference_workload
from paceline.tools.models.gpt_sizes import GptSize
from paceline.world import init, shutdown

_WARM_UP = 2  # the first step builds the buckets, those of torch's DDP the second


def main(job_file: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    settings, size = PartsSettings(**job["parts"]), GptSize(**job["size"])
    world = init(settings.backend)
    workload = reference_workload(size, settings.batch_size, settings.context, world.device)
    earlier = Profile.load(job["profile"]) if Path(job["profile"]).exists() else Profile()
    found = measure_parts(world, settings, workload, earlier, Source(**job["source"]))
    if world.rank == 0:
        earlier.merged(found).save(job["profile"])
    print_tick()
    torchs = dist.new_group(backend="gloo") if world.backend == "paceline" else None
    assert not isinstance(torchs, int)
    entries = [StrategyVariant(**each) for each in job["entries"]]
    contestants = [build_trainer(entry, size, world.device, 0, torchs) for entry in entries]
    batch = random_batch(size, settings.batch_size, settings.context, world.rank, world.device)
    for contestant in contestants:
        for _ in range(_WARM_UP):
            run_step(contestant, batch)
        print_tick()
    mine = time_interleaved(contestants, [batch], job["rounds"], job["steps"], print_tick)
    seconds = gather_step_seconds(mine, world)
    if world.rank == 0:
        Path(job["out"]).write_text(json.dumps(seconds), encoding="utf-8")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
