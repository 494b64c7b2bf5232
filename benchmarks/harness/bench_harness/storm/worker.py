"""A worker in a storm: an ordinary loop beside `paceline.AsyncDataParallel`.

Every round that was acknowledged gets a line in a file.

python -m bench_harness.storm.worker JOB.json NUMBER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TextIO

import torch

from bench_harness.storm.spoil import spoil
from bench_harness.storm.task import Learner
from paceline.async_dp.api import AsyncDataParallel
from paceline.async_dp.wal.worker_outbox import Outbox

__all__ = ["main"]


def main(job_file: str, number: int) -> None:
    """Train until the storm is over, then leave in order."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    folder = Path(job["folder"])
    torch.set_num_threads(1)
    learner = Learner(number)
    notes = (folder / f"acknowledged-{number}.txt").open("a", encoding="utf-8", buffering=1)
    star = AsyncDataParallel(
        learner.net, learner.optimizer, job["hub"], job["every"], job["delay"], insecure=True, score=learner.loss,
        folder=folder / f"outbox-{number}", name=f"worker{number}",
    )  # fmt: skip
    with star:
        for thread in star._comm_threads:
            outbox = thread.session._outbox
            _note(outbox, notes)
            spoil(thread.exchange, job["spoil"], seed=time.time_ns())
        while time.time() < job["until"]:
            learner.step()
            time.sleep(job["step_seconds"])
        ended = star.finish(120.0)
    Path(folder, f"ended-{number}.json").write_text(
        json.dumps({"centre": ended, "loss": learner.loss(), "counts": vars(star.counts)}), encoding="utf-8"
    )


def _note(outbox: Outbox, notes: TextIO) -> None:
    """Write down which rounds are acknowledged, before they are forgotten."""
    take = outbox.acknowledge

    def note(round: int, fragment: int) -> bool:
        notes.write(f"{round} {fragment}\n")
        return take(round, fragment)

    outbox.acknowledge = note


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
