"""A worker of `loss.py`: an ordinary loop beside `paceline.AsyncDataParallel`, or alone, on a machine of a given speed.

python benchmarks/star/star_worker.py JOB.json RANK
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from training import Training, seconds_of, wait_until

import paceline
from paceline.testing.netlab.lab_network import parse_traffic
from paceline.tools.train.lr_schedule import cosine_lr


def main(job_file: str, rank: int) -> None:
    """Train until the job's time is over, and write what this worker did."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    training = Training(rank, job["seed"], job["lr"], seconds_of(rank, job["fastest"]))
    star = nullcontext()
    if job["hub"]:
        star = paceline.AsyncDataParallel(
            training.net, training.optimizer, job["hub"], job["every"], job["delay"], insecure=True,
            compression=job["compression"], bandwidth=job["bandwidth"], name=f"worker{rank}",
        )  # fmt: skip
    wait_until(job["at"])
    began, sent = time.monotonic(), parse_traffic(Path("/proc/net/dev").read_text())
    lasting = []
    with star as running:
        while (past := time.monotonic() - began) < job["seconds"]:
            share = cosine_lr(int(past / job["seconds"] * 1000), steps=1000, warmup=50, peak=1.0)
            training.step(share)
            lasting.append(time.monotonic() - began)
        counts = vars(running.counts) if running is not None else {}
    passed = parse_traffic(Path("/proc/net/dev").read_text()) - sent
    told = {
        "rank": rank,
        "steps": len(lasting),
        "seconds": lasting[-1],
        "sent": passed.sent,
        "received": passed.received,
        "counts": counts,
    }
    Path(job["folder"], f"worker-{job['tag']}-{rank}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
