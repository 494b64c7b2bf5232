"""Simulated and measured steps of 2, 4 and 8 ranks on hosts behind slow links; and the time to simulate 10,000 nodes.

    python benchmarks/simulate/simulate.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/simulate/simulate.py table

One rank runs on each host. No measured step goes into the prediction, only α and β, fitted to all-reduces of 2 and 3
hosts, and what a host is like: its computing alone, and how much computing and exchanges slow each other. Hosts of the
lab are processes of one machine, which N of them share, so a host differs with N and is measured at N, without a
training step. `predicted_from_two` has what can be said of it from 2 of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import take_turns
from paceline._core.units import parse_list
from paceline.cost_model.collective_prediction import CollectiveFit
from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.cost_model.profile_entries import Source
from paceline.errors import UsageError
from paceline.parallel.gradient_collectives import Comm
from paceline.tools.bench.device_clock import slowest_rank
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.bench.step_parts.contention import measure_contention
from paceline.tools.bench.step_parts.exchange_times import Exchanger
from paceline.tools.bench.step_parts.model_compute_times import WrappedModel, measure_model_step
from paceline.tools.bench.step_parts.training_workload import reference_workload
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.simulate.cluster.cluster_network import ClusterNetwork, FittedNetwork
from paceline.tools.simulate.cluster.cluster_plan import ClusterPlan
from paceline.tools.simulate.cluster.cluster_simulation import DAY, simulate_cluster
from paceline.tools.simulate.cluster.compute_times import ClusterMachines
from paceline.world.machine_facts import read_machine_facts

SIZES = [
    262144,
    1048576,
    4194304,
    13107200,
]  # bytes; smaller ones pass in the burst that an idle link has saved up
CALLS = 7
FIT_HOSTS = (2, 3)  # whose all-reduces are fitted; steps are predicted at other numbers of hosts too
ALONE = "computing alone"
BUCKET_MIB = {"flat": math.inf, "bucketed, 1 MiB": 1.0, "bucketed, 5 MiB": 5.0}  # by name of the strategy

bench = Benchmark(__file__)


@bench.run
def run(
    ranks: Annotated[str, Option(help="Numbers of ranks whose steps are measured, by commas.")] = "2,4,8",
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "200Mbit/s",
    model: Annotated[str, Option(help="Size of the reference GPT.")] = "mini",
    batch: Annotated[int, Option(min=1, help="Windows of a rank's batch.")] = 2,
    rounds: Annotated[int, Option(min=1, help="Turns of each strategy.")] = 5,
    steps: Annotated[int, Option(min=1, help="Steps of a turn.")] = 4,
    json_file: JsonOption = None,
) -> None:
    """Measure training steps on slow links, and compare them with what the simulator predicts."""
    counts = parse_list("--ranks", ranks, int, example="2,4,8")
    if min(counts) != 2:
        raise UsageError(
            f"--ranks {ranks}", remedy="computing is measured at 2 ranks: give 2, and larger numbers"
        )
    path = bench.output(json_file, f"steps-{rate.removesuffix('/s')}")
    job = {"model": model, "batch": batch, "rounds": rounds, "steps": steps, "calls": CALLS}
    found = {}
    for hosts in sorted({*FIT_HOSTS, *counts}):
        sizes = SIZES if hosts in FIT_HOSTS else []
        strategies = list(BUCKET_MIB) if hosts in counts else []
        turns = len(sizes) + (2 + rounds if strategies else 0)
        whole = job | {"sizes": sizes, "strategies": strategies}
        found[hosts] = bench.start_ranks(whole, hosts, rate=rate, turns=turns)
    settings = job | {"ranks": counts, "rate": rate, "threads": 1, "backend": "gloo", "sizes": SIZES}
    rows = compare(found, counts, 4.0 * gpt_size(model).parameters())
    parts = {"measured": found, "rows": rows, "clock": clock()}
    packages = ("paceline", "torch", "numpy")
    print(figures(bench.write(path, "simulate-validation", settings, packages=packages, **parts)))


# ---------------------------------------------------------------------- a rank


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the times of all-reduces and of strategies' steps, those of the slowest rank, and what a host is like."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    if job["sizes"]:
        found["all_reduce"] = {nbytes: all_reduce_seconds(nbytes, job["calls"]) for nbytes in job["sizes"]}
    if job["strategies"]:
        found["rounds"] = time_strategies([ALONE, *job["strategies"]], job)
        found["host"] = measure_host(job)
        bench.tick()
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return found if first else None


def all_reduce_seconds(nbytes: int, calls: int) -> float:
    """Return the median over calls of the slowest rank's seconds."""
    buffer, seconds = torch.zeros(nbytes // 4), []
    for _ in range(1 + calls):  # the first one warms up
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(buffer)
        seconds.append(time.perf_counter() - started)
    bench.tick()
    return median(slowest_rank(seconds[1:], "cpu"))


def time_strategies(names: Sequence[str], job: dict[str, Any]) -> dict[str, list[float]]:
    """Return by strategy, for each round, the slowest rank's seconds a step."""
    step_of = {name: warm_step(name, job) for name in names}
    bench.tick()

    def turn(name: str) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(job["steps"]):
            step_of[name]()
        return slowest_rank([(time.perf_counter() - started) / job["steps"]], "cpu")[0]

    turns = {name: lambda name=name: turn(name) for name in names}
    return take_turns(turns, job["rounds"], bench.tick, warm_up=0)


def warm_step(name: str, job: dict[str, Any]) -> Callable[[], None]:
    """Return a training step of a strategy, warm; each has its own model."""
    torch.manual_seed(0)
    size = gpt_size(job["model"])
    net, batch = GPT(size), random_batch(size, job["batch"], size.context, 1, "cpu")
    inputs, targets = batch.inputs.contiguous(), batch.targets.contiguous()
    if name == ALONE:
        model: torch.nn.Module = net
    else:
        mib = BUCKET_MIB[name]
        sync = paceline.Sync.of("flat") if mib == math.inf else paceline.Sync(bucket_mib=mib)
        model = paceline.DataParallel(net, sync=sync)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        token_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # learns the order of the buckets
        step()
    return step


def measure_host(job: dict[str, Any]) -> dict[str, float]:
    """Return the share of computing that is backward, and how much computing and exchanges slow each other."""
    size, source = gpt_size(job["model"]), Source("benchmarks/simulate/simulate.py run", "")
    workload = reference_workload(size, job["batch"], size.context, "cpu")
    step = measure_model_step(workload, "cpu", job["steps"] * job["rounds"], source)
    exchanger, wrapped = Exchanger("paceline", "gloo", Comm(), "cpu"), WrappedModel(workload, "cpu")
    slowed = measure_contention(
        exchanger, "all-reduce", wrapped, step, network="lab", rounds=job["rounds"], source=source
    )
    return {
        "backward": step.backward / (step.forward + step.backward + step.optimizer),
        "computing_slows": slowed.computing_slows,
        "calls_slow": slowed.calls_slow,
    }


# ---------------------------------------------------------------------- predictions


def compare(found: dict[int, dict[str, Any]], counts: Sequence[int], nbytes: float) -> list[dict[str, Any]]:
    """Return measured and simulated seconds a step, by number of ranks and strategy; `nbytes` of gradients."""
    points = [
        MeasuredPoint(int(size), hosts, seconds)
        for hosts in FIT_HOSTS
        for size, seconds in found[hosts]["all_reduce"].items()
    ]
    fit, host_of = fit_points(points, "all-reduce"), {}
    for count in counts:
        host_of[count] = {"computing": median(found[count]["rounds"][ALONE]), **found[count]["host"]}
    cores = read_machine_facts().usable_cores

    def rows() -> Iterator[dict[str, Any]]:
        for count, host in host_of.items():
            for name in BUCKET_MIB:
                seconds = median(found[count]["rounds"][name])
                step = predict(name, count, fit, host, nbytes)
                from_two = predict(name, count, fit, predicted_from_two(host_of[2], count, cores), nbytes)
                yield {
                    "ranks": count,
                    "strategy": name,
                    "measured": seconds,
                    "simulated": step.p50,
                    "low": step.p5,
                    "high": step.p95,
                    "error": step.p50 / seconds - 1,
                    "from_two": from_two.p50 / seconds - 1,
                    **host,
                }

    return list(rows())


def predicted_from_two(two: dict[str, float], ranks: int, cores: float) -> dict[str, float]:
    """Return what one of so many hosts is like if this is one of 2.

    N ranks of one thread on c cores compute N/c times as long as where each has a core. They also finish together,
    however uneven they are, because one that finishes early leaves its core to the others.
    """
    return two | {"computing": two["computing"] * max(1.0, ranks / cores) / max(1.0, 2 / cores)}


def predict(name: str, ranks: int, fit: CollectiveFit, host: dict[str, float], nbytes: float) -> Any:
    """Return the distribution of a strategy's step time, with one rank on each host."""
    plan = {each: host[each] for each in ("backward", "computing_slows", "calls_slow")}
    plan |= {} if name == "flat" else {"bucket_nbytes": BUCKET_MIB[name] * 2**20}
    strategy = "flat" if name == "flat" else "bucketed"
    network = FittedNetwork(fit)
    return simulate_cluster(
        ClusterPlan(
            network=network, step_seconds=host["computing"], nbytes=nbytes, strategy=strategy, **plan
        ),
        ranks,
    ).step


def clock() -> dict[str, Any]:
    """Return the seconds to simulate 10,000 nodes of 8 ranks with all effects, and a sweep."""
    network = ClusterNetwork(link=400e9, latency=14e-6, per_node=8, inside=450e9, inside_latency=3.4e-6)
    machines = ClusterMachines(spread=0.02, jitter=0.03)
    failures = {"node_mtbf": 1800 * DAY, "write": 60.0, "restart": 300.0}
    plan = ClusterPlan(network=network, step_seconds=1.2, nbytes=28e9, machines=machines, **failures)
    started = time.perf_counter()
    simulate_cluster(plan, 10_000)
    simulated = time.perf_counter()
    for power in range(14):
        simulate_cluster(plan, 2**power)
    sweep_seconds = time.perf_counter() - simulated
    seconds = simulated - started
    return {"nodes": 10_000, "ranks": 80_000, "seconds": seconds, "sweep_seconds": sweep_seconds, "sweep": 14}


# ---------------------------------------------------------------------- results


def figures(result: dict[str, Any]) -> str:
    """Return the table of a result: a row for each strategy and number of ranks."""
    titles = ["strategy", "ranks", "measured, s", "simulated, s", "off", "off, hosts as 2 are"]
    titles += ["computing, s", "slows it", "slows exchanges"]
    rows = [
        [
            row["strategy"],
            str(row["ranks"]),
            *(f"{row[name]:.3g}" for name in ("measured", "simulated")),
            *(f"{100 * row[name]:+.1f} %" for name in ("error", "from_two")),
            f"{row['computing']:.3g}",
            *(f"{row[name]:.2f}" for name in ("computing_slows", "calls_slow")),
        ]
        for row in sorted(result["rows"], key=lambda row: (row["strategy"], row["ranks"]))
    ]
    return table(titles, rows)


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of steps, and a sentence on how long the simulator takes."""
    result = bench.read("steps-200Mbit")
    took = result["clock"]
    sentence = (
        f"{took['nodes']:,} nodes of 8 ranks, with uneven machines, varying steps, failures and the best interval by "
        f"simulation, take {took['seconds']:.1f} s; a sweep of {took['sweep']} numbers up to 8,192 takes "
        f"{took['sweep_seconds']:.1f} s."
    )
    return {"figures": figures(result), "clock": sentence}


if __name__ == "__main__":
    bench.main()
