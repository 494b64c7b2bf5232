"""Time to the same held-out loss over a slow network: torch DDP beside parameters averaged every few steps.

    python benchmarks/slow-networks/loss.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/slow-networks/loss.py table
    python benchmarks/slow-networks/loss.py chart

What DDP learns in a step does not depend on the network: its curves are made on this machine, and its step is timed on
the lab, in turns with the trainings by Paceline, which are timed whole. DDP with its fp16 hook, which halves the bytes,
is taken to learn the same in a step; its step is timed in turns with DDP's. After each training, steps without any
exchange are timed: they are the limit for every method. Paceline's settings are those that `loss_settings.py` chose on
another model.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any

from loss_curve import DDP, DDP_FP16, EARLY, FACTS, method, sent_until, train_as_rank
from loss_settings import chosen
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import Ratio, ratio_of
from paceline.errors import UsageError
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
ALONE = method("no exchange", "local", DDP["lr"], options={"every": 10_000})
MEASURED = "4x100Mbit", "2x100Mbit"
"""Hosts and rate of the committed results."""

bench = Benchmark(__file__)
bench.rank(train_as_rank)


@bench.run
def run(
    hosts: Annotated[int, Option(min=2, help="Hosts around the switch, a rank on each.")] = 4,
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "100Mbit/s",
    seeds: Annotated[int, Option(min=1, help="Trainings by each method.")] = 3,
    timed: Annotated[int, Option(min=1, help="Steps of DDP that are timed on the lab.")] = 100,
    keep_curves: Annotated[
        bool, Option("--keep-curves", help="Keep DDP's curves; time its steps and train by Paceline anew.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Train by DDP and by Paceline until the same held-out loss, and compare the times."""
    name, own = f"loss-{hosts}x{rate.removesuffix('/s')}", own_method()
    path, kept = bench.output(json_file, name), []
    if keep_curves:
        kept = [curve for result in bench.find(name).values() for curve in result["ddp"]["curves"]]
        if len(kept) < seeds:
            lack = f"{name}.json has DDP's curves of {len(kept)} seeds, not of {seeds}"
            raise UsageError(lack, remedy="run without --keep-curves")
    each = -(-timed // seeds)  # steps of a method after each training
    turns = seeds * ((own["steps"] + each) // EVERY + 1 + (0 if kept else DDP["steps"] // EVERY))
    with ProgressBar(f"time to loss, {hosts} hosts, {rate}", turns) as tick:

        def train(lab: Lab, training: dict[str, Any], seed: int = 0, timed: int = 0) -> Any:
            job = {"method": training, "seed": seed, "timed": timed, "every": EVERY, "early": EARLY}
            return bench.run_in_lab(lab, job, tick, per_host=hosts // lab.hosts)

        def best_bucket(lab: Lab, training: dict[str, Any]) -> dict[str, Any]:
            buckets = {mib: train(lab, training | {"bucket_mib": mib}, timed=8) for mib in BUCKETS}
            best = min(buckets, key=lambda mib: sorted(buckets[mib])[4])
            return {"way": training, "buckets": buckets, "bucket_mib": best}

        if not kept:
            with Lab(1) as lab:
                kept = [train(lab, DDP, seed) for seed in range(seeds)]
        curves, alone = [], []
        with Lab(hosts, rate) as lab:
            ddp = best_bucket(lab, DDP) | {"curves": kept[:seeds], "seconds": []}
            fp16 = best_bucket(lab, DDP_FP16) | {"seconds": []}
            for seed in range(seeds):
                ddp["seconds"] += train(lab, DDP | {"bucket_mib": ddp["bucket_mib"]}, timed=each)
                fp16["seconds"] += train(lab, DDP_FP16 | {"bucket_mib": fp16["bucket_mib"]}, timed=each)
                curves.append(train(lab, own, seed))
                # The last point is after an exchange.
                *_, point, _ = train(lab, ALONE | {"steps": each + EVERY}, seed)
                alone.append(point["seconds"] / point["step"])
                print(f"seed {seed}: {curves[-1][-1]}", flush=True)
    facts = {"hosts": hosts, "rate": rate} | FACTS
    ours = {"way": own, "curves": curves}
    result = bench.write(path, "time-to-loss", facts, ddp=ddp, ddp_fp16=fp16, ours=ours, alone=alone)
    print(figures(result))


def own_method() -> dict[str, Any]:
    """Return what is chosen for Paceline, with the learning rate that was chosen relative to DDP's."""
    found = chosen()
    name = f"LocalSGD, every {found['options']['every']} steps, int4"
    lr = found["times_lr"] * DDP["lr"]
    return method(name, "local", lr, steps=found["steps"], options=found["options"])


# ---------------------------------------------------------------------- results


def fp16_ratio(result: dict[str, Any]) -> Ratio:
    """Return how much longer a step takes by DDP than by DDP with its fp16 hook, timed alternately on one lab."""
    return ratio_of(result["ddp"]["seconds"], result["ddp_fp16"]["seconds"])


def figures(result: dict[str, Any]) -> str:
    """Return the table of times to the same loss: a row per seed."""
    rows, step_seconds, ratio = [], median(result["ddp"]["seconds"]), fp16_ratio(result).median
    alone = median(result["alone"])
    for seed, (ddp, own) in enumerate(zip(result["ddp"]["curves"], result["ours"]["curves"], strict=True)):
        target, seconds = ddp[-1]["loss"], ddp[-1]["step"] * step_seconds
        reached = next((point for point in own if point["loss"] <= target), None)
        cells = ["never", "", "", "", ""]
        if reached is not None:
            faster = seconds / reached["seconds"]
            cells = [
                f"{reached['seconds']:.0f}",
                str(reached["step"]),
                f"{faster:.2f}",
                f"{faster / ratio:.2f}",
                f"{seconds / ratio / (alone * reached['step']):.2f}",
            ]
        by_ddp = [f"{seconds:.0f}", f"{seconds / ratio:.0f}"]
        rows.append([str(seed), f"{target:.4f}", *by_ddp, *cells, f"{own[-1]['loss'] / target:.4f}"])
    titles = ["seed", "DDP's last loss", "by DDP, s", "with its fp16 hook, s", "by ours, s", "at step"]
    ratios = ["DDP ÷ ours", "fp16 hook ÷ ours", "fp16 hook ÷ no exchange", "last loss ÷ DDP's"]
    return table([*titles, *ratios], rows)


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md."""
    blocks = {}
    for name in MEASURED:
        result = bench.read(f"loss-{name}")
        steps = (
            f"A step of DDP takes {fp16_ratio(result)} times as long as with its fp16 hook; "
            f"a step without exchange takes {1e3 * median(result['alone']):.0f} ms."
        )
        blocks[f"loss-{name}"] = f"{result['settings']['hosts']} hosts:\n\n{figures(result)}\n\n{steps}"
    return blocks


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of the result."""
    return {"loss-4x100Mbit.png": draw(bench.read("loss-4x100Mbit"))}


@in_paceline_style
def draw(result: dict[str, Any]) -> Chart:
    """Return held-out loss over time and over bytes, of every seed."""
    figure, (over_time, over_bytes) = stacked_panels(width=10, height=8.4, heights=(1.0, 1.0))
    ddp_curves, step_seconds = result["ddp"]["curves"], median(result["ddp"]["seconds"])
    methods = (
        ("torch DDP", INK, ddp_curves, step_seconds),
        ("torch DDP, fp16 hook", COLOURS[0], ddp_curves, step_seconds / fp16_ratio(result).median),
        (result["ours"]["way"]["name"], COLOURS[1], result["ours"]["curves"], None),
    )
    for name, colour, curves, per_step in methods:
        for index, points in enumerate(curves):
            losses = [point["loss"] for point in points]
            seconds = [point["step"] * per_step if per_step else point["seconds"] for point in points]
            label = {"label": name} if index == 0 else {}
            over_time.plot(seconds, losses, color=colour, linewidth=1.4, **label)
            halves = 2 if name == DDP_FP16["name"] else 1
            megabytes = [sent / 1e6 / halves for sent in sent_until(points)]
            over_bytes.plot(megabytes, losses, color=colour, linewidth=1.4)
    for points in ddp_curves:
        over_time.axhline(points[-1]["loss"], color=INK, linewidth=0.6, linestyle=(0, (2, 3)))
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
