"""Variants of asynchronous training in virtual time: loss and bytes beside gradients averaged at every step.

    python benchmarks/asynchronous/virtual.py run
    python benchmarks/asynchronous/virtual.py chart
    python benchmarks/asynchronous/virtual.py table

A tiny GPT (2 layers, d 64, context 64) on the embedded corpus, four equal machines, 600 steps of 8 windows each, AdamW,
fixed seeds: real gradients, simulated clocks and links, the hub and worker code that runs. Every row is the same to the
bit each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Annotated, Any
from unittest import mock

import torch
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.async_dp.hub.hub_settings import HubOptimizer, HubRules, PopulationRules
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.errors import UsageError
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.report.charts.chart_style import COLOURS, INK, Chart, in_paceline_style, stacked_panels
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import simulate_async
from paceline.tools.simulate.learning_tasks import GPTTask
from paceline.tools.simulate.simulated_ddp import DdpPlan, simulate_ddp
from paceline.tools.simulate.simulated_machines import SimulatedMachine
from paceline.tools.train.lr_schedule import cosine_lr

SIZE = GptSize("tiny two", 64, 256, 2, 4, vocabulary=256, context=64)
WORKERS, STEPS, BATCH, WARMUP = 4, 600, 8, 30

bench = Benchmark(__file__)


# ---------------------------------------------------------------------- variants


def late(progress: float) -> float:
    """Return the share of the full learning rate: up in 5 %, full until half-time, then down in a straight line."""
    return min(1.0, (progress + 1 / STEPS) / (WARMUP / STEPS), (1 - progress) / 0.5)


def cosine(progress: float) -> float:
    """Return the share of the full learning rate: up in 5 %, then down as a cosine."""
    return cosine_lr(min(STEPS - 1, int(progress * STEPS)), steps=STEPS, warmup=WARMUP, peak=1.0)


Variant = tuple[str, float, str, Callable[[GPTTask], dict[str, Any]]]
"""Name, largest learning rate, name of its schedule, and the training."""

SCHEDULES = {"late": late, "cosine": cosine}
MACHINES = [SimulatedMachine(step_seconds=1.0) for _ in range(WORKERS)]
RULES = HubRules(
    # Momentum begins when the warm-up is over: N updates at every other step of it are a round.
    outer=HubOptimizer("delayed-nesterov", 1.0, 0.5, warmup=47),
    down="int8",
)
PLAN = AsyncPlan(
    machines=MACHINES,
    steps=STEPS,
    cadence=SyncSchedule(10, 1, 5),
    rules=RULES,
    compression="int4",
    warmup=94,
    stagger=False,
    score_every=STEPS / 12,
)
SELECT = replace(RULES, population=PopulationRules(steps=100, margin=math.inf))


def ddp(name: str, lr: float, falls: str = "late", *, machines: int = WORKERS) -> Variant:
    """Return DDP on some of the machines."""
    plan = DdpPlan(
        machines=MACHINES[:machines],
        steps=STEPS,
        schedule=SCHEDULES[falls],
        members=WORKERS,
        score_every=STEPS / 12,
    )

    def train(task: GPTTask) -> dict[str, Any]:
        done = simulate_ddp(plan, task)
        numel = sum(param.numel() for param in task.learner(0, 1).module.parameters())
        curve = [(each.seconds, each.loss) for each in done.points]
        return {"loss": done.loss, "nbytes": 2 * done.nbytes / numel, "curve": curve, "digest": done.digest}

    return name, lr, falls, train


def hub(
    name: str, *, lr: float = 6e-3, falls: str = "late", overwrite: bool = False, **changes: Any
) -> Variant:
    """Return asynchronous training by `PLAN` with some changes; `overwrite`: without the delta rule."""
    plan = replace(PLAN, schedule=SCHEDULES[falls], **changes)
    replica = OverwritingReplica if overwrite else FragmentReplica

    def train(task: GPTTask) -> dict[str, Any]:
        with mock.patch("paceline.tools.simulate.simulated_worker.FragmentReplica", replica):
            done = simulate_async(plan, task)
        numel = sum(param.numel() for param in task.learner(0, 1).module.parameters())
        return {
            "loss": finite(done.loss),
            "nbytes": (done.nbytes_up + done.nbytes_down) / numel / WORKERS,
            "rounds": sum(counts["sent"] for counts in done.counts) / WORKERS,
            "curve": [(each.seconds, finite(each.loss)) for each in done.points],
            "digest": done.digest,
        }

    return name, lr, falls, train


class OverwritingReplica(FragmentReplica):
    """A worker without the delta rule: its steps since the snapshot are lost."""

    def apply_received(self) -> None:
        self.overwrite = True
        super().apply_received()


def finite(loss: float) -> float | None:
    """Return a loss, None if it diverged."""
    return loss if math.isfinite(loss) else None


def outer(*settings: Any, **options: Any) -> HubRules:
    """Return the rules with another outer optimizer."""
    return replace(RULES, outer=HubOptimizer(*settings, **options))


VARIANTS = [
    ddp("DDP", 3e-3, "cosine"),
    ddp("DDP", 6e-3, "cosine"),
    ddp("DDP", 3e-3),
    ddp("DDP", 6e-3),
    ddp("one machine alone", 6e-3, machines=1),
    hub("asynchronous: k 10, d 5, delayed Nesterov 1.0, 0.5 after a warm-up, int4 up, int8 down"),
    hub("cosine", falls="cosine"),
    hub("no warm-up", warmup=0, rules=outer("delayed-nesterov", 1.0, 0.5, warmup=10)),
    hub("no delta rule: the global model overwrites", overwrite=True),
    hub("float32 up", compression=None),
    hub("bfloat16 down", rules=replace(RULES, down="bf16")),
    hub("d 0", cadence=SyncSchedule(10, 1, 0)),
    hub("d 9", cadence=SyncSchedule(10, 1, 9)),
    hub("d 9, the global model overwrites", cadence=SyncSchedule(10, 1, 9), overwrite=True),
    hub("k 4, d 2", cadence=SyncSchedule(4, 1, 2)),
    hub("k 25, d 12", cadence=SyncSchedule(25, 1, 12)),
    hub("averaging", lr=1e-2, rules=outer()),
    hub("averaging, no warm-up", lr=1e-2, rules=outer(), warmup=0),
    hub("delayed Nesterov 0.7, 0.9", lr=3e-3, rules=outer("delayed-nesterov", 0.7, 0.9, warmup=47)),
    hub("Nesterov at every arrival 0.7, 0.9", rules=outer("nesterov", 0.7, 0.9, unstable=True)),
    hub("all take the best at step 100, then warm up", rules=SELECT, warmup=194),
    hub(
        "different beginnings, all take the best at step 100, then warm up",
        rules=SELECT,
        warmup=194,
        same_init=False,
    ),
]


@bench.run
def run(
    seeds: Annotated[int, Option(min=1, help="Trainings of each variant.")] = 1,
    only: Annotated[str, Option(help="Variants whose name contains this.")] = "",
    json_file: JsonOption = None,
) -> None:
    """Train by many variants in virtual time."""
    path = bench.output(json_file, "virtual")
    torch.set_num_threads(1)
    chosen = [variant for variant in VARIANTS if only in variant[0]]
    if not chosen:
        raise UsageError(f"--only {only!r}: no variant's name contains it")
    rows = []
    with ProgressBar("variants in virtual time", len(chosen) * seeds) as tick:
        for name, lr, falls, train in chosen:
            runs = []
            for seed in range(seeds):
                runs.append(train(GPTTask(SIZE, batch=BATCH, lr=lr, seed=seed, held_out=256)))
                tick()
            rows.append({"name": name, "lr": lr, "falls": falls, "runs": runs})
    settings = {"workers": WORKERS, "steps": STEPS, "batch": BATCH, "size": vars(SIZE)}
    bench.write(path, "asynchronous-virtual", settings, ways=rows)


# ---------------------------------------------------------------------- results


def losses_of(row: dict[str, Any]) -> list[float]:
    """Return the loss of every seed; nothing if one diverged."""
    losses = [each["loss"] for each in row["runs"]]
    return [] if None in losses else losses


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: loss and bytes by variant."""
    rows = [
        [
            row["name"],
            f"{row['lr']:g}, {row['falls']}",
            f"{median(losses):.4f}" if (losses := losses_of(row)) else "diverged",
            f"{row['runs'][0]['nbytes']:.0f}",
        ]
        for row in bench.read("virtual")["ways"]
    ]
    titles = ["", "learning rate, falling", "held-out loss", "bytes a parameter and worker"]
    return {"virtual": table(titles, rows)}


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of last losses."""
    return {"virtual.png": draw(bench.read("virtual"))}


@in_paceline_style
def draw(result: dict[str, Any]) -> Chart:
    """Return the last loss of each variant: its median, and every seed; those far off are named beneath."""
    losses_of_label = {}
    for row in result["ways"]:
        plain = row["name"] in ("DDP", "one machine alone")
        label = f"{row['name']}, {row['lr']:g}, {row['falls']}" if plain else row["name"]
        losses_of_label[label] = losses_of(row)
    bound = 1.25 * min(median(losses) for losses in losses_of_label.values() if losses)
    near = {label: each for label, each in losses_of_label.items() if each and median(each) < bound}
    figure, (axes,) = stacked_panels(width=11, height=1.2 + 0.3 * len(near))
    labels = list(reversed(near))
    for height, label in enumerate(labels):
        losses = near[label]
        colour = INK if label.startswith("DDP") else COLOURS[1] if label.startswith("one ") else COLOURS[0]
        axes.plot(losses, [height] * len(losses), "o", color=colour, markersize=4, alpha=0.4)
        axes.plot([median(losses)], [height], "o", color=colour, markersize=8)
        text, at = f"{median(losses):.3f}", (max(losses), height)
        axes.annotate(text, at, (9, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.grid(axis="y", linewidth=0.4)
    far = "; ".join(label for label in losses_of_label if label not in near)
    below = f"\nfar off: {far}" if far else ""
    steps = result["settings"]["steps"]
    axes.set_xlabel(f"held-out loss after {steps} steps, nats per byte{below}", loc="right")
    return Chart(figure)


if __name__ == "__main__":
    bench.main()
