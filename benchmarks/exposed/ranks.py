"""What each rank of `measure.py` runs: a bare model, ours, and another of ours whose timeline is recorded, in turn.

torchrun … benchmarks/exposed/ranks.py JOB.json
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from paceline._core.step_state import step_state
from paceline.parallel.data_parallel import DataParallel
from paceline.profiling.rank_timeline import RankTimeline
from paceline.tools.bench.step.step_strategies import NO_SYNC, StrategyVariant
from paceline.tools.bench.step.step_worker import print_tick
from paceline.tools.bench.step.strategy_trainers import StrategyTrainer, build_trainer, random_batch, run_step
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import TokenBatch
from paceline.world import init, shutdown
from paceline.world.control_collectives import sum_over_ranks

_WARM_UP = 3


@dataclass
class Times:
    """Seconds of steps on this rank, by round: nothing sent; synchronised; synchronised and recorded."""

    bare: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)


def main(job_file: str) -> None:
    """Do the job that a file describes; rank 0 writes the times, means over ranks."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    world = init(job["backend"])
    size = GptSize(**job["size"])
    entry = StrategyVariant(job["strategy"], job["bucket_mib"])
    bare, synced, recorded = (
        build_trainer(each, size, world.device, 0) for each in (StrategyVariant(NO_SYNC), entry, entry)
    )
    batch = random_batch(size, job["batch"], size.context, world.rank, world.device)
    for contestant in (bare, synced, recorded):
        for _ in range(_WARM_UP):
            run_step(contestant, batch)
    times = Times()
    assert isinstance(recorded.model, DataParallel), "the contestant is one of Paceline's"
    with RankTimeline(job["timelines"], recorded.model):
        recorder = step_state.recorder
        assert recorder is not None, "the timeline is being recorded"
        turns = [(synced, times.synced, None), (recorded, times.recorded, recorder)]
        for _ in range(job["rounds"]):
            for contestant, seconds, told in ((bare, times.bare, None), *turns):
                step_state.recorder = told
                seconds.append(_turn(contestant, batch))
            turns.reverse()
            print_tick()
        step_state.recorder = recorder
    mean = sum_over_ranks(torch.tensor(list(vars(times).values()), dtype=torch.float64)) / world.size
    if world.rank == 0:
        found = dict(zip(vars(times), mean.tolist(), strict=True))
        Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")
    shutdown()


def _turn(contestant: StrategyTrainer, batch: TokenBatch) -> float:
    """Return the seconds of one step that all ranks begin together."""
    dist.barrier()
    started = time.perf_counter()
    run_step(contestant, batch)
    if step_state.recorder is not None:
        step_state.recorder.flush()  # writing the line is part of what recording costs
    return time.perf_counter() - started


if __name__ == "__main__":
    main(sys.argv[1])
