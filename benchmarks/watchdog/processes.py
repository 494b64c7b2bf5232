"""What the watchdog of a rank costs with real sockets: the leader of eight hosts, the leaders and all other ranks.

    python benchmarks/watchdog/processes.py run
    python benchmarks/watchdog/processes.py table

72 processes on this machine watch each other as nine hosts of eight ranks, and do nothing else. The first has as many
neighbours as the busiest rank of a world of any size.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.watchdog_processes import watchdog_core_shares
from paceline.tools.cli.shared_options import JsonOption

RANKS, PER_HOST = 72, 8

bench = Benchmark(__file__)


@bench.run
def run(
    seconds: Annotated[float, Option(help="Seconds in which CPU time is counted.")] = 20.0,
    json_file: JsonOption = None,
) -> None:
    """Measure the CPU time of all watchdogs at once."""
    path = bench.output(json_file, "processes")
    shares = watchdog_core_shares(RANKS, PER_HOST, seconds)
    settings = {"ranks": RANKS, "ranks_per_host": PER_HOST, "seconds": seconds}
    bench.write(path, "watch-processes", settings, core_shares=shares)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a row per kind of rank."""
    shares = bench.read("processes")["core_shares"]
    kinds = {
        "the first leader, to whom eight report": shares[:1],
        "other leaders": shares[PER_HOST::PER_HOST],
        "other ranks": [each for rank, each in enumerate(shares) if rank % PER_HOST],
    }
    rows = [[name, str(len(each)), f"{median(each):.2%}", f"{max(each):.2%}"] for name, each in kinds.items()]
    return {"processes": table(["rank", "number", "of a core, median", "most"], rows, words=1)}


if __name__ == "__main__":
    bench.main()
