"""Time to the same held-out loss on machines of different speeds behind a slow switch: DDP, LocalSGD, asynchronous.

    python benchmarks/asynchronous/loss.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/asynchronous/loss.py chart
    python benchmarks/asynchronous/loss.py table

What DDP and LocalSGD learn in a step depends on no network and no speed: their curves are those of
`benchmarks/slow-networks`, and their steps are timed here, in turns with the asynchronous trainings, which are timed
whole.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from hub_training import SETTINGS, finish_chart, reached, train
from training import BATCH, SIZE, SPEEDS, Training
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.lab_run import open_lab, results
from bench_harness.markdown import table
from bench_harness.ranks import tuned_ddp
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.report.charts.chart_style import COLOURS, INK, Chart, in_paceline_style, stacked_panels

BUCKETS_MIB = (1, 5, 25)
LOCAL_LABEL = "LocalSGD, every 4, 2 late, int4"

bench = Benchmark(__file__)


def lockstep_curves() -> dict[str, Any]:
    """Return what DDP and LocalSGD learn in a step, by ``"ddp"`` and ``"ours"``."""
    return bench.read("../slow-networks/loss-4x100Mbit")


@bench.run
def run(
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "200Mbit/s",
    fastest: Annotated[float, Option(help="Seconds of a step of the fastest machine.")] = 0.15,
    seeds: Annotated[int, Option(min=1, help="Asynchronous trainings.")] = 3,
    seconds: Annotated[float, Option(help="Length of their learning-rate schedule.")] = SETTINGS["seconds"],
    every: Annotated[int, Option(help="k: local steps between two updates.")] = SETTINGS["every"],
    delay: Annotated[int, Option(help="d: local steps until parameters come in.")] = SETTINGS["delay"],
    lr: Annotated[float, Option(help="Largest learning rate.")] = SETTINGS["lr"],
    timed: Annotated[int, Option(help="Timed steps of DDP and of LocalSGD, for each seed.")] = 20,
    lockstep: Annotated[bool, Option(help="Time DDP and LocalSGD too.")] = True,
    json_file: JsonOption = None,
) -> None:
    """Train asynchronously, time torch DDP and LocalSGD beside it, and compare the times to the same loss."""
    path = bench.output(json_file, f"loss-{rate.removesuffix('/s')}")
    settings = SETTINGS | {"seconds": seconds, "every": every, "delay": delay, "lr": lr}
    ddp_settings, local_settings = (lockstep_curves()[name]["way"] for name in ("ddp", "ours"))
    turns = seeds * (1 + 2 * lockstep) + lockstep * len(BUCKETS_MIB)
    with open_lab(len(SPEEDS), rate, title="time to loss, four speeds", turns=turns) as (lab, folder, tick):

        def timed_steps(lr: float, steps: int, **options: Any) -> list[float]:
            job = lab.start_torchrun(bench.command(time_steps, fastest, lr, steps, options), ranks_per_host=1)
            (found,) = results(job)
            tick()
            return found

        buckets, best = dict[int, list[float]](), 5.0
        if lockstep:
            buckets = {mib: timed_steps(ddp_settings["lr"], 8, bucket_mib=mib) for mib in BUCKETS_MIB}
            best = min(buckets, key=lambda mib: sorted(buckets[mib])[4])
        ddp, local_steps, runs = [], [], []
        for seed in range(seeds):
            if lockstep:
                ddp += timed_steps(ddp_settings["lr"], timed, bucket_mib=best)
                local_steps += timed_steps(local_settings["lr"], timed, local=local_settings["options"])
            runs.append({"seed": seed} | train(lab, folder, fastest, settings, seed))
            tick()
    bench.write(
        path,
        "asynchronous-time-to-loss",
        {
            "hosts": len(SPEEDS),
            "rate": rate,
            "speeds": list(SPEEDS),
            "fastest_step": fastest,
            "size": SIZE,
            "batch": BATCH,
            "parameters": gpt_size(SIZE).parameters(),
            "async": settings,
        },
        ddp={"buckets": buckets, "bucket_mib": best, "seconds": ddp},
        local={"options": local_settings["options"], "seconds": local_steps},
        **{"async": runs},
    )


@bench.process
def time_steps(fastest: float, lr: float, steps: int, options: dict[str, Any]) -> list[float] | None:
    """Return, on rank 0, the seconds of steps of torch DDP or LocalSGD on the slowest rank.

    Args:
        options: ``{"bucket_mib": …}``: of DDP; ``{"local": …}``: those of `paceline.LocalSGD`.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training, loop = Training(rank, 0, lr, fastest), nullcontext()
    if "local" in options:
        training.model = paceline.DataParallel(training.net)
        loop = paceline.LocalSGD(training.model, training.optimizer, **options["local"])
    else:
        training.model = tuned_ddp(training.net, options["bucket_mib"])
    seconds = []
    with loop:
        for _ in range(steps + 4):
            began = time.perf_counter()
            training.step(1.0)
            seconds.append(time.perf_counter() - began)
    slowest = torch.tensor(seconds[4:], dtype=torch.float64)  # DDP lays out its buckets anew in the second
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.barrier()
    del training, loop
    gc.collect()  # torch's DDP must be gone before its process group
    dist.destroy_process_group()
    return slowest.tolist() if rank == 0 else None


