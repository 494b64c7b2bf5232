"""Times a real all-reduce between ranks of this machine.

    python -m paceline.tools.diagnostics.loopback_all_reduce RESULT.json

Run as the program of every rank; rank 0 writes the result.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

from paceline._core.units import MIB
from paceline.world.machine_facts import LoopbackTiming

__all__ = ["main", "measure_loopback"]

_REPEATS = 7


def measure_loopback(nbytes: int = 25 * MIB) -> LoopbackTiming:
    """Return the times of all-reduces of 4 and `nbytes` bytes; a collective of the current world."""
    import torch
    import torch.distributed as dist

    def median(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
        times = []
        for _ in range(_REPEATS + 1):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(values, group=group)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])  # the first one connects

    ranks, rank = dist.get_world_size(), dist.get_rank()
    check = torch.full((5,), float(rank + 1))
    dist.all_reduce(check)
    right = bool((check == ranks * (ranks + 1) / 2).all())
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup), "every rank belongs to it"
    large = torch.zeros(nbytes // 4)
    shared = dist.group.WORLD.supports_tensor_alloc(large.device)  # type: ignore[union-attr]
    return LoopbackTiming(
        ranks=ranks,
        right=right,
        shared=shared,
        small_seconds=median(large[:1]),
        nbytes=nbytes,
        seconds=median(large),
        gloo_seconds=median(large, gloo),
    )


def main(result: Path) -> None:
    """Measure as a rank of the launched world; rank 0 writes the result."""
    from paceline.world import init, shutdown

    world = init("paceline", device="cpu", timeout=60.0)
    measured = measure_loopback()
    if world.rank == 0:
        result.write_text(json.dumps(asdict(measured)))
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
