"""gloo's reduce-scatter and all-gather beside the point-to-point ones of `gradient_collectives`, on two ranks.

    python benchmarks/wire/wire.py run

Median milliseconds on the slowest rank, over rounds in which all take turns.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import take_turns
from paceline.parallel.gradient_collectives import Comm
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption

SIZES_MIB, CALLS = (1, 4, 16), 4

bench = Benchmark(__file__)


@bench.run
def run(
    ranks: Annotated[int, Option(min=2, help="Ranks on this machine.")] = 2,
    rounds: Annotated[int, Option(min=1, help="Turns of each.")] = 15,
    json_file: JsonOption = None,
) -> None:
    """Time all sizes."""
    path = bench.output(json_file, "wire")
    rows = bench.start_ranks({"rounds": rounds}, ranks)
    bench.write(path, "wire", {"rounds": rounds, "calls": CALLS}, ranks=ranks, milliseconds=rows)
    print(table(list(rows[0]), [list(map(str, row.values())) for row in rows], words=0))


@bench.rank
def rank(job: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Time all sizes as a rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    world, rounds, rows = paceline.init("gloo", device="cpu"), job["rounds"], []
    with ProgressBar("rounds", len(SIZES_MIB) * (rounds + 1), shown=world.rank == 0) as tick:
        for size in SIZES_MIB:
            variants = variants_on(torch.zeros(size << 18), Comm())
            turns = {name: lambda call=call: milliseconds(call) for name, call in variants.items()}
            times = take_turns(turns, rounds, tick, order=lambda count, _: range(count))
            rows.append({"mib": size} | {name: round(median(each), 2) for name, each in times.items()})
    paceline.shutdown()
    return rows if world.rank == 0 else None


def variants_on(flat: torch.Tensor, wire: Comm) -> dict[str, Callable[[], object]]:
    """Return what is timed, all on the same buffer."""
    own = flat.chunk(wire.size)[wire.rank]
    part = torch.empty_like(own)
    ahead = Comm()  # with tags of its own: its receives stay posted during the turns of others
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


def milliseconds(call: Callable[[], object]) -> float:
    """Return the time of one call on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = torch.tensor((time.perf_counter() - started) / CALLS * 1e3)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item()


if __name__ == "__main__":
    bench.main()
