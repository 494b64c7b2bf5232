"""What every rank of `restarts.py` runs: steps of a tiny all-reduce, and a file that reports when the first one ended.

    steps.py FOLDER [hang]

hang: before the first restart, rank 0 ignores SIGTERM and sleeps, as a rank does that hangs in a collective.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

BEGAN = time.time()  # before torch is imported


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
            facts = {"rank": world.rank, "size": world.size, "pid": os.getpid()}
            facts |= {"began": BEGAN, "stepped": time.time()}
            path = folder / f"{facts['stepped']:.6f}-{world.rank}.json"
            path.with_suffix(".part").write_text(json.dumps(facts))
            path.with_suffix(".part").rename(path)
            reported = True
        if hang and world.rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        time.sleep(0.05)
    paceline.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "hang" in sys.argv[2:])
