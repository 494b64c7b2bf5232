"""Asynchronous training in virtual time, way by way: loss and bytes beside gradients averaged at every step.

    python benchmarks/star/virtual.py

A tiny GPT (2 layers, d 64, context 64) on the embedded corpus, four equal machines, 600 steps of 8 windows each, AdamW,
fixed seeds: real gradients, simulated clocks and links, the hub and worker code that runs.
Every row is the same to the bit each time. Writes ``virtual.json`` beside this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.async_dp.hub.hub_settings import HubOptimizer, HubRules, PopulationRules
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.result_files import check_writable, result_head
from paceline.tools.simulate.async_settings import AsyncPlan, SimulatedMachine
from paceline.tools.simulate.async_simulation import simulate_async
from paceline.tools.simulate.learning_tasks import GPTTask
from paceline.tools.simulate.simulated_ddp import DdpPlan, simulate_ddp
from paceline.tools.train.lr_schedule import cosine_lr

HERE = Path(__file__).parent
SIZE = GptSize("tiny two", 64, 256, 2, 4, vocabulary=256, context=64)
WORKERS, STEPS, BATCH, WARMUP = 4, 600, 8, 30
HELD_OUT = 256


HALF = HubOptimizer("delayed-nesterov", 1.0, 0.5, warmup=47)
"""Momentum begins when the warm-up is over: N updates at every other step of it are a round."""

SELECT = PopulationRules(steps=100, margin=math.inf)


@dataclass(frozen=True)
class Way:
    """A row; what is not said is as in "the star" of the table.

    Attributes:
        name: of it. kind: ``"star"``, ``"ddp"`` or ``"alone"``.
        lr: largest learning rate. falls: ``"late"``: it stays there for half of the time, then falls in a straight
            line; ``"cosine"``: it falls all the time.
        every, delay: k and d. warmup: steps with an exchange at every other one.
        up, down: how updates and centres are packed. overwrite: the centre replaces what a worker has, no delta rule.
        outer: of the hub. population: None, or how the beginning is led. alike: same initial parameters.
    """

    name: str
    kind: str = "star"
    lr: float = 6e-3
    falls: str = "late"
    every: int = 10
    delay: int = 5
    warmup: int = 94
    up: str | None = "int4"
    down: str = "int8"
    overwrite: bool = False
    outer: HubOptimizer = field(default_factory=lambda: HALF)
    population: PopulationRules | None = None
    same_init: bool = True


WAYS = [
    Way("DDP", "ddp", 3e-3, "cosine"),
    Way("DDP", "ddp", 6e-3, "cosine"),
    Way("DDP", "ddp", 3e-3),
    Way("DDP", "ddp", 6e-3),
    Way("one machine alone", "alone"),
    Way("the star: k 10, d 5, delayed Nesterov 1.0, 0.5 after a warm-up, int4 up, int8 down"),
    Way("cosine", falls="cosine"),
    Way("no warm-up", warmup=0, outer=HubOptimizer("delayed-nesterov", 1.0, 0.5, warmup=10)),
    Way("no delta rule: the centre overwrites", overwrite=True),
    Way("float32 up", up=None),
    Way("bfloat16 down", down="bf16"),
    Way("d 0", delay=0),
    Way("d 9", delay=9),
    Way("d 9, the centre overwrites", delay=9, overwrite=True),
    Way("k 4, d 2", every=4, delay=2),
    Way("k 25, d 12", every=25, delay=12),
    Way("averaging", lr=1e-2, outer=HubOptimizer()),
    Way("averaging, no warm-up", lr=1e-2, outer=HubOptimizer(), warmup=0),
    Way("delayed Nesterov 0.7, 0.9", lr=3e-3, outer=HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=47)),
    Way("Nesterov at every arrival 0.7, 0.9", outer=HubOptimizer("nesterov", 0.7, 0.9, unstable=True)),
    Way("all take the best at step 100, then warm up", population=SELECT, warmup=194),
    Way("different beginnings, all take the best at step 100, then warm up",
        population=SELECT, warmup=194, same_init=False),
]  # fmt: skip


def late(share: float) -> float:
    """Return the share of the full learning rate: up in 5 %, full until half-time, then down in a straight line."""
    return min(1.0, (share + 1 / STEPS) / (WARMUP / STEPS), (1 - share) / 0.5)


def all_the_time(share: float) -> float:
    """Return the share of the full learning rate: up in 5 %, then down as a cosine."""
    return cosine_lr(min(STEPS - 1, int(share * STEPS)), steps=STEPS, warmup=WARMUP, peak=1.0)


SCHEDULES = {"late": late, "cosine": all_the_time}


class Overwriting(FragmentReplica):
    """What a worker without the delta rule does: its steps since the snapshot are lost."""

    def apply_received(self) -> None:
        self.overwrite = True
        super().apply_received()


def run(way: Way, seed: int) -> dict[str, Any]:
    """Train in one way; return loss, bytes a parameter and worker, curve."""
    task = GPTTask(SIZE, batch=BATCH, lr=way.lr, seed=seed, held_out=HELD_OUT)
    numel = sum(param.numel() for param in task.learner(0, 1).module.parameters())
    if way.kind != "star":
        machines = [SimulatedMachine(step_seconds=1.0)] * (WORKERS if way.kind == "ddp" else 1)
        schedule = SCHEDULES[way.falls]
        plan = DdpPlan(
            machines=machines, steps=STEPS, schedule=schedule, members=WORKERS, score_every=STEPS / 12
        )
        done = simulate_ddp(plan, task)
        curve = [(each.seconds, each.loss) for each in done.points]
        return {"loss": done.loss, "nbytes": 2 * done.nbytes / numel, "curve": curve, "digest": done.digest}
    plan = AsyncPlan(
        machines=[SimulatedMachine(step_seconds=1.0) for _ in range(WORKERS)],
        steps=STEPS,
        cadence=SyncSchedule(way.every, 1, way.delay),
        rules=HubRules(outer=way.outer, population=way.population, down=way.down),
        compression=way.up,
        same_init=way.same_init,
        warmup=way.warmup,
        stagger=False,
        schedule=SCHEDULES[way.falls],
        score_every=STEPS / 12,
    )
    with mock.patch(
        "paceline.tools.simulate.simulated_worker.FragmentReplica",
        Overwriting if way.overwrite else FragmentReplica,
    ):
        found = simulate_async(plan, task)
    finite = [(each.seconds, each.loss if math.isfinite(each.loss) else None) for each in found.points]
    sent = sum(counts["sent"] for counts in found.counts) / WORKERS
    return {
        "loss": found.loss if math.isfinite(found.loss) else None,
        "nbytes": (found.nbytes_up + found.nbytes_down) / numel / WORKERS,
        "rounds": sent,
        "curve": finite,
        "digest": found.digest,
    }


def main(
    seeds: Annotated[int, typer.Option(help="Of each way.")] = 1,
    only: Annotated[str, typer.Option(help="Ways whose name has this in it.")] = "",
    json_file: JsonOption = None,
) -> None:
    """Train in many ways in virtual time."""
    path = json_file or HERE / "virtual.json"
    check_writable(path, make_folder=True)
    torch.set_num_threads(1)
    ways = [way for way in WAYS if only in way.name]
    rows = []
    with ProgressBar("ways in virtual time", len(ways) * seeds) as tick:
        for way in ways:
            runs = []
            for seed in range(seeds):
                runs.append(run(way, seed))
                tick()
            rows.append({"name": way.name, "lr": way.lr, "falls": way.falls, "runs": runs})
            _tell(rows[-1])
    result = result_head("asynchronous-virtual") | {
        "settings": {"workers": WORKERS, "steps": STEPS, "batch": BATCH, "size": vars(SIZE)},
        "ways": rows,
    }
    write_json(path, result)
    print(path)


def _tell(row: dict[str, Any]) -> None:
    losses = ", ".join("diverged" if each["loss"] is None else f"{each['loss']:.4f}" for each in row["runs"])
    print(
        f"{row['name']} (lr {row['lr']:g}, {row['falls']}): {losses}; {row['runs'][0]['nbytes']:.0f} B a parameter",
        flush=True,
    )


if __name__ == "__main__":
    run_program(main)
