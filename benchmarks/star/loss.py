"""Time to the same held-out loss on machines of different speeds behind a slow switch: torch DDP, LocalSGD, a star.

    python benchmarks/star/loss.py

Trains the reference model `mini` on four hosts that `paceline.testing.netlab` plays (as root, on Linux), whose
speeds are 1 : 1 : 2 : 4, and writes ``loss-<rate>.json`` beside this file. What DDP and LocalSGD learn in a step
depends on no network and no speed: their curves are those of `benchmarks/slow-networks`, and their steps are timed
here, in turns with the star, which is timed whole. The hub is a process of the first host, beside its worker.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from training import BATCH, SIZE, SPEEDS, Training

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import TurnBar
from paceline.tools.cli.shared_options import JsonResultOption
from paceline.tools.models.gpt_sizes import size_of
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
CURVES = HERE.parent / "slow-networks" / "loss-4x100Mbit.json"
BUCKETS = (1, 5, 25)
LEAD_SECONDS = 20.0
"""For processes to start in, before the time begins to count."""


@dataclass(frozen=True)
class StarSettings:
    """How the star trains.

    Attributes:
        seconds: of the schedule. every, delay: k and d. lr: largest learning rate. outer: of the hub.
        compression: of updates. bandwidth: most that each may use.
    """

    seconds: float = 300.0
    every: int = 4
    delay: int = 3
    lr: float = 2e-3
    compression: str = "int4"
    bandwidth: str | None = None


class Stage:
    """Runs jobs on the hosts of a lab.

    Args:
        lab: its hosts. folder: for what jobs write. fastest: seconds of a step of the fastest machine.
    """

    def __init__(self, lab: Lab, folder: Path, fastest: float) -> None:
        self._lab, self._folder, self._fastest = lab, folder, fastest

    def lockstep(self, **job: Any) -> list[float]:
        """Return seconds of steps that all machines make together."""
        job_file, out = self._folder / "job.json", self._folder / "out.json"
        job_file.write_text(json.dumps(job | {"fastest": self._fastest, "out": str(out)}), encoding="utf-8")
        started = self._lab.start_torchrun([str(HERE / "lockstep_ranks.py"), str(job_file)], ranks_per_host=1)
        started.follow(lambda: None)
        return json.loads(out.read_text(encoding="utf-8"))

    def workers(self, settings: StarSettings, seed: int, *, alone: bool = False) -> list[dict[str, Any]]:
        """Return what each worker did in an asynchronous training; alone: without a hub."""
        tag = "alone" if alone else "star"
        hub = None if alone else f"tcp://{self._lab.addresses[0]}:7077"
        shutil.rmtree(self._folder / "hub", ignore_errors=True)
        job = asdict(settings) | {
            "hub": hub,
            "bind": "tcp://*:7077",
            "seed": seed,
            "fastest": self._fastest,
            "at": time.time() + LEAD_SECONDS,
            "folder": str(self._folder),
            "outer": {"name": "averaging", "lr": 1.0},
            "tag": tag,
        }
        job_file, hub_file = self._folder / "job.json", self._folder / "hub.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        hub_file.write_text(json.dumps(job | {"every": 10.0, "bandwidth": None}), encoding="utf-8")
        serving = None if alone else self._lab.start([str(HERE / "star_hub.py"), str(hub_file)], on=0)
        jobs = [
            self._lab.start([str(HERE / "star_worker.py"), str(job_file), str(rank)], on=rank)
            for rank in range(len(SPEEDS))
        ]
        for each in jobs:
            each.follow(lambda: None)
        if serving is not None:
            serving.follow(lambda: None)
        return [
            json.loads((self._folder / f"worker-{tag}-{rank}.json").read_text(encoding="utf-8"))
            for rank in range(len(SPEEDS))
        ]

    def curve(self, seed: int) -> list[dict[str, float]]:
        """Return the held-out loss of the copies of the centre that the hub kept."""
        from safetensors.torch import load_file

        judge = Training(0, seed, 1e-3, 0.0)
        copies = json.loads((self._folder / "copies.json").read_text(encoding="utf-8"))
        return [{"seconds": each["seconds"], "loss": judge.loss(load_file(each["path"]))} for each in copies]


def star(stage: Stage, settings: StarSettings, seed: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Train once; return the curve and what the workers did."""
    workers = stage.workers(settings, seed)
    tick()
    curve = stage.curve(seed)
    tick()
    return {"seed": seed, "curve": curve, "workers": workers}


