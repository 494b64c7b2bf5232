"""Program of each rank of `paceline bench step`: ``python -m paceline.tools.bench.step.step_worker job.json``.

A job either times all strategies, interleaved, or measures the peak memory of one; see
`paceline.tools.bench.step.step_benchmark`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from paceline.tools.bench.device_clock import gather_ranks
from paceline.tools.bench.peak_memory import PeakMemory
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.rank_jobs import read_job, write_job_result
from paceline.tools.bench.step.comm_traffic import count_traffic, measure_comm_seconds
from paceline.tools.bench.step.step_benchmark import StepSettings
from paceline.tools.bench.step.step_strategies import StrategyVariant
from paceline.tools.bench.step.strategy_trainers import (
    StrategyTrainer,
    build_trainer,
    parameter_drift,
    random_batch,
    run_step,
    run_until_tuned,
)
from paceline.tools.bench.turn_statistics import turn_order
from paceline.tools.models.gpt_sizes import GptSize, gpt_size
from paceline.tools.models.token_windows import TokenBatch
from paceline.world import World, init, shutdown

__all__ = ["gather_step_seconds", "main", "print_tick", "time_interleaved", "time_strategies"]

CHECK_STEPS = 5  # steps after which parameters are compared; they also warm up
_PROFILED_STEPS = 5
_BATCHES = 8  # different batches, used in turn


def main(path: str) -> None:
    """Run the job in the file `path`."""
    job = read_job(path)
    settings = StepSettings.from_json(job["settings"])
    torch.set_num_threads(settings.threads)
    world = init(settings.backend)
    size = gpt_size(job["size"])
    variants = [StrategyVariant.from_json(record) for record in job["variants"]]
    if job["kind"] == "time":
        found = time_strategies(world, settings, size, variants)
    else:
        found = _peak_memory(world, settings, size, variants[0])
    if world.rank == 0:
        write_job_result(job, found)
    shutdown()


def print_tick() -> None:
    """Report one more finished turn to the process that started the ranks (`Lab.start_torchrun`)."""
    if dist.get_rank() == 0:
        print("tick", flush=True)


def time_strategies(
    world: World, settings: StepSettings, size: GptSize, variants: Sequence[StrategyVariant]
) -> dict[str, Any]:
    """Return the measurements of all ranks, the same on every rank.

    Returns:
        ``seconds``: a list ``[variant][round][step][rank]`` of (forward, backward, optimizer, waited);
        ``drift``, ``calls``, ``nbytes``: one number per variant, the largest of all ranks;
        ``comm_seconds``: per variant, the seconds of a step in which any collective was pending.
    """
    batches = _batches(world, settings, size)
    torch_group = _torch_group(world)
    trainers = [
        build_trainer(variant, size, world.device, settings.seed, torch_group) for variant in variants
    ]
    reference = next(each for each in trainers if each.variant.strategy == "ddp")
    turns = (settings.rounds + 1) * len(variants)
    with ProgressBar(f"{size.name}, {world.size} ranks", turns, shown=world.rank == 0) as advance:
        for trainer in trainers:
            for at in range(CHECK_STEPS):
                run_step(trainer, batches[at % len(batches)])
            advance()
        drifts = [parameter_drift(trainer, reference) for trainer in trainers]
        for trainer in trainers:
            run_until_tuned(trainer, batches[0])
        mine = time_interleaved(trainers, batches, settings.rounds, settings.steps, advance)
    facts: dict[str, list[float]] = {"drift": drifts, "calls": [], "nbytes": []}
    for trainer in trainers:
        dist.barrier()
        traffic = count_traffic(lambda trainer=trainer: run_step(trainer, batches[0]), world.size)
        facts["calls"].append(traffic.calls)
        facts["nbytes"].append(traffic.nbytes)
    facts["comm_seconds"] = [_comm_seconds(trainer, batches[0], world.device) for trainer in trainers]
    table = torch.tensor(list(facts.values()), dtype=torch.float64, device=world.device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(facts, table.tolist(), strict=True)) | {"seconds": gather_step_seconds(mine, world)}


def _torch_group(world: World) -> dist.ProcessGroup | None:
    """Return the group of torch's strategies: gloo if the world's backend is paceline, else the world's."""
    if world.backend != "paceline":
        return None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank belongs to it"
    return group


def _batches(world: World, settings: StepSettings, size: GptSize) -> list[TokenBatch]:
    """Return batches that differ between ranks and steps."""
    seeds = [(settings.seed * _BATCHES + at) * world.size + world.rank for at in range(_BATCHES)]
    return [random_batch(size, settings.batch_size, settings.context, seed, world.device) for seed in seeds]


def time_interleaved(
    trainers: Sequence[StrategyTrainer],
    batches: Sequence[TokenBatch],
    rounds: int,
    steps: int,
    advance: Callable[[], None],
) -> torch.Tensor:
    """Run the trainers interleaved; return this rank's seconds ``[trainer, round, step, part]`` in float64.

    Args:
        trainers: in the order of the result.
        batches: used in turn.
        rounds: turns of each trainer.
        steps: steps of a turn.
        advance: called after each turn.
    """
    seconds = torch.zeros(len(trainers), rounds, steps, 4, dtype=torch.float64)
    gc.collect()
    gc.freeze()  # objects that exist now are not scanned again, so that collecting between turns is quick
    for turn in range(rounds):
        for index in turn_order(len(trainers), turn):
            gc.collect()
            gc.disable()
            dist.barrier()
            timed = [run_step(trainers[index], batches[at % len(batches)]) for at in range(steps)]
            gc.enable()
            seconds[index, turn] = torch.tensor([astuple(step) for step in timed], dtype=torch.float64)
            advance()
    gc.unfreeze()
    return seconds


def gather_step_seconds(mine: torch.Tensor, world: World) -> list[Any]:
    """Return ``[trainer][round][step][rank][part]`` from the result of `time_interleaved` on each rank."""
    return gather_ranks(mine, world.device).movedim(0, 3).tolist()


def _comm_seconds(trainer: StrategyTrainer, batch: TokenBatch, device: str) -> float:
    """Return the communication time of a step on the rank that waits least for the others."""

    def steps() -> None:
        for _ in range(_PROFILED_STEPS):
            run_step(trainer, batch)

    dist.barrier()
    least = torch.tensor(measure_comm_seconds(steps) / _PROFILED_STEPS, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.item()


def _peak_memory(
    world: World, settings: StepSettings, size: GptSize, variant: StrategyVariant
) -> dict[str, Any]:
    """Return the bytes that training needs beyond those of the process; the largest rank's.

    The process has trained a tiny model in the same way, so code is loaded and libraries have their buffers.
    """
    torch_group = _torch_group(world)
    warm = build_trainer(variant, gpt_size("tiny"), world.device, settings.seed, torch_group)
    for batch in (random_batch(gpt_size("tiny"), 1, 8, seed, world.device) for seed in range(2)):
        run_step(warm, batch)
    del warm
    gc.collect()
    batches = _batches(world, settings, size)[:3]
    with PeakMemory(world.device) as peak:
        trainer = build_trainer(variant, size, world.device, settings.seed, torch_group)
        trainer.optimizer.register_step_pre_hook(lambda *_: peak.begin_part())
        for batch in batches:
            peak.begin_part()
            run_step(trainer, batch)
    largest = torch.tensor([peak.nbytes], dtype=torch.float64, device=world.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {"peak_nbytes": largest.item()}


if __name__ == "__main__":
    main(sys.argv[1])
