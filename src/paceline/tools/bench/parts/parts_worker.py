"""What each rank of `paceline bench parts` runs: ``python -m paceline.tools.bench.parts.parts_worker job.json``.

The job tells the settings, the source, which profile there is already, and where rank 0 writes its entries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import Source
from paceline.tools.bench.parts.parts_benchmark import measure_parts
from paceline.tools.bench.parts.parts_settings import PartsSettings
from paceline.tools.bench.parts.workload import Workload, reference, user_defined
from paceline.tools.models.gpt_sizes import size_of
from paceline.world import init, shutdown

__all__ = ["main", "take_part"]


def main(argv: Sequence[str]) -> None:
    """Do the job that the file ``argv[0]`` describes."""
    job = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    settings, source = PartsSettings(**job["settings"]), Source(**job["source"])
    found = take_part(settings, Profile.from_json(job["earlier"]), source)
    if found is not None:
        found.save(job["out"])


def take_part(settings: PartsSettings, earlier: Profile, source: Source) -> Profile | None:
    """Measure as one rank of a world that a launcher started; return the entries on rank 0, None on the others.

    Args:
        settings: the same on all ranks. earlier: on rank 0, the profile that there is. source: what asked for it.
    """
    torch.set_num_threads(settings.threads)
    world = init(settings.backend)
    found = measure_parts(world, settings, _workload(settings, world.device), earlier, source)
    shutdown()
    return found if world.rank == 0 else None


def _workload(settings: PartsSettings, device: str) -> Workload:
    if settings.workload is not None:
        return user_defined(settings.workload)
    assert settings.size is not None, "settings have one of both"
    return reference(size_of(settings.size), settings.batch_size, settings.context, device)


if __name__ == "__main__":
    main(sys.argv[1:])
