"""A task that any number of ranks train on as one worker of asynchronous training."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import paceline
from hub_process import wait_until
from paceline.async_dp.worker.fragment_replica import FragmentState

__all__ = ["DELAY", "EVERY", "INPUTS", "STEPS", "TARGETS", "Task", "network", "start", "train"]

EVERY, DELAY, STEPS = 5, 2, 40
INPUTS = torch.randn(256, 12, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS @ torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(8)] if norm else [nn.Tanh()]
    return nn.Sequential(nn.Linear(12, 8), *middle, nn.Linear(8, 3))


class Task:
    """The same global batches for any number of ranks, each of which takes its share."""

    def __init__(self, sync: str = "bucketed", norm: bool = False, rows: int = 16) -> None:
        self.model = paceline.DataParallel(network(norm), sync=sync)
        self.optim = paceline.ShardedOptimizer(self.model, torch.optim.AdamW, lr=5e-3)
        self.comm, self.rows = self.model.comm, rows
        self._drawn = torch.Generator().manual_seed(7)

    def step(self) -> None:
        drawn = torch.randint(0, 256, (self.rows,), generator=self._drawn)
        mine = drawn[self.comm.rank :: self.comm.size]
        loss = ((self.model(INPUTS[mine]) - TARGETS[mine]) ** 2).mean()
        self.model.backward(loss, samples=len(mine))
        self.optim.step()
        self.optim.zero_grad()

    def held(self) -> torch.Tensor:
        return torch.cat([param.flatten() for param in self.model.whole_parameters()])

    def training(self, hub: str, **options: Any) -> paceline.AsyncDataParallel:
        options = {"every": EVERY, "delay": DELAY, "compression": None, **options}
        return paceline.AsyncDataParallel(self.model, self.optim, hub, **options)


def answered(training: paceline.AsyncDataParallel) -> bool:
    """Return whether what this rank has sent is answered, so that nothing is late."""
    client = training._client
    return client is None or all(
        each.state is not FragmentState.EXCHANGING for each in client.worker.replicas
    )


def train(task: Task, training: paceline.AsyncDataParallel, steps: int) -> None:
    for _ in range(steps):
        wait_until(lambda: answered(training))
        task.step()


def start(task: Task, training: paceline.AsyncDataParallel) -> None:
    """Train until the first global parameters are applied, the same steps on all ranks."""
    while not training.counts.taken:
        task.step()
        time.sleep(0.002)
