"""What each rank of `paceline bench step` runs: ``python -m paceline.tools.bench.step.step_worker job.json``.

The job tells what to do (`time` the contestants in turn, or measure the peak `memory` of one), with which
settings, and where rank 0 writes what it found; see `paceline.tools.bench.step.step_benchmark` for the method.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.tools.bench.peak_memory import PeakMemory
from paceline.tools.bench.progress_bar import TurnBar
from paceline.tools.bench.step.comm_traffic import Traffic, count_traffic, seconds_under_way
from paceline.tools.bench.step.step_benchmark import StepSettings
from paceline.tools.bench.step.step_contestants import (
    Contestant,
    Turn,
    build,
    drift,
    random_batch,
    settle,
    step,
)
from paceline.tools.bench.step.step_strategies import Entry
from paceline.tools.bench.turn_order import turn_order
from paceline.tools.models.gpt_sizes import Size, size_of
from paceline.tools.models.token_windows import Batch
from paceline.world import World, init, shutdown

__all__ = ["main", "of_all_ranks", "take_turns", "tick", "time_contestants"]

CHECK_STEPS = 5  # steps after which parameters are compared; they also warm up
_PROFILED_STEPS = 5
_BATCHES = 8  # different batches, used in turn


def main(argv: Sequence[str]) -> None:
    """Do the job that the file ``argv[0]`` describes."""
    job = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    settings = StepSettings.from_json(job["settings"])
    torch.set_num_threads(settings.threads)
    world = init(settings.backend)
    size = size_of(job["size"])
    entries = [Entry.from_json(record) for record in job["entries"]]
    if job["kind"] == "time":
        found = time_contestants(world, settings, size, entries)
    else:
        found = _peak_memory(world, settings, size, entries[0])
    if world.rank == 0:
        Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")
    shutdown()


def tick() -> None:
    """Tell whoever follows this job that one more turn is done (`bench_harness.program.run_job`)."""
    if dist.get_rank() == 0:
        print("tick", flush=True)


def time_contestants(
    world: World, settings: StepSettings, size: Size, entries: Sequence[Entry]
) -> dict[str, Any]:
    """Return what all ranks measured, the same on every rank.

    Returns:
        ``seconds``: a list ``[entry][round][step][rank]`` of (forward, backward, optimizer, waited);
        ``drift``, ``calls``, ``nbytes``: one number per entry, the largest of all ranks;
        ``under_way``: seconds per entry in which some call was under way.
    """
    batches = _batches(world, settings, size)
    torchs = _torchs_group(world)
    contestants = [build(entry, size, world.device, settings.seed, torchs) for entry in entries]
    turns = (settings.rounds + 1) * len(entries)
    reference = next(each for each in contestants if each.entry.strategy == "ddp")
    with TurnBar(f"{size.name}, {world.size} ranks", turns, shown=world.rank == 0) as tick:
        drifts = _check(contestants, reference, batches, tick)
        for contestant in contestants:
            settle(contestant, batches[0])
        mine = take_turns(contestants, batches, settings.rounds, settings.steps, tick)
    traffic = [_traffic(contestant, batches[0], world.size) for contestant in contestants]
    under_way = [_under_way(contestant, batches[0], world.device) for contestant in contestants]
    rows = [drifts, [each.calls for each in traffic], [each.nbytes for each in traffic], under_way]
    facts = torch.tensor(rows, dtype=torch.float64, device=world.device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    names = ("drift", "calls", "nbytes", "under_way")
    return dict(zip(names, facts.tolist(), strict=True)) | {"seconds": of_all_ranks(mine, world)}


def _torchs_group(world: World) -> dist.ProcessGroup | None:
    """Return the group of torch's contestants: gloo where the world's backend is ours, else the world's."""
    if world.backend != "paceline":
        return None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank belongs to it"
    return group


def _batches(world: World, settings: StepSettings, size: Size) -> list[Batch]:
    """Return batches that differ between ranks and steps."""
    seeds = [(settings.seed * _BATCHES + at) * world.size + world.rank for at in range(_BATCHES)]
    return [random_batch(size, settings.batch_size, settings.context, seed, world.device) for seed in seeds]


def _check(
    contestants: Sequence[Contestant],
    reference: Contestant,
    batches: Sequence[Batch],
    tick: Callable[[], None],
) -> list[float]:
    """Run each contestant's first steps; return how far its parameters are from the reference's then."""
    for contestant in contestants:
        for at in range(CHECK_STEPS):
            step(contestant, batches[at % len(batches)])
        tick()
    return [drift(contestant, reference) for contestant in contestants]


def take_turns(
    contestants: Sequence[Contestant],
    batches: Sequence[Batch],
    rounds: int,
    steps: int,
    tick: Callable[[], None],
) -> torch.Tensor:
    """Let the contestants take turns; return this rank's seconds ``[entry, round, step, part]`` in float64.

    Args:
        contestants: in the order of the result. batches: used in turn.
        rounds: turns of each. steps: of a turn. tick: called after each turn.
    """
    seconds = torch.zeros(len(contestants), rounds, steps, 4, dtype=torch.float64)
    gc.collect()
    gc.freeze()  # what is there stays there, so that collecting between turns is quick
    for turn in range(rounds):
        for index in turn_order(len(contestants), turn):
            gc.collect()
            gc.disable()
            dist.barrier()
            turns = [step(contestants[index], batches[at % len(batches)]) for at in range(steps)]
            gc.enable()
            seconds[index, turn] = torch.tensor([_parts(each) for each in turns], dtype=torch.float64)
            tick()
    gc.unfreeze()
    return seconds


def of_all_ranks(mine: torch.Tensor, world: World) -> list[Any]:
    """Return ``[entry][round][step][rank][part]`` from what `take_turns` returned on each rank; all call this."""
    mine = mine.to(world.device)
    every = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(every, mine)
    return torch.stack(every, dim=3).tolist()


def _parts(turn: Turn) -> list[float]:
    return [turn.forward, turn.backward, turn.optimizer, turn.waited]


def _traffic(contestant: Contestant, batch: Batch, ranks: int) -> Traffic:
    """Return what this rank hands to communication in one step."""
    dist.barrier()
    return count_traffic(lambda: step(contestant, batch), ranks)


def _under_way(contestant: Contestant, batch: Batch, device: str) -> float:
    """Return for how many seconds of a step calls are under way, on the rank that waits least for the others."""

    def steps() -> None:
        for _ in range(_PROFILED_STEPS):
            step(contestant, batch)

    dist.barrier()
    least = torch.tensor(seconds_under_way(steps) / _PROFILED_STEPS, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.item()


def _peak_memory(world: World, settings: StepSettings, size: Size, entry: Entry) -> dict[str, Any]:
    """Return how many bytes a rank needs for training with `entry`, beyond what it had before; the largest rank's."""
    torchs = _torchs_group(world)
    warm = build(Entry("ddp", 1.0), size_of("tiny"), world.device, settings.seed, torchs)
    for batch in (random_batch(size_of("tiny"), 1, 8, seed, world.device) for seed in range(2)):
        step(warm, batch)
    del warm
    gc.collect()
    batches = _batches(world, settings, size)[:3]
    with PeakMemory(world.device) as peak:
        contestant = build(entry, size, world.device, settings.seed, torchs)
        for batch in batches:
            step(contestant, batch)
    largest = torch.tensor([peak.nbytes], dtype=torch.float64, device=world.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {"peak_nbytes": largest.item()}


if __name__ == "__main__":
    main(sys.argv[1:])
