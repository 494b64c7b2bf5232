"""`Checkpoint` with loaders of other libraries: every rank continues with its own next batch, or is refused by name."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter

import pytest
import torch
from torch import nn

import paceline
from foreign_loaders import BATCHES, make_loader
from mosaic_streaming import installed, streaming_ranks
from paceline.errors import UsageError

LIBRARY = {"IterableDataset": "datasets", "Countdown": "torch", "IterableDataset in a DataLoader": "datasets"}
STOPS = {  # every, stop
    "in an epoch": (2, 3),
    "after its last batch": (4, 5),
    "between epochs": (3, 5),
    "in a later epoch": (6, 7),
}


def need(kind):
    for library in {LIBRARY.get(kind, "torchdata"), *(["datasets"] if "IterableDataset" in kind else [])}:
        pytest.importorskip(library)


def numbers_of(batch):
    values = batch["x"] if isinstance(batch, dict) else batch
    return [int(value) for value in values]


class Run:
    """A program that trains on batches of any loader; dropout draws random numbers."""

    def __init__(self, folder, loader, every, **more):
        torch.manual_seed(0)
        self.model = paceline.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.loader = loader
        self.checkpoint = paceline.Checkpoint(folder, self.model, self.optim, every=every, **more)

    def train(self, stop=None, epochs=3):
        """Train; return for every step the epoch, the samples and a random number."""
        served = []
        for batch in self.checkpoint.resume(self.loader, epochs=epochs):
            numbers = numbers_of(batch)
            row = torch.tensor(numbers[:4], dtype=torch.float32)
            self.model(nn.functional.pad(row, (0, 4 - len(row))) / 400).square().mean().backward()
            self.optim.step()
            self.optim.zero_grad()
            served.append((self.checkpoint.epoch, numbers, float(torch.rand(()))))
            if self.checkpoint.step == stop:
                break
        self.checkpoint.wait()
        self.checkpoint.close()
        return served


def train(rank, size, folder, kind, every, stop, options):
    paceline.init()
    loader = make_loader(kind, rank, size, **options)
    stateless = not hasattr(loader, "state_dict")
    run = Run(folder, loader, every, **({"data": loader.dataset} if stateless else {}))
    torch.manual_seed(10 + rank)
    served = run.train(stop)
    resumed = run.checkpoint.resumed
    return served, resumed.step if resumed else 0, [param.tolist() for param in run.model.parameters()]


CASES = [
    ("StatefulDataLoader", {}),
    ("StatefulDataLoader", {"num_workers": 2}),
    ("StatefulDistributedSampler", {}),
    ("IterableDataset", {}),
    ("IterableDataset in a StatefulDataLoader", {}),
    ("IterableDataset in a StatefulDataLoader", {"num_workers": 2, "persistent_workers": True}),
    ("IterableDataset in a DataLoader", {}),
    ("torchdata.nodes", {}),
    ("Countdown", {}),
]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_every_rank_continues_with_its_own_next_batch(pool, tmp_path, kind, options, stop):
    need(kind)
    every, last = STOPS[stop]
    whole = pool(2).run(train, tmp_path / "whole", kind, every, None, options)
    served, steps = [[], []], []
    for until in (last, last + 4, None):
        parts = pool(2).run(train, tmp_path / "parts", kind, every, until, options)
        steps.append(parts[0][1])
        served = [served[rank][: steps[-1]] + parts[rank][0] for rank in range(2)]
    assert 0 == steps[0] < steps[1] < steps[2]
    for rank in range(2):
        assert served[rank] == whole[rank][0]
        assert parts[rank][2] == whole[rank][2]
        assert len(served[rank]) == 3 * BATCHES
