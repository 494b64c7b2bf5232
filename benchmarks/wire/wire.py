"""Compare gloo's reduce-scatter and all-gather with the point-to-point ones of `paceline.parallel.comm`.

    torchrun --nproc-per-node 2 benchmarks/wire/wire.py

Writes wire.json beside this file: median milliseconds (slowest rank) over rounds in which all take turns.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import paceline
from paceline._core.files import write_json
from paceline.parallel.comm import Comm
from paceline.tools.result_files import result_head

SIZES_MIB, ROUNDS, CALLS = (1, 4, 16), 15, 4


def contestants(flat: torch.Tensor, wire: Comm) -> dict[str, Callable[[], object]]:
    """Return what is timed, all on the same buffer."""
    own = flat.chunk(wire.size)[wire.rank]
    part = torch.empty_like(own)
    ahead = Comm()  # with tags of its own: its receives stay posted while others have their turn
    posted = ahead.post_part_receives(flat)

    def gather_posted_ahead() -> None:
        """As the sharded optimizer does: the receives of the next gather are posted before this one is sent."""
        nonlocal posted
        expected, posted = posted, ahead.post_part_receives(flat)
        ahead.all_gather(flat, expected).wait()

    return {
        "gloo all-reduce": lambda: dist.all_reduce(flat),
        "gloo reduce-scatter": lambda: dist.reduce_scatter_tensor(part, flat),
        "our reduce-scatter": lambda: wire.reduce_scatter(flat).wait(),
        "gloo all-gather": lambda: dist.all_gather_into_tensor(flat, own),
        "our all-gather": lambda: wire.all_gather(flat).wait(),
        "our all-gather, posted ahead": gather_posted_ahead,
    }


def milliseconds(run: Callable[[], object]) -> float:
    """Return what one call takes on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        run()
    spent = torch.tensor((time.perf_counter() - started) / CALLS * 1e3)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item()


def main() -> None:
    """Time every size and write the table."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    world = paceline.init("gloo", device="cpu")
    rows = []
    for size in SIZES_MIB:
        runs = contestants(torch.zeros(size << 18), Comm())
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(ROUNDS + 1):
            for name, run in runs.items():
                spent = milliseconds(run)
                if round_:  # the first is warm-up
                    times[name].append(spent)
        rows.append({"mib": size} | {name: round(median(spent), 2) for name, spent in times.items()})
    if world.rank == 0:
        command = f"torchrun --nproc-per-node {world.size} benchmarks/wire/wire.py"
        result = result_head("wire") | {"command": command, "ranks": world.size, "milliseconds": rows}
        write_json(Path(__file__).with_name("wire.json"), result)
        print(json.dumps(rows, indent=1))
    paceline.shutdown()


if __name__ == "__main__":
    main()
