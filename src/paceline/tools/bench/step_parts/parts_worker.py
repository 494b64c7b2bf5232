"""Program of each rank of `paceline bench parts`.

``python -m paceline.tools.bench.step_parts.parts_worker job.json``
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist

from paceline._core.json_codec import decode
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import ExchangeCost, Source
from paceline.parallel.gradient_collectives import Comm
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.rank_jobs import read_job, write_job_result
from paceline.tools.bench.step_parts.contention import measure_contention
from paceline.tools.bench.step_parts.exchange_times import (
    Exchanger,
    fit_exchange_cost,
    measure_points,
    sizes_up_to,
)
from paceline.tools.bench.step_parts.model_compute_times import WrappedModel, measure_model_step
from paceline.tools.bench.step_parts.parts_settings import PartsSettings
from paceline.tools.bench.step_parts.training_workload import Workload, reference_workload, user_workload
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.world import World, init, shutdown

__all__ = ["main", "measure_as_rank", "measure_parts"]


def main(path: str) -> None:
    """Run the job in the file `path`; rank 0 writes a profile."""
    job = read_job(path)
    settings = decode(job["settings"], PartsSettings, "settings")
    found = measure_as_rank(settings, Profile.from_json(job["earlier"]), Source(**job["source"]))
    if found is not None:
        write_job_result(job, found.to_json())


def measure_as_rank(settings: PartsSettings, earlier: Profile, source: Source) -> Profile | None:
    """Measure as one rank of a world that a launcher started; return the entries on rank 0, None on the others.

    Args:
        settings: the same on all ranks.
        earlier: as for `measure_parts`.
        source: as for `measure_parts`.
    """
    torch.set_num_threads(settings.threads)
    world = init(settings.backend)
    if settings.workload is not None:
        workload = user_workload(settings.workload)
    else:
        assert settings.size is not None, "settings have one of both"
        size = gpt_size(settings.size)
        workload = reference_workload(size, settings.batch_size, settings.context, world.device)
    found = measure_parts(world, settings, workload, earlier, source)
    shutdown()
    return found if world.rank == 0 else None


def measure_parts(
    world: World, settings: PartsSettings, workload: Workload, earlier: Profile, source: Source
) -> Profile:
    """Return a profile of all parts of a step, of which rank 0's is to be kept; a collective.

    Args:
        world: this rank's place; its default group carries Paceline's exchanges.
        settings: the same on all ranks.
        workload: the training.
        earlier: on rank 0, the profile whose exchanges with other numbers of ranks are fitted together with the new.
        source: records how the measurement was started.
    """
    exchangers = _exchangers(world, with_torch=settings.torch)
    gc.collect()
    gc.freeze()  # objects that exist now are not scanned again, so that collecting is quick
    try:
        step = measure_model_step(workload, world.device, settings.steps, source)
        sizes, costs = sizes_up_to(step.nbytes), list[ExchangeCost]()
        total = len(sizes) * sum(len(each.ops) for each in exchangers)
        title = f"exchanges, {world.size} ranks, {settings.network}"
        with ProgressBar(title, total, shown=world.rank == 0) as advance:
            for each in exchangers:
                points = measure_points(each, sizes, settings.seconds, advance)
                options = {"backend": each.backend, "network": settings.network, "source": source}
                costs += [
                    fit_exchange_cost(key, of_key, earlier=earlier.exchanges, **options)
                    for key, of_key in points.items()
                ]
        wrapped, contentions = WrappedModel(workload, world.device), []
        options = {"network": settings.network, "rounds": settings.rounds, "source": source}
        for each in exchangers:
            for op in each.ops:
                contentions.append(measure_contention(each, op, wrapped, step, **options))
                if world.device != "cpu":
                    torch.get_device_module(world.device).empty_cache()
    finally:
        gc.unfreeze()
    return Profile(exchanges=tuple(costs), models=(step,), contentions=tuple(contentions))


def _exchangers(world: World, *, with_torch: bool) -> list[Exchanger]:
    """Return the callers: the engine on the world's group, torch on gloo if the world's backend is paceline."""
    made = [Exchanger("paceline", world.backend, Comm(), world.device)]
    if with_torch:
        group = dist.new_group(backend="gloo") if world.backend == "paceline" else None
        assert not isinstance(group, int), "every rank belongs to it"
        made.append(Exchanger("torch", "gloo" if group else world.backend, Comm(group), world.device))
    return made


if __name__ == "__main__":
    main(sys.argv[1])
