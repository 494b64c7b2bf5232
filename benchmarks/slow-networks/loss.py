"""Time to the same held-out loss over a slow network: torch DDP beside parameters averaged every few steps.

    python benchmarks/slow-networks/loss.py

Trains the reference model `mini` on hosts that `paceline.testing.netlab` plays (as root, on Linux) and writes
``loss-<hosts>x<rate>.json`` beside this file. What DDP learns in a step does not depend on the network: its curves are
made on this machine, and its step is timed on the lab, in turns with the trainings that are timed whole.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from loss_figures import LossResult
from ways import DDP, OURS, Way

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
BATCH, SIZE = 2, "mini"
EVERY = 10
"""Steps between two points of a curve."""

BUCKETS = (1, 5, 25)


class Stage:
    """Runs jobs of `loss_ranks.py` on the hosts of a lab, or as many processes of one host.

    Args:
        ranks: how many. rate: of the links between hosts; None: one host with all ranks.
        tick: called as a training goes on.
    """

    def __init__(self, ranks: int, rate: str | None, tick: Callable[[], None]) -> None:
        self.ranks, self._tick = ranks, tick
        self._lab = Lab(ranks, rate) if rate else Lab(1)
        self._per_host = 1 if rate else ranks

    def close(self) -> None:
        """Remove the hosts."""
        self._lab.close()

    def run(self, way: Way, *, seed: int = 0, timed: int = 0, every: int = EVERY) -> Any:
        """Return what a job wrote: a curve, or seconds of steps."""
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            job, found = Path(folder, "job.json"), Path(folder, "found.json")
            told = {"way": asdict(way), "seed": seed, "batch": BATCH, "size": SIZE, "every": every}
            job.write_text(json.dumps({**told, "timed": timed, "out": str(found)}), encoding="utf-8")
            started = self._lab.start_torchrun(
                [str(HERE / "loss_ranks.py"), str(job)], ranks_per_host=self._per_host
            )
            started.follow(self._tick)
            return json.loads(found.read_text(encoding="utf-8"))


def main(
    hosts: Annotated[int, typer.Option(min=2, help="Hosts around the switch, a rank each.")] = 4,
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "100Mbit/s",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each way.")] = 3,
    timed: Annotated[int, typer.Option(min=1, help="Steps of DDP that are timed on the lab.")] = 100,
    json_file: JsonOption = None,
) -> None:
    """Train by DDP and by ours until the same held-out loss, and compare the times."""
    path = json_file or HERE / f"loss-{hosts}x{rate.removesuffix('/s')}.json"
    check_writable(path, make_folder=True)
    turns = seeds * (DDP.steps // EVERY + OURS.steps // EVERY)
    with ProgressBar(f"time to loss, {hosts} hosts, {rate}", turns) as tick:
        with closing(Stage(hosts, None, tick)) as here:
            ddp = [here.run(DDP, seed=seed) for seed in range(seeds)]
        with closing(Stage(hosts, rate, tick)) as lab:
            buckets = {mib: lab.run(replace(DDP, bucket_mib=mib), timed=8) for mib in BUCKETS}
            best = min(buckets, key=lambda mib: sorted(buckets[mib])[4])
            seconds: list[float] = []
            ours = []
            for seed in range(seeds):
                seconds += lab.run(replace(DDP, bucket_mib=best), timed=-(-timed // seeds))
                ours.append(lab.run(OURS, seed=seed))
    result = result_head("time-to-loss") | {
        "settings": {
            "hosts": hosts,
            "rate": rate,
            "size": SIZE,
            "batch": BATCH,
            "threads": 1,
            "parameters": gpt_size(SIZE).parameters(),
        },
        "ddp": {
            "way": asdict(DDP),
            "curves": ddp,
            "buckets": buckets,
            "bucket_mib": best,
            "seconds": seconds,
        },
        "ours": {"way": asdict(OURS), "curves": ours},
    }
    write_json(path, result)
    for row in LossResult.from_json(result).rows():
        print(row)
    print(path)


if __name__ == "__main__":
    run_program(main)
