"""A program whose ranks recover live: ``live_program.py STEPS FOLDER [DATA] [WORKERS]``, under `paceline run`.

Every process writes a line per attempt to ``FOLDER/<member>.log``: its pid, the step reached, the number of ranks; and
at its end the digest of the parameters and buffers. With ``virtual`` or ``plain`` it trains with a `Loader`, with or
without virtual ranks, which ``WORKERS`` processes read. Then there are further lines, ``used EPOCH STEP SAMPLE…`` with
the samples that all ranks used in a step, and ``workers PID…`` with the worker processes of this one. With
``forgotten`` the plain one is not passed to `Elastic`; with ``foreign`` the loader is not Paceline's, and reads this
rank's own samples.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import time
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TextIO

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline
from foreign_loaders import BATCHES, make_loader
from paceline._core.summation_tree import leaves_of
from paceline.data.leaf_random import seed_leaf
from paceline.world.value_collectives import gather_values

VIRTUAL_RANKS = 6
STEPS_PER_EPOCH = 10  # with virtual ranks


class Noisy(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Numbered samples with random inputs."""

    def __len__(self) -> int:
        return 2 * VIRTUAL_RANKS * STEPS_PER_EPOCH

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return number, torch.randn(12), torch.full((3,), number / 60)


def build(virtual_ranks: int | None = VIRTUAL_RANKS) -> tuple[paceline.DataParallel, torch.optim.Optimizer]:
    """Return a model with dropout and, with virtual ranks, running statistics; and its optimizer."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(90) if virtual_ranks else nn.LayerNorm(90)
    net = nn.Sequential(nn.Linear(12, 90), norm, nn.Dropout(0.2), nn.Tanh(), nn.Linear(90, 3))
    sync = os.environ.get("LIVE_SYNC", "bucketed")
    model = paceline.DataParallel(net, sync=sync, virtual_ranks=virtual_ranks)
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


def train(model: paceline.DataParallel, optimizer: torch.optim.Optimizer, steps: int, log: TextIO) -> None:
    """Train, and log each attempt; where LIVE_RECORD names a folder, record the run there."""
    folder = os.environ.get("LIVE_RECORD")
    record = paceline.Profiler(folder, model, every=1) if folder else None
    saves = os.environ.get("LIVE_CHECKPOINT")
    checkpoint = paceline.Checkpoint(saves, model, optimizer, every=10) if saves else None
    if checkpoint is not None:
        checkpoint.load()
    elastic = paceline.Elastic(model, optimizer, lost=2.0, checkpoint=checkpoint)
    if record is not None:
        elastic.on_world(record.rejoin)
    with record or nullcontext(), elastic:
        while elastic.step < steps:
            try:
                with elastic.attempt():
                    run_step(model, optimizer, elastic.step)
                    if record is not None:
                        record.log(loss=float(elastic.step))
            except SystemExit:
                log.write(f"left {int(checkpoint is not None and checkpoint._writer.lock is not None)}\n")
                raise
            log.write(f"{os.getpid()} {elastic.step} {model.comm.size}\n")
            time.sleep(0.005)


def train_with_loader(
    model: paceline.DataParallel,
    optimizer: torch.optim.Optimizer,
    loader: paceline.Loader,
    epochs: int,
    log: TextIO,
    passed: bool,
) -> None:
    """Train on the batches of a loader, and log each attempt and the samples it used.

    Args:
        model, optimizer, loader: of this rank.
        epochs: number of epochs.
        log: of this process.
        passed: whether `Elastic` gets the loader.
    """
    with paceline.Elastic(model, optimizer, *([loader] if passed else []), lost=2.0) as elastic:
        for batches in loader.steps(epochs):
            step, used = elastic.step, []
            with elastic.attempt():
                mine = []
                for batch in batches:
                    numbers, inputs, targets = batch
                    model.backward((model(inputs) - targets).square().mean(), samples=batch.samples)
                    mine += numbers.tolist() if batch.samples else []
                epoch, used = loader.epoch, [*chain(*gather_values(mine))]
                optimizer.step()
                optimizer.zero_grad()
            if elastic.step == step + 1 and used:
                log.write(f"used {epoch} {step} {' '.join(map(str, sorted(used)))}\n")
            workers = [str(each.pid) for each in multiprocessing.active_children()]
            log.write(f"workers {' '.join(workers)}\n")
            log.write(f"{os.getpid()} {elastic.step} {model.comm.size}\n")
            time.sleep(0.02)


def train_with_foreign_loader(
    model: paceline.DataParallel, optimizer: torch.optim.Optimizer, epochs: int, log: TextIO
) -> None:
    """Train on the batches of a loader that knows this rank only, and log the samples that all ranks used."""
    loader = make_loader("Countdown", model.comm.rank, model.comm.size)
    with paceline.Elastic(model, optimizer, loader, lost=2.0) as elastic:
        for epoch in range(epochs):
            for numbers in loader:
                step, used = elastic.step, []
                with elastic.attempt():
                    used = [*chain(*gather_values(numbers))]
                    model.backward(model(torch.ones(4, 12)).mean(), samples=4)
                    optimizer.step()
                    optimizer.zero_grad()
                log.write(f"used {epoch} {step} {' '.join(map(str, sorted(used)))}\n")
                log.write(f"{os.getpid()} {elastic.step} {model.comm.size}\n")
                time.sleep(0.02)


def main(steps: int, folder: Path, data: str = "", workers: str = "0") -> None:
    """Train, and write the log of this process."""
    torch.set_num_threads(1)
    paceline.init(os.environ.get("LIVE_BACKEND"), device="cpu")
    virtual_ranks = None if data in ("plain", "forgotten", "foreign") else VIRTUAL_RANKS
    model, optimizer = build(virtual_ranks)
    member = os.environ.get("PACELINE_MEMBER", "alone").replace("/", "-")
    with (folder / f"{member}.log").open("a", buffering=1) as log:
        if data == "foreign":
            train_with_foreign_loader(model, optimizer, steps // BATCHES, log)
        elif data:
            batch_size = 2 if virtual_ranks else 4
            loader = paceline.Loader(
                Noisy(), batch_size, virtual_ranks=virtual_ranks, num_workers=int(workers)
            )
            epochs = steps // STEPS_PER_EPOCH
            train_with_loader(model, optimizer, loader, epochs, log, passed=data != "forgotten")
        else:
            train(model, optimizer, steps, log)
        log.write(f"digest {digest(model)}\n")
    paceline.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
