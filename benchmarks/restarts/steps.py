"""What every rank of `restarts.py` runs: tiny steps, and a file that reports when the first one of a world ended.

    steps.py FOLDER [hang|live]

hang: before the first restart, rank 0 ignores SIGTERM and sleeps, as a rank does that hangs in a collective.
live: the ranks recover in place.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

BEGAN = time.time()  # before torch is imported


def report(folder: Path, began: float) -> None:
    """Write when this rank's new world began, and that its first step ended now."""
    from paceline.world.control_collectives import rank_and_size

    rank, size = rank_and_size()
    facts = {"rank": rank, "size": size, "pid": os.getpid(), "began": began, "stepped": time.time()}
    path = folder / f"{facts['stepped']:.6f}-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(facts))
    path.with_suffix(".part").rename(path)


def main(folder: Path, hang: bool) -> None:
    """Make steps until ``enough`` is in the folder."""
    import torch
    import torch.distributed as dist

    import paceline

    world = paceline.init("gloo", timeout=120.0)
    enough, reported = torch.zeros(1), False
    while not enough:
        enough[0] = (folder / "enough").exists()
        dist.all_reduce(enough)
        if not reported:
            report(folder, BEGAN)
            reported = True
        if hang and world.rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        time.sleep(0.05)
    paceline.shutdown()


def recover_in_place(folder: Path) -> None:
    """Make steps until ``enough`` is in the folder, and report each world's first one and when it was needed."""
    import torch

    import paceline
    from paceline.world.live_file import LiveFile

    paceline.init("gloo", timeout=120.0)
    model = paceline.DataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    live, reported, noticed = LiveFile.from_environment(os.environ), -1, BEGAN
    assert live is not None, "paceline run --recovery live starts this"
    with paceline.Elastic(model, optimizer) as elastic:
        enough = False
        while not enough:
            step, recoveries = elastic.step, elastic.recoveries
            with elastic.attempt():
                done = torch.full((1, 8), float((folder / "enough").exists()))
                model.backward(model(done).sum(), samples=1)
                enough = bool(model.module.weight.grad.any())
                optimizer.step()
                optimizer.zero_grad()
            if elastic.recoveries != recoveries and (world := live.read()):
                noticed = time.time() - world.seconds
            if elastic.step > step and reported != elastic.recoveries:
                report(folder, noticed)
                reported = elastic.recoveries
            time.sleep(0.05)
    paceline.shutdown()


if __name__ == "__main__":
    if "live" in sys.argv[2:]:
        recover_in_place(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), "hang" in sys.argv[2:])