def best_bucket(stage: Stage, lr: float, tick: Callable[[], None]) -> tuple[dict[int, list[float]], float]:
    """Return seconds of DDP's steps by bucket size in MiB, and the size with the least median."""
    buckets: dict[int, list[float]] = {}
    for mib in BUCKETS:
        buckets[mib] = stage.lockstep(kind="ddp", bucket_mib=mib, lr=lr, steps=8)
        tick()
    return buckets, min(buckets, key=lambda mib: sorted(buckets[mib])[4])


def main(
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "200Mbit/s",
    fastest: Annotated[float, typer.Option(help="Seconds of a step of the fastest machine.")] = 0.15,
    seeds: Annotated[int, typer.Option(help="Trainings by the star.")] = 3,
    seconds: Annotated[float, typer.Option(help="Of the star's learning-rate schedule.")] = 300.0,
    every: Annotated[int, typer.Option(help="k of the star.")] = 4,
    delay: Annotated[int, typer.Option(help="d of the star.")] = 3,
    lr: Annotated[float, typer.Option(help="Largest learning rate of the star.")] = 2e-3,
    timed: Annotated[
        int, typer.Option(help="Steps of each lock-step way that are timed, for each seed.")
    ] = 20,
    lockstep: Annotated[bool, typer.Option(help="Time DDP and LocalSGD too.")] = True,
    json_file: JsonResultOption = None,
) -> None:
    """Train by a star, time torch DDP and LocalSGD beside it, and compare the times to the same loss."""
    path = json_file or HERE / f"loss-{rate.removesuffix('/s')}.json"
    check_writable(path, make_folder=True)
    settings = StarSettings(seconds, every, delay, lr)
    curves = json.loads(CURVES.read_text(encoding="utf-8"))
    ddp_lr, local = curves["ddp"]["way"]["lr"], curves["ours"]["way"]
    result = result_head("asynchronous-time-to-loss") | {
        "settings": {
            "hosts": len(SPEEDS),
            "rate": rate,
            "speeds": list(SPEEDS),
            "fastest_step": fastest,
            "size": SIZE,
            "batch": BATCH,
            "parameters": size_of(SIZE).parameters(),
            "star": asdict(settings),
        }
    }
    turns = seeds * (2 + 2 * lockstep) + lockstep * len(BUCKETS)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        Lab(len(SPEEDS), rate) as lab,
        TurnBar("time to loss, four speeds", turns) as tick,
    ):
        stage = Stage(lab, Path(folder), fastest)
        ddp: list[float] = []
        local_steps: list[float] = []
        runs: list[dict[str, Any]] = []
        buckets, best = best_bucket(stage, ddp_lr, tick) if lockstep else ({}, 5.0)
        for seed in range(seeds):
            if lockstep:
                ddp += stage.lockstep(kind="ddp", bucket_mib=best, lr=ddp_lr, steps=timed)
                tick()
                local_steps += stage.lockstep(
                    kind="local", options=local["options"], lr=local["lr"], steps=timed
                )
                tick()
            runs.append(star(stage, settings, seed, tick))
    result |= {
        "ddp": {"buckets": buckets, "bucket_mib": best, "seconds": ddp},
        "local": {"options": local["options"], "seconds": local_steps},
        "star": runs,
    }
    write_json(path, result)
    print(path)


if __name__ == "__main__":
    run_program(main)
