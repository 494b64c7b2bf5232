"""Training steps of a small reference GPT by several strategies, timed in turns by the ranks of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from paceline.tools.bench.step.step_strategies import StrategyVariant
from paceline.tools.bench.step.step_worker import gather_step_seconds, time_interleaved
from paceline.tools.bench.step.strategy_trainers import StrategyTrainer, build_trainer, run_step
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import TokenBatch
from paceline.world import World

__all__ = ["GPT_11M", "build_trainers", "time_trainers"]

GPT_11M = GptSize("11m", 384, 1536, 6, 6, vocabulary=1000, context=128)

_WARM_UP = 2  # the first step builds the buckets, the second those of torch's DDP


def build_trainers(variants: Sequence[StrategyVariant], size: GptSize, world: World) -> list[StrategyTrainer]:
    """Return a trainer per variant; torch's strategies use gloo where the world's backend is paceline."""
    group = dist.new_group(backend="gloo") if world.backend == "paceline" else None
    assert not isinstance(group, int), "every rank belongs to it"
    return [build_trainer(variant, size, world.device, 0, group) for variant in variants]


def time_trainers(
    trainers: Sequence[StrategyTrainer],
    batch: TokenBatch,
    world: World,
    *,
    rounds: int,
    steps: int,
    tick: Callable[[], None],
) -> list[Any]:
    """Return ``[trainer][round][step][rank]`` of seconds (forward, backward, optimizer, waited), after a warm-up.

    Args:
        trainers: in the order of the result.
        batch: of all steps.
        world: of the ranks.
        rounds: turns of each trainer. steps: of a turn.
        tick: called after the warm-up of each trainer and after each turn.
    """
    for trainer in trainers:
        for _ in range(_WARM_UP):
            run_step(trainer, batch)
        tick()
    return gather_step_seconds(time_interleaved(trainers, [batch], rounds, steps, tick), world)
