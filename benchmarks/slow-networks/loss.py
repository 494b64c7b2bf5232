"""Time to the same held-out loss over a slow network: torch DDP beside parameters averaged every few steps.

    python benchmarks/slow-networks/loss.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/slow-networks/loss.py table
    python benchmarks/slow-networks/loss.py chart

What DDP learns in a step does not depend on the network: its curves are made on this machine, and its step is timed on
the lab, in turns with the trainings by Paceline, which are timed whole.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any

from loss_curve import DDP, FACTS, method, sent_until, train_as_rank
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    Chart,
    in_paceline_style,
    set_title,
    stacked_panels,
)

EVERY = 10
"""Steps between two points of a curve."""

BUCKETS = (1, 5, 25)
OWN = method(
    "LocalSGD, every 4 steps, int4",
    "local",
    2e-3,
    steps=800,
    options={"every": 4, "delay": 2, "compression": "int4"},
)

bench = Benchmark(__file__)
bench.rank(train_as_rank)


@bench.run
def run(
    hosts: Annotated[int, Option(min=2, help="Hosts around the switch, a rank on each.")] = 4,
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "100Mbit/s",
    seeds: Annotated[int, Option(min=1, help="Trainings by each method.")] = 3,
    timed: Annotated[int, Option(min=1, help="Steps of DDP that are timed on the lab.")] = 100,
    json_file: JsonOption = None,
) -> None:
    """Train by DDP and by Paceline until the same held-out loss, and compare the times."""
    path = bench.output(json_file, f"loss-{hosts}x{rate.removesuffix('/s')}")
    turns = seeds * (DDP["steps"] // EVERY + OWN["steps"] // EVERY)
    with ProgressBar(f"time to loss, {hosts} hosts, {rate}", turns) as tick:

        def train(lab: Lab, chosen: dict[str, Any], seed: int = 0, timed: int = 0) -> Any:
            job = {"method": chosen, "seed": seed, "timed": timed, "every": EVERY}
            return bench.run_in_lab(lab, job, tick, per_host=hosts // lab.hosts)

        with Lab(1) as lab:
            ddp = [train(lab, DDP, seed) for seed in range(seeds)]
        with Lab(hosts, rate) as lab:
            buckets = {mib: train(lab, DDP | {"bucket_mib": mib}, timed=8) for mib in BUCKETS}
            best = min(buckets, key=lambda mib: sorted(buckets[mib])[4])
            seconds, own = [], []
            for seed in range(seeds):
                seconds += train(lab, DDP | {"bucket_mib": best}, timed=-(-timed // seeds))
                own.append(train(lab, OWN, seed))
    result = bench.write(
        path,
        "time-to-loss",
        {"hosts": hosts, "rate": rate} | FACTS,
        ddp={"way": DDP, "curves": ddp, "buckets": buckets, "bucket_mib": best, "seconds": seconds},
        ours={"way": OWN, "curves": own},
    )
    print(figures(result))


# ---------------------------------------------------------------------- results


def figures(result: dict[str, Any]) -> str:
    """Return the table of times to the same loss: a row per seed."""
    rows, step_seconds = [], median(result["ddp"]["seconds"])
    for seed, (ddp, own) in enumerate(zip(result["ddp"]["curves"], result["ours"]["curves"], strict=True)):
        target, seconds = ddp[-1]["loss"], ddp[-1]["step"] * step_seconds
        reached = next((point for point in own if point["loss"] <= target), None)
        cells = ["never", "", ""]
        if reached is not None:
            cells = [f"{reached['seconds']:.0f}", str(reached["step"]), f"{seconds / reached['seconds']:.2f}"]
        rows.append([str(seed), f"{target:.4f}", f"{seconds:.0f}", *cells, f"{own[-1]['loss'] / target:.4f}"])
    titles = ["seed", "DDP's last loss", "by DDP, s", "by ours, s", "at step", "÷", "last loss ÷ DDP's"]
    return table(titles, rows)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md."""
    return {"loss": figures(bench.read("loss-4x100Mbit"))}


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of the result."""
    return {"loss-4x100Mbit.png": draw(bench.read("loss-4x100Mbit"))}


@in_paceline_style
def draw(result: dict[str, Any]) -> Chart:
    """Return held-out loss over time and over bytes, of every seed."""
    figure, (over_time, over_bytes) = stacked_panels(width=10, height=8.4, heights=(1.0, 1.0))
    ddp_curves, step_seconds = result["ddp"]["curves"], median(result["ddp"]["seconds"])
    for index, curves in enumerate(zip(ddp_curves, result["ours"]["curves"], strict=True)):
        methods = (("torch DDP", INK), (result["ours"]["way"]["name"], COLOURS[1]))
        for (name, colour), points in zip(methods, curves, strict=True):
            losses = [point["loss"] for point in points]
            seconds = [
                point["step"] * step_seconds if points is curves[0] else point["seconds"] for point in points
            ]
            label = {"label": name} if index == 0 else {}
            over_time.plot(seconds, losses, color=colour, linewidth=1.4, **label)
            megabytes = [sent / 1e6 for sent in sent_until(points)]
            over_bytes.plot(megabytes, losses, color=colour, linewidth=1.4)
        over_time.axhline(curves[0][-1]["loss"], color=INK, linewidth=0.6, linestyle=(0, (2, 3)))
    settings = result["settings"]
    title = f"Held-out loss of {settings['size']}, {settings['hosts']} hosts, links of {settings['rate']}"
    set_title(over_time, title)
    over_time.set_xlabel("seconds (dotted: what DDP ends with)")
    over_bytes.set_xlabel("MB that a host has sent")
    over_bytes.set_xscale("log")
    over_bytes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    over_time.set_xlim(0, None)
    for axes in (over_time, over_bytes):
        axes.set_ylabel("nats per token")
        axes.set_ylim(None, min(3.0, max(point["loss"] for point in ddp_curves[0])))
    over_time.legend(frameon=False, fontsize=10)
    return Chart(figure)


if __name__ == "__main__":
    bench.main()
