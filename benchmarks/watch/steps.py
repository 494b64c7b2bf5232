"""One rank of the overhead's measurement: blocks of steps with and without a Watch, in turns; see overhead.py."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

import paceline
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.world.control_collectives import barrier

STEPS, BATCH, CONTEXT = 8, 4, 128
"""Of a block; windows of a rank's batch, and tokens of a window."""


def main(rounds: int, out: Path) -> None:
    """Time `rounds` blocks of each kind (A B B A), and what the watcher's thread uses of a core."""
    world = paceline.init(device="cpu")
    torch.manual_seed(0)
    model = paceline.DataParallel(GPT(gpt_size("mini", vocabulary=256, context=CONTEXT)), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-4, fused=True)
    tokens = torch.randint(256, (BATCH, CONTEXT + 1))

    def step() -> None:
        model.backward(token_loss(model(tokens[:, :-1]), tokens[:, 1:]), samples=BATCH)
        optim.step()
        optim.zero_grad()

    def block() -> float:
        step()  # what making a Watch has left in the caches is no part of being watched
        barrier()
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        barrier()
        return time.perf_counter() - started

    seconds: dict[str, list[float]] = {"without": [], "with": []}
    used, watched = 0.0, 0.0
    block()
    for number in range(rounds + 1):
        for kind in sorted(seconds, reverse=number % 2 == 1):
            if kind == "without":
                took = block()
            else:
                with paceline.Watchdog():
                    before, began = cpu_of_watcher(), time.perf_counter()
                    took = block()
                    if number:
                        used += cpu_of_watcher() - before
                        watched += time.perf_counter() - began
            if number:
                seconds[kind].append(took / STEPS)
    if world.rank == 0:
        out.write_text(json.dumps({"seconds": seconds, "core_share": used / watched}))
    paceline.shutdown()


def cpu_of_watcher() -> float:
    """Return the CPU seconds that the watcher's thread has used (proc(5): schedstat)."""
    thread = next(each for each in threading.enumerate() if each.name == "paceline watch")
    with open(f"/proc/{os.getpid()}/task/{thread.native_id}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
