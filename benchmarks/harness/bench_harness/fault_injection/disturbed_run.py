"""A run of `saved_training` under `paceline run` that is disturbed at random moments."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench_harness.fault_injection.saved_training import PROGRAM

__all__ = ["start_run", "training_pids", "wait_for_moment"]


def start_run(
    folder: Path, ranks: int, options: Sequence[str] = (), save_every: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a run in a folder, for the first time or again.

    Args:
        folder: for its output.
        ranks: on this host.
        options: further ones of `paceline run`.
        save_every: steps between two checkpoints; None: the program's default.
    """
    given = [
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        "1000",
        "--log-dir",
        str(folder / "logs"),
        *options,
    ]
    command = [sys.executable, "-m", "paceline", "run", *given, PROGRAM, str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"SAVE_EVERY": str(save_every)} if save_every else {})
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=env)


def training_pids(folder: Path, ranks: int) -> list[int]:
    """Return the process ids of the ranks that are in their loop now, none while a world begins."""
    pids = []
    for rank in range(ranks):
        try:
            pid = int((folder / f"pid-{rank}").read_text())
            if PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
        except (OSError, ValueError):
            return []
    return pids if len(pids) == ranks else []


def wait_for_moment(
    folder: Path,
    ranks: int,
    generator: random.Random,
    process: subprocess.Popen[bytes],
    *,
    during_save: bool,
) -> list[int]:
    """Wait for a random moment of a run; return the ranks' process ids, none if the run ended before."""
    seconds, since = generator.uniform(0.0, 1.5), None
    while process.poll() is None:
        pids = training_pids(folder, ranks)
        since = (since or time.monotonic()) if pids else None
        saving = not during_save or any((folder / "checkpoint").glob("step-*.tmp-*"))
        if since is not None and time.monotonic() - since >= seconds and saving:
            time.sleep(generator.uniform(0.0, 0.02))
            return pids
        time.sleep(0.001)
    return []
