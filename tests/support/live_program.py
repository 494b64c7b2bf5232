"""A program whose ranks recover live: ``live_program.py STEPS FOLDER``, in a world of `paceline run`.

Every process writes a line per attempt to ``FOLDER/<member>.log``: its pid, the step reached, the number of ranks; and
at its end the digest of the parameters and buffers.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline._core.summation_tree import leaves_of
from paceline.data.leaf_random import seed_leaf

VIRTUAL_RANKS = 6


def build() -> tuple[paceline.DataParallel, torch.optim.Optimizer]:
    """Return a model with dropout and running statistics, and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 90), nn.BatchNorm1d(90), nn.Dropout(0.2), nn.Tanh(), nn.Linear(90, 3))
    model = paceline.DataParallel(net, virtual_ranks=VIRTUAL_RANKS)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)


def run_step(model: paceline.DataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Run this rank's part of a step."""
    for leaf in leaves_of(model.comm.rank, model.comm.size, VIRTUAL_RANKS):
        seed_leaf(0, 0, step, leaf)
        samples = (3 * step + leaf) % 4 + 2
        inputs, targets = torch.randn(samples, 12), torch.randn(samples, 3)
        model.backward((model(inputs) - targets).square().mean(), samples=samples)
    model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()


def digest(model: paceline.DataParallel) -> str:
    """Return the digest of parameters and buffers."""
    found = hashlib.sha256()
    for value in model.module.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def main(steps: int, folder: Path) -> None:
    """Train, and write the log of this process."""
    torch.set_num_threads(1)
    paceline.init(os.environ.get("LIVE_BACKEND"), device="cpu")
    model, optimizer = build()
    member = os.environ.get("PACELINE_MEMBER", "alone").replace("/", "-")
    with (folder / f"{member}.log").open("a", buffering=1) as log:
        with paceline.Elastic(model, optimizer, lost=2.0) as elastic:
            while elastic.step < steps:
                with elastic.attempt():
                    run_step(model, optimizer, elastic.step)
                log.write(f"{os.getpid()} {elastic.step} {model.comm.size}\n")
                time.sleep(0.005)
        log.write(f"digest {digest(model)}\n")
    paceline.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
