"""Asynchronous training in virtual time, way by way: loss and bytes beside gradients averaged at every step.

    python benchmarks/star/virtual.py

A tiny GPT (2 layers, d 64, context 64) on the embedded corpus, four equal machines, 600 steps of 8 windows each, AdamW
with a cosine schedule, fixed seeds: real gradients, simulated clocks and links, the hub and worker code that runs.
Every row is the same to the bit each time. Writes ``virtual.json`` beside this file.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from paceline.bench.facts import head, write_result
from paceline.bench.progress import TurnBar
from paceline.cli.writable import check_writable
from paceline.errors import PacelineError
from paceline.lm.sizes import Size
from paceline.simulate.asynchrony import AsyncPlan, Machine, simulate
from paceline.simulate.lockstep import LockstepPlan, lockstep
from paceline.simulate.tasks import GPTTask
from paceline.star.merge import Outer
from paceline.star.population import PopulationRules
from paceline.star.rules import HubRules
from paceline.sync.staggering import Cadence
from paceline.train.schedule import cosine

HERE = Path(__file__).parent
SIZE = Size("tiny two", 64, 256, 2, 4, vocabulary=256, context=64)
WORKERS, STEPS, BATCH, WARMUP = 4, 600, 8, 30
HELD_OUT = 256


@dataclass(frozen=True)
class Way:
    """A row.

    Attributes:
        name: of it. lr: largest learning rate. every, delay: k and d. outer: of the hub. compression: of updates.
        alike: same initial parameters. population: None, or how the beginning is led.
        warmup: local steps before anything is sent. kind: ``"star"``, ``"ddp"`` or ``"alone"``.
    """

    name: str
    lr: float = 3e-3
    every: int = 10
    delay: int = 5
    outer: Outer = field(default_factory=Outer)
    compression: str | None = "int4"
    alike: bool = True
    population: PopulationRules | None = None
    warmup: int = 0
    kind: str = "star"


DELAYED = Outer("delayed-nesterov", 0.7, 0.9)
HALF = Outer("delayed-nesterov", 1.0, 0.5)
SELECT = PopulationRules(steps=100, margin=math.inf)
WAYS = [
    Way("DDP", kind="ddp"),
    Way("DDP", lr=6e-3, kind="ddp"),
    Way("one machine alone", kind="alone"),
    Way("one machine alone", lr=6e-3, kind="alone"),
    Way("k 10, d 5, averaging", lr=1e-2),
    Way("k 10, d 5, averaging, float32", lr=1e-2, compression=None),
    Way("k 10, d 0, averaging", lr=1e-2, delay=0),
    Way("k 10, d 9, averaging", lr=1e-2, delay=9),
    Way("k 4, d 2, averaging", lr=1e-2, every=4, delay=2),
    Way("k 25, d 10, averaging", lr=1e-2, every=25, delay=10),
    Way("k 10, d 5, delayed Nesterov 1.0, 0.5", lr=6e-3, outer=HALF),
    Way("k 10, d 5, delayed Nesterov 0.7, 0.9", outer=DELAYED),
    Way("the same after 100 local steps", outer=DELAYED, warmup=100),
    Way("the same, all adopt the best at step 100", outer=DELAYED, population=SELECT),
    Way("the same, different beginnings", outer=DELAYED, population=SELECT, alike=False),
    Way("averaging, all adopt the best at step 100", lr=1e-2, population=SELECT),
    Way("the same, different beginnings", lr=1e-2, population=SELECT, alike=False),
    Way("k 10, d 5, Nesterov per arrival 0.7, 0.9", outer=Outer("nesterov", 0.7, 0.9, unstable=True)),
]


def schedule(share: float) -> float:
    """Return the share of the full learning rate."""
    return cosine(min(STEPS - 1, int(share * STEPS)), steps=STEPS, warmup=WARMUP, peak=1.0)


def run(way: Way, seed: int) -> dict[str, Any]:
    """Train in one way; return loss, bytes a parameter and worker, curve."""
    task = GPTTask(SIZE, batch=BATCH, lr=way.lr, seed=seed, held_out=HELD_OUT)
    numel = sum(param.numel() for param in task.learner(0, 1).module.parameters())
    if way.kind != "star":
        machines = [Machine(step_seconds=1.0)] * (WORKERS if way.kind == "ddp" else 1)
        plan = LockstepPlan(machines, steps=STEPS, schedule=schedule, members=WORKERS, score_every=STEPS / 12)
        done = lockstep(plan, task)
        curve = [(each.seconds, each.loss) for each in done.points]
        return {"loss": done.loss, "nbytes": 2 * done.nbytes / numel, "curve": curve, "digest": done.digest}
    plan = AsyncPlan(
        [Machine(step_seconds=1.0) for _ in range(WORKERS)],
        steps=STEPS,
        cadence=Cadence(way.every, 1, way.delay),
        rules=HubRules(outer=way.outer, population=way.population),
        compression=way.compression,
        alike=way.alike,
        warmup=way.warmup,
        stagger=False,
        schedule=schedule,
        score_every=STEPS / 12,
    )
    found = simulate(plan, task)
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
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")
    ] = None,
) -> None:
    """Train in many ways in virtual time."""
    path = json_file or HERE / "virtual.json"
    check_writable(path, make_folder=True)
    torch.set_num_threads(1)
    ways = [way for way in WAYS if only in way.name]
    rows = []
    with TurnBar("ways in virtual time", len(ways) * seeds) as tick:
        for way in ways:
            runs = []
            for seed in range(seeds):
                runs.append(run(way, seed))
                tick()
            rows.append({"name": way.name, "lr": way.lr, "runs": runs})
            _tell(rows[-1])
    result = head("asynchronous-virtual") | {
        "settings": {"workers": WORKERS, "steps": STEPS, "batch": BATCH, "size": vars(SIZE)},
        "ways": rows,
    }
    write_result(path, result)
    print(path)


def _tell(row: dict[str, Any]) -> None:
    losses = ", ".join("diverged" if each["loss"] is None else f"{each['loss']:.4f}" for each in row["runs"])
    print(
        f"{row['name']} (lr {row['lr']:g}): {losses}; {row['runs'][0]['nbytes']:.0f} B a parameter",
        flush=True,
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except PacelineError as error:
        sys.exit(str(error))
