"""What watching 1000 and 10,000 ranks costs each of them, and whether faults are named rightly: in virtual time.

    python benchmarks/watchdog/scale.py run --ranks 1000
    python benchmarks/watchdog/scale.py run --ranks 10000 --seconds 2
    python benchmarks/watchdog/scale.py table

Hosts have 8 ranks. The state machine of every rank is the real one; connections, processes and clocks are simulated
(`bench_harness.watchdog_simulation`). Bytes are those of all frames. CPU time is measured in the groups at both ends of
the tree, and does not include system calls.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.watchdog_simulation import WatchdogSimulation
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption

PER_HOST = 8
STALL, LOST = 10.0, 6.0
HOST = 3

FAULTS: dict[str, tuple[Callable[[WatchdogSimulation], object], list[str]]] = {
    "a rank raises": (lambda world: world.fail(faulty(world)), ["raised"]),
    "a leader is killed": (lambda world: world.end(faulty(world)), ["gone"]),
    "the first leader is killed": (lambda world: world.end(world.ranks[0]), ["gone"]),
    "a host's ranks are killed": (lambda world: [world.end(each) for each in on_host(world)], ["gone"]),
    "a leader is stopped": (lambda world: world.stop(faulty(world)), ["stopped"]),
    "a host is cut off": (lambda world: world.cut_off([f"host{HOST}"]), ["unreachable", "cut off"]),
    "a rank stands still": (lambda world: world.stall(faulty(world)), ["stalled"]),
}
LARGE = ("a rank raises", "a leader is killed", "a rank stands still")
"""Faults of the largest world, in which each takes long."""

bench = Benchmark(__file__)


def faulty(world: WatchdogSimulation) -> Any:
    """Return the first rank of the host that has the fault."""
    return on_host(world)[0]


def on_host(world: WatchdogSimulation) -> list[Any]:
    """Return the ranks of the host that has the fault."""
    return [each for each in world.ranks if each.host == f"host{HOST}"]


@bench.run
def run(
    size: Annotated[int, Option("--ranks", min=80, help="Ranks of the world.")] = 1000,
    seconds: Annotated[float, Option(help="Virtual seconds in which costs are counted.")] = 4.0,
    json_file: JsonOption = None,
) -> None:
    """Count the costs in a healthy world, then let each fault happen in it."""
    path = bench.output(json_file, f"scale-{size}")
    logging.disable()
    names = FAULTS if size <= 1000 else LARGE
    world = healthy_world(size)
    costs = {"tree_depth": world.groups.depth} | count_costs(world, seconds)
    faults: list[dict[str, Any]] = []
    fork = multiprocessing.get_context("fork")  # each fault in a copy of the same world
    with ProgressBar("scale", len(names)) as tick:
        for name in names:
            ours, theirs = fork.Pipe()
            process = fork.Process(
                target=lambda pipe, name: pipe.send(measure_fault(world, name)), args=(theirs, name)
            )
            process.start()
            faults.append({"fault": name} | ours.recv())
            process.join()
            tick()
    bench.write(
        path,
        "watch-scale",
        {"ranks": size, "ranks_per_host": PER_HOST, "stall": STALL, "lost": LOST, "seconds": seconds},
        costs=costs,
        faults=faults,
    )


def healthy_world(size: int) -> WatchdogSimulation:
    """Return a world in which every rank has heard of all hosts."""
    gc.enable()
    gc.collect()
    groups = size // PER_HOST
    world = WatchdogSimulation(
        size, per_host=PER_HOST, stall=STALL, lost=LOST, measured={0, 1, 9, groups // 2, groups - 1}
    )
    gc.freeze()  # else collecting the objects of all ranks counts as work of one of them
    gc.disable()
    world.run(2.0 + 1.5 * world.groups.depth)
    return world


def count_costs(world: WatchdogSimulation, seconds: float) -> dict[str, Any]:
    """Return messages, bytes and CPU time per second: medians, and those of the rank with most."""
    columns = ("messages", "nbytes_sent", "nbytes_received", "cpu_seconds")
    before = {each.rank: [getattr(each, name) for name in columns] for each in world.ranks}
    world.run(seconds)
    found: dict[str, Any] = {}
    for at, name in enumerate(columns):
        ranks = [each for each in world.ranks if name != "cpu_seconds" or each.measured]
        rates = [(getattr(each, name) - before[each.rank][at]) / seconds for each in ranks]
        found[name] = {"median": median(rates), "most": max(rates)}
    return found


def measure_fault(world: WatchdogSimulation, name: str) -> dict[str, Any]:
    """Return what the ranks name, how many rightly, and when."""
    fault, kinds = FAULTS[name]
    began = world.now
    spared = {each.rank for each in world.ranks}
    wrong = {0} if "first" in name else {each.rank for each in on_host(world)}
    fault(world)
    world.run(60.0, until=world.all_decided)
    decisions = {rank: each for rank, each in world.decisions().items() if rank in spared}
    if name == "a rank raises":
        decisions.pop(faulty(world).rank, None)
    made = [each for each in decisions.values() if each is not None]
    right = [each for each in made if each.error.kind in kinds and each.error.rank in {*wrong, None}]
    return {
        "named": dict(Counter(f"{each.error.kind}" for each in made)),
        "ranks_to_name": len(decisions),
        "rightly_named": len(right),
        "seconds": {
            "median": median(each.at - began for each in made),
            "most": max(e.at - began for e in made),
        },
    }


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md: costs per rank, and faults."""
    results = sorted(bench.find("scale-*").values(), key=lambda each: each["settings"]["ranks"])
    costs = [
        [
            f"{found['settings']['ranks']:,}",
            str(found["costs"]["tree_depth"]),
            *(f"{found['costs']['messages'][which]:.0f}" for which in ("median", "most")),
            *(
                f"{found['costs'][name][which] / 1000:.1f}"
                for name in ("nbytes_sent", "nbytes_received")
                for which in ("median", "most")
            ),
            *(f"{found['costs']['cpu_seconds'][which]:.2%}" for which in ("median", "most")),
        ]
        for found in results
    ]
    faults = [
        [
            f"{found['settings']['ranks']:,}",
            each["fault"],
            ", ".join(each["named"]),
            f"{each['rightly_named']} of {each['ranks_to_name']}",
            f"{each['seconds']['median']:.2f}",
            f"{each['seconds']['most']:.2f}",
        ]
        for found in results
        for each in found["faults"]
    ]
    measured = ("messages/s", "sent, kB/s", "received, kB/s", "of a core")
    heads = ["ranks", "depth", *(each for name in measured for each in (name, "most"))]
    return {
        "scale-costs": table(heads, costs, words=0),
        "scale-faults": table(
            ["ranks", "fault", "named as", "rightly named", "median, s", "longest, s"], faults, words=3
        ),
    }


if __name__ == "__main__":
    bench.main()