# ---------------------------------------------------------------------- results


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md: times to the same loss, and seconds of a step in lock-step."""
    result, curves = bench.read("loss-200Mbit"), lockstep_curves()
    ddp, local = result["ddp"], result["local"]
    ddp_step, local_step = median(ddp["seconds"]), median(local["seconds"])
    rows = []
    for run in result["async"]:
        ddp_curve, local_curve = (curves[name]["curves"][run["seed"]] for name in ("ddp", "ours"))
        target = ddp_curve[-1]["loss"]
        ddp_time, hub_time = ddp_curve[-1]["step"] * ddp_step, reached(run["curve"], target, "seconds")
        step = reached(local_curve, target, "step")
        local_time = None if step is None else step * local_step
        times = ["never" if each is None else f"{each:.0f}" for each in (ddp_time, local_time, hub_time)]
        ratios = [f"{each / hub_time:.2f}" if each and hub_time else "" for each in (ddp_time, local_time)]
        last = f"{run['curve'][-1]['loss'] / target:.4f}"
        rows.append([str(run["seed"]), f"{target:.4f}", *times, *ratios, last])
    titles = ["seed", "DDP's last loss", "by DDP, s", "by LocalSGD, s", "by async, s", "DDP ÷ async"]
    steps = [(f"torch DDP, {mib} MiB", seconds) for mib, seconds in ddp["buckets"].items()]
    steps += [(f"torch DDP, {ddp['bucket_mib']} MiB", ddp["seconds"]), (LOCAL_LABEL, local["seconds"])]
    return {
        "loss": table([*titles, "LocalSGD ÷ async", "async's last ÷ DDP's"], rows),
        "steps": table(
            ["in lock-step", "s a step"], [[name, f"{median(seconds):.3f}"] for name, seconds in steps]
        ),
    }


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of held-out loss over time."""
    return {"loss-200Mbit.png": draw(bench.read("loss-200Mbit"), lockstep_curves())}


@in_paceline_style
def draw(result: dict[str, Any], curves: dict[str, Any]) -> Chart:
    """Return held-out loss over time, every seed of every variant."""
    figure, (axes,) = stacked_panels(width=10, height=5.2)
    ddp_step, local_step = (median(result[name]["seconds"]) for name in ("ddp", "local"))
    for run in result["async"]:
        ddp_curve, local_curve = (curves[name]["curves"][run["seed"]] for name in ("ddp", "ours"))
        for label, colour, curve, column, seconds in (
            ("torch DDP", INK, ddp_curve, "step", ddp_step),
            (LOCAL_LABEL, COLOURS[1], local_curve, "step", local_step),
            ("asynchronous", COLOURS[0], run["curve"], "seconds", 1.0),
        ):
            points = [(each[column] * seconds, each["loss"]) for each in curve]
            shown: dict[str, Any] = {"label": label} if run is result["async"][0] else {}
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, **shown)
        axes.axhline(ddp_curve[-1]["loss"], color=INK, linewidth=0.6, linestyle=(0, (2, 3)))
    axes.set_xlabel("seconds (dotted: what DDP ends with)")
    finish_chart(axes, result["settings"])
    return Chart(figure)


if __name__ == "__main__":
    bench.main()
