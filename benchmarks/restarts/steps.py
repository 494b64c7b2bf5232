"""What every rank of `measure.py` runs: steps of a tiny all-reduce, and a note of when the first one was done.

    steps.py FOLDER [deaf]

Deaf: before the first restart, rank 0 heeds no SIGTERM and sleeps, as a rank does that hangs in a collective.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline import World

BEGAN = time.time()  # before torch is imported
_PAUSE_SECONDS = 0.05


def main(folder: Path, deaf: bool) -> None:
    """Enter the world, make steps until somebody says that it is enough."""
    import torch
    import torch.distributed as dist

    import paceline

    world = paceline.init("gloo", timeout=120.0)
    enough = torch.zeros(1)
    stepped = False
    while not enough:
        enough[0] = (folder / "enough").exists()
        dist.all_reduce(enough)
        if not stepped:
            note(folder, world)
            stepped = True
        if deaf and world.rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        time.sleep(_PAUSE_SECONDS)
    paceline.shutdown()


def note(folder: Path, world: World) -> None:
    """Write down that this rank has made its first step."""
    told = {
        "rank": world.rank,
        "size": world.size,
        "pid": os.getpid(),
        "began": BEGAN,
        "stepped": time.time(),
    }
    path = folder / f"{told['stepped']:.6f}-{world.rank}.json"
    path.with_suffix(".part").write_text(json.dumps(told))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "deaf" in sys.argv[2:])
