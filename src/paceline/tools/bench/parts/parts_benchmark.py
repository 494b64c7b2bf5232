"""All parts of a step measured one after another, on every rank: what comes out is a profile with their entries."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import Contention, ExchangeCost, ModelStep, Source
from paceline.parallel.comm import Comm
from paceline.tools.bench.parts.compute_times_of_model import Wrapped, measure_model
from paceline.tools.bench.parts.contention import measure_contention
from paceline.tools.bench.parts.exchange_times import Exchanger, measure_points, priced, sizes_up_to
from paceline.tools.bench.parts.parts_settings import PartsSettings
from paceline.tools.bench.parts.workload import Workload
from paceline.tools.bench.progress_bar import TurnBar
from paceline.world import World

__all__ = ["measure_parts"]


def measure_parts(
    world: World, settings: PartsSettings, workload: Workload, earlier: Profile, source: Source
) -> Profile:
    """Return a profile of what was measured; all ranks call it, and rank 0's is the one to keep.

    Args:
        world: this rank's place; its default group carries Paceline's exchanges.
        settings: how to measure, the same on all ranks.
        workload: what is trained.
        earlier: a profile whose exchanges by other numbers of ranks join the fits; only rank 0's counts.
        source: what asked for it.
    """
    exchangers = _exchangers(world, torchs=settings.torch)
    gc.collect()
    gc.freeze()  # what is there stays there, so that collecting is quick
    try:
        step = measure_model(workload, world.device, settings.steps, source)
        sizes = sizes_up_to(step.nbytes)
        turns = len(sizes) * sum(len(each.ops) for each in exchangers)
        with TurnBar(
            f"exchanges, {world.size} ranks, {settings.network}", turns, shown=world.rank == 0
        ) as tick:
            costs = _costs(exchangers, sizes, settings, earlier.exchanges, source, tick)
        wrapped = Wrapped(workload, world.device)
        beside = [
            _contention(each, op, wrapped, step, settings, source) for each in exchangers for op in each.ops
        ]
    finally:
        gc.unfreeze()
    return Profile(exchanges=tuple(costs), models=(step,), contentions=tuple(beside))


def _exchangers(world: World, *, torchs: bool) -> list[Exchanger]:
    """Return who makes exchanges: the engine on the world's group, torch on gloo where the world's backend is ours."""
    made = [Exchanger("paceline", world.backend, Comm(), world.device)]
    if torchs:
        group = dist.new_group(backend="gloo") if world.backend == "paceline" else None
        assert not isinstance(group, int), "every rank belongs to it"
        made.append(Exchanger("torch", "gloo" if group else world.backend, Comm(group), world.device))
    return made


def _costs(
    exchangers: Sequence[Exchanger],
    sizes: Sequence[int],
    settings: PartsSettings,
    earlier: Sequence[ExchangeCost],
    source: Source,
    tick: Callable[[], None],
) -> list[ExchangeCost]:
    costs = []
    for exchanger in exchangers:
        points = measure_points(exchanger, sizes, settings.seconds, tick)
        costs += [
            priced(key, exchanger.backend, settings.network, of_key, earlier, source)
            for key, of_key in points.items()
        ]
    return costs


def _contention(
    exchanger: Exchanger, op: str, wrapped: Wrapped, step: ModelStep, settings: PartsSettings, source: Source
) -> Contention:
    found = measure_contention(exchanger, op, wrapped, step, settings.network, settings.rounds, source)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found
