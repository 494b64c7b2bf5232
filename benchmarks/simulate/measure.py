"""Simulated steps beside measured ones: 2, 4 and 8 ranks on hosts behind slow links; and 10,000 nodes by the clock.

    python benchmarks/simulate/measure.py

Plays the hosts with `paceline.testing.netlab` (as root, on Linux), one rank on each, and writes
``steps-200Mbit.json`` beside this file. `predict.py` says what goes into the prediction.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from predict import FIT_HOSTS, Host, fitted, predict
from strategies import ALONE, STRATEGIES
from table import show

from bench_harness.program import run_job, run_program
from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import numbers_of
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.result_files import check_writable, result_head
from paceline.tools.simulate.cluster.cluster_network import ClusterNetwork
from paceline.tools.simulate.cluster.cluster_simulation import DAY, ClusterPlan, simulate_cluster
from paceline.tools.simulate.cluster.compute_times import ClusterMachines
from paceline.world.machine_facts import read_machine_facts

HERE = Path(__file__).parent
SIZES = [262144, 1048576, 4194304, 13107200]
"""Bytes; smaller ones pass in the burst that an idle link of the lab has saved up."""
CALLS = 7


def main(
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks whose steps are measured, by commas.")
    ] = "2,4,8",
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "200Mbit/s",
    model: Annotated[str, typer.Option(help="Size of the reference GPT.")] = "mini",
    batch: Annotated[int, typer.Option(help="Windows of a rank's batch.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns of each strategy.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of a turn.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write there; else steps-<rate>.json.")
    ] = None,
) -> None:
    """Measure training steps on slow links, and hold what the simulator says beforehand against them."""
    counts = numbers_of("--ranks", ranks, int, "2,4,8")
    if min(counts) < 2 or 2 not in counts or min(rounds, steps, batch) < 1:
        raise UsageError(
            f"--ranks {ranks} --rounds {rounds} --steps {steps} --batch {batch}: nothing to predict from",
            remedy="computing is measured at 2 ranks: give 2 and more, and a round, a step and a window or more",
        )
    path = json_file or HERE / f"steps-{rate.removesuffix('/s')}.json"
    check_writable(path, make_folder=True)
    job = {"model": model, "batch": batch, "rounds": rounds, "steps": steps, "calls": CALLS}
    found = {count: run(count, rate, job | wanted(count, counts)) for count in sorted({*FIT_HOSTS, *counts})}
    settings = job | {"ranks": counts, "rate": rate, "threads": 1, "backend": "gloo", "sizes": SIZES}
    result = result_head("simulate-validation", ("paceline", "torch", "numpy")) | {
        "settings": settings,
        "measured": found,
        "rows": rows(found, counts, 4.0 * gpt_size(model).parameters()),
        "clock": clock(),
    }
    write_json(path, result)
    show(result)
    print(path)


def wanted(hosts: int, counts: list[int]) -> dict[str, Any]:
    """Return what is measured with so many hosts."""
    names = [name for name in STRATEGIES if name != ALONE]
    return {"sizes": SIZES if hosts in FIT_HOSTS else [], "strategies": names if hosts in counts else []}


def run(hosts: int, rate: str, job: dict[str, Any]) -> dict[str, Any]:
    """Make the hosts, start the ranks, show how far they are, and return what rank 0 wrote."""
    turns = len(job["sizes"])
    if job["strategies"]:
        turns += 2 + job["rounds"] * (1 + len(job["strategies"]))
    return run_job(HERE / "ranks.py", job, hosts=hosts, rate=rate, turns=turns)


def rows(found: dict[int, dict[str, Any]], counts: list[int], nbytes: float) -> list[dict[str, Any]]:
    """Return measured beside simulated seconds a step, by number of ranks and strategy."""
    fit = fitted({hosts: found[hosts]["all_reduce"] for hosts in FIT_HOSTS})
    two, cores, told = Host.measured(found[2]), read_machine_facts().usable_cores, []
    for count in counts:
        here = Host.measured(found[count])
        for name in found[count]["rounds"]:
            if name == ALONE:
                continue
            row, from_two = (
                predict(name, count, fit, host, nbytes) for host in (here, two.among(count, cores))
            )
            seconds = median(found[count]["rounds"][name])
            told.append(
                {
                    "ranks": count,
                    "strategy": name,
                    "measured": seconds,
                    "simulated": row.step.p50,
                    "low": row.step.p5,
                    "high": row.step.p95,
                    "error": row.step.p50 / seconds - 1,
                    "from_two": from_two.step.p50 / seconds - 1,
                    **asdict(here),
                }
            )
    return told


def clock() -> dict[str, Any]:
    """Return how long the simulator itself takes for 10,000 nodes of 8 ranks with everything in, and for a sweep."""
    network = ClusterNetwork(link=400e9, latency=14e-6, per_node=8, inside=450e9, inside_latency=3.4e-6)
    plan = ClusterPlan(
        network=network,
        step_seconds=1.2,
        nbytes=28e9,
        machines=ClusterMachines(spread=0.02, jitter=0.03),
        node_mtbf=1800 * DAY,
        write=60.0,
        restart=300.0,
    )
    started = time.perf_counter()
    simulate_cluster(plan, 10_000)
    one = time.perf_counter() - started
    started = time.perf_counter()
    for nodes in [2**power for power in range(14)]:
        simulate_cluster(plan, nodes)
    return {
        "nodes": 10_000,
        "ranks": 80_000,
        "seconds": one,
        "sweep_seconds": time.perf_counter() - started,
        "sweep": 14,
    }


if __name__ == "__main__":
    run_program(main)
