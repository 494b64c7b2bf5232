"""What ranks serve with virtual ranks: contents, numbers of samples, random numbers, positions."""

from __future__ import annotations

import json
import random

import numpy as np
import torch
from torch.utils.data import Dataset

from paceline._core.step_state import wait_counters


def drawn():
    """Return random numbers of all global generators."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002


class Augmented(Dataset):
    """Each sample with random numbers, of which the odd ones draw more."""

    def __init__(self, size=30):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        return number, [drawn() for _ in range(1 + number % 2)][-1]


def collate(samples):
    return {"samples": samples, "collated": drawn()}


def plain(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else dict(batch)


def serve(loader, steps=None):
    """Return, by (epoch, step, leaf), what a rank's loop sees: contents, samples, random numbers, the common seed."""
    found, step = {}, 0
    for batch in loader:
        virtual, leaf, common = wait_counters.leaf
        found[loader.epoch, step, leaf] = plain(batch), batch.samples, common, drawn()
        assert virtual == loader.virtual_ranks
        assert batch.ends_step == (leaf == loader._place.own[-1])
        step += batch.ends_step
        if step == steps:
            break
    return found


def on_ranks(as_rank, ranks, make, steps=None, state=None):
    """Return what all ranks serve together, and their positions afterwards."""
    found, states = {}, []
    for rank in range(ranks):
        as_rank(rank, ranks)
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        mine = serve(loader, steps)
        assert not found.keys() & mine.keys()
        found |= mine
        states.append(loader.state_dict())
    assert all(each == states[0] for each in states)
    return found, json.loads(json.dumps(states[0]))
