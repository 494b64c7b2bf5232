"""All-reduce between hosts behind a slow switch: paceline beside gloo, in time and in bytes.

    python benchmarks/netlab/netlab.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/netlab/netlab.py chart
    python benchmarks/netlab/netlab.py table

The rates are those of the links; `--congestion` is TCP's way to find them, if it is to be another than this machine's.

Both backends live in the same processes and take turns ([Note: turns] in `paceline.tools.bench.turn_statistics`);
every result is checked. gloo at its best is, at each size, the faster of one call and of two concurrent halves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.ranks import WIRE_OVERHEAD, interface_bytes
from bench_harness.turns import InterleavedTimes, take_turns
from paceline._core.format import format_count
from paceline._core.units import parse_bytes, parse_rate
from paceline.errors import UsageError
from paceline.testing.netlab.lab_network import InterfaceBytes
from paceline.tools.bench.collectives import exact_buffers
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.report.charts.training_charts import Chart, ChartLine, time_and_ratio_chart

GLOO, HALVES, BEST = "gloo", "gloo, two halves", "gloo at its best"
ORDINARY, ARENA = "paceline", "paceline, arena"
LABELS = {ARENA: "paceline, arena", BEST: "gloo", ORDINARY: "paceline, ordinary"}
HALVES_FROM_NBYTES = 1_000_000
LARGE_NBYTES = 100_000_000
TCP = Path("/proc/sys/net/ipv4/tcp_congestion_control")

bench = Benchmark(__file__)


def names_at(nbytes: int) -> list[str]:
    """Return what is timed at a size."""
    return [GLOO, *([HALVES] if nbytes >= HALVES_FROM_NBYTES else []), ORDINARY, ARENA]


@bench.run
def run(
    hosts: Annotated[int, Option(min=2, help="Hosts around the switch.")] = 2,
    ranks: Annotated[int, Option(min=1, help="Ranks on each host.")] = 2,
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "1Gbit/s",
    sizes: Annotated[str, Option(help="Buffer sizes, by commas.")] = "64kB,1MB,10MB,100MB",
    rounds: Annotated[int | None, Option(min=1, help="Turns of each; default: 6 to 20 by size.")] = None,
    congestion: Annotated[
        str | None, Option(help="TCP's congestion control, such as reno; default: this machine's.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time an all-reduce of float32 between hosts, by paceline and by gloo, and count the bytes."""
    chosen = [parse_bytes(text) // 4 * 4 for text in sizes.split(",")]
    if min(chosen) < 4:
        raise UsageError(f"--sizes {sizes}: nothing to measure", remedy="give sizes that hold a float32")
    allowed = TCP.with_name("tcp_allowed_congestion_control").read_text().split()
    if congestion not in (None, *allowed):
        raise UsageError(f"--congestion {congestion}: not for hosts of a lab", remedy=f"valid: {allowed}")
    path = bench.output(
        json_file, "-".join(filter(None, [f"{hosts}x{ranks}", rate.removesuffix("/s"), congestion]))
    )
    plan = [(nbytes, *rounds_and_calls(nbytes, rounds)) for nbytes in chosen]
    turns = sum(2 + count for _, count, _ in plan)
    rows = bench.start_ranks(
        {"plan": plan, "congestion": congestion},
        hosts,
        rate=rate,
        per_host=ranks,
        turns=turns,
        title=f"all-reduce, {ranks} ranks a host",
    )
    settings: dict[str, Any] = {
        "hosts": hosts,
        "ranks_per_host": ranks,
        "rate": rate,
        "dtype": "float32",
        "threads": 1,
    }
    settings["congestion"] = congestion or TCP.read_text().strip()
    steps = [dict(zip(("nbytes", "rounds", "calls"), each, strict=True)) for each in plan]
    print(figures(bench.write(path, "all-reduce-between-hosts", settings | {"plan": steps}, rows=rows)))


def rounds_and_calls(nbytes: int, rounds: int | None) -> tuple[int, int]:
    """Return the number of rounds at a size, and of calls in a turn."""
    if nbytes >= LARGE_NBYTES:
        return rounds or 6, 2
    small = nbytes < LARGE_NBYTES // 10
    return rounds or (20 if small else 10), min(10, max(3, LARGE_NBYTES // 10 // nbytes))


# ---------------------------------------------------------------------- a rank


@bench.rank
def rank(job: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Form a paceline group and a gloo group of the same processes, and measure all sizes."""
    if job["congestion"]:
        TCP.write_text(job["congestion"])  # of this host's network namespace
    dist.init_process_group("paceline")
    gloo = dist.new_group(backend="gloo")
    rows = [measure(gloo, *size) for size in job["plan"]]
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return rows if first else None


Contestant = tuple[Callable[[], object], Callable[[], object], torch.Tensor]
"""The all-reduce; the barrier of the same library, at which a call starts; the buffer that is reduced."""


def contestants(gloo: dist.ProcessGroup, nbytes: int) -> dict[str, Contestant]:
    """Return the all-reduces by name, on two buffers: an ordinary tensor, and one that the backend allocated."""
    ordinary, arena = torch.zeros(nbytes // 4), dist.group.WORLD.allocate_tensor(nbytes // 4)
    halves = ordinary.chunk(2)

    def gloo_barrier() -> None:
        dist.barrier(group=gloo)

    def reduce_halves() -> None:
        for work in [dist.all_reduce(half, group=gloo, async_op=True) for half in halves]:
            work.wait()

    found = {
        GLOO: (lambda: dist.all_reduce(ordinary, group=gloo), gloo_barrier, ordinary),
        HALVES: (reduce_halves, gloo_barrier, ordinary),
        ORDINARY: (lambda: dist.all_reduce(ordinary), dist.barrier, ordinary),
        ARENA: (lambda: dist.all_reduce(arena), dist.barrier, arena),
    }
    return {name: found[name] for name in names_at(nbytes)}


def turn(name: str, contestant: Contestant, calls: int) -> tuple[list[float], InterfaceBytes]:
    """Return the seconds of each of `calls` on this rank, and what its host sent and received meanwhile."""
    run, barrier, buffer = contestant
    buffer.fill_(1.0)
    dist.barrier()
    before, seconds = interface_bytes(), []
    for _ in range(calls):
        barrier()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    dist.barrier()
    passed = interface_bytes() - before
    if not exact_buffers.all_equal(buffer, float(dist.get_world_size()) ** calls):
        raise RuntimeError(f"{name} is wrong at {buffer.nbytes} bytes after {calls} calls")
    return seconds, passed


def measure(gloo: dist.ProcessGroup, nbytes: int, rounds: int, calls: int) -> dict[str, Any]:
    """Return the times at one size, and the bytes of the host that sent or received most."""
    found = contestants(gloo, nbytes)
    for name, (run, _, buffer) in found.items():
        exact_buffers.write_pattern(buffer, dist.get_rank())
        run()
        if not exact_buffers.holds_sum(buffer, dist.get_world_size()):
            raise RuntimeError(f"{name} is wrong at {nbytes} bytes")
    bench.tick()
    turns = take_turns(
        {name: lambda name=name: turn(name, found[name], calls) for name in found}, rounds, bench.tick
    )
    names = list(found)
    seconds = torch.tensor([[each[0] for each in turns[name]] for name in names], dtype=torch.float64)
    passed = torch.tensor(
        [[[each[1].sent / calls, each[1].received / calls] for each in turns[name]] for name in names],
        dtype=torch.float64,
    )
    for values in (seconds, passed):
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=gloo)
    times = InterleavedTimes.of(nbytes, dict(zip(names, seconds.tolist(), strict=True)))
    counted = {
        name: [median(way) for way in zip(*rows, strict=True)]
        for name, rows in zip(names, passed.tolist(), strict=True)
    }
    return times.with_best(BEST, [GLOO, HALVES]).to_json() | {"passed": counted}


# ---------------------------------------------------------------------- results


def times_of(row: dict[str, Any]) -> InterleavedTimes:
    """Return the times of a row of the result."""
    return InterleavedTimes(row["nbytes"], row["seconds"], row["rounds"])


def figures(result: dict[str, Any]) -> str:
    """Return the table of a result: a row per size."""
    rows = []
    for row in result["rows"]:
        times, nbytes = times_of(row), row["nbytes"]
        rows.append(
            [
                f"{format_count(nbytes)}B",
                *(f"{1e3 * times.seconds[name]:.4g}" for name in (BEST, ORDINARY, ARENA)),
                *(str(times.ratio(BEST, name)) for name in (ORDINARY, ARENA)),
                *(f"{max(row['passed'][name]) / nbytes:.3f}" for name in (GLOO, ARENA)),
            ]
        )
    hosts, per_host = result["settings"]["hosts"], result["settings"]["ranks_per_host"]
    least = [f"{2 * (count - 1) / count:g}" for count in (hosts * per_host, hosts)]
    titles = ["bytes", "gloo, ms", "paceline, ordinary, ms", "paceline, arena, ms"]
    titles += ["gloo ÷ ordinary", "gloo ÷ arena", "gloo sends", "paceline sends"]
    return table(titles, [*rows, ["expected", *[""] * 5, *least]])


def link_figures(results: list[dict[str, Any]]) -> str:
    """Return the table of the largest buffer of each result: times, and how much of the wire they use."""
    rows = []
    for result in results:
        times, settings = times_of(result["rows"][-1]), result["settings"]
        hosts, rate = settings["hosts"], settings["rate"]
        least = 2 * (hosts - 1) / hosts * times.nbytes * WIRE_OVERHEAD / parse_rate(rate)
        cells = [str(hosts), rate, settings["congestion"], f"{format_count(times.nbytes)}B"]
        cells += [f"{times.seconds[name]:.3f}" for name in (BEST, ORDINARY)]
        cells += [str(times.ratio(BEST, ORDINARY))]
        rows.append([*cells, *(f"{least / times.seconds[name]:.3f}" for name in (BEST, ORDINARY))])
    titles = ["hosts", "links", "TCP", "bytes", "gloo, s", "paceline, s", "gloo ÷ paceline"]
    return table([*titles, "gloo's share of the wire", "paceline's"], rows, words=3)


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md."""
    alone = list(bench.find("*x1-*").values())
    return {"figures": figures(bench.read("2x2-1Gbit")), "links": link_figures(alone)}


@bench.charts
def charts() -> dict[str, Chart]:
    """Return a chart per result of several sizes: time against size, and the speed-up over gloo."""
    drawn = {}
    several_sizes = {name: each for name, each in bench.find().items() if len(each["rows"]) > 1}
    for name, result in several_sizes.items():
        rows, settings = [times_of(row) for row in result["rows"]], result["settings"]
        lines = {
            key: ChartLine(label, [(row.nbytes, row.seconds[key]) for row in rows])
            for key, label in LABELS.items()
        }
        ratios = [
            ChartLine(label, [(row.nbytes, row.ratio(BEST, key).median) for row in rows])
            for key, label in LABELS.items()
            if key != BEST
        ]
        title = (
            f"All-reduce of float32, {settings['hosts']} hosts × {settings['ranks_per_host']} ranks, "
            f"links of {settings['rate']}"
        )
        drawn[f"{name}.png"] = time_and_ratio_chart(
            list(lines.values()), ratios, title=title, ratio="times faster than gloo"
        )
    return drawn


if __name__ == "__main__":
    bench.main()
