"""States of single blocks of a parameter, such as the experts of a layer: one number per block, too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from same_states import difference


class PerMatrix(torch.optim.Optimizer):
    """Divides by a norm that it keeps for each matrix, as a tensor, a number and a list, and counts steps."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state, norm = self.state[param], param.grad.norm()
                    state["step"] = state.get("step", torch.zeros(())) + 1
                    state["norm"] = norm + state.get("norm", 0)
                    state["number"] = state["norm"].item()
                    state["list"] = [state["norm"][None].clone(), state["number"]]
                    param.sub_(param.grad, alpha=group["lr"] / (1 + state["number"]))


OPTIMIZERS = {"PerMatrix": PerMatrix, "Adafactor": torch.optim.Adafactor}
ROWS = {"rows": {"0.weight": [1, 1, 2, 1]}, "equal": {"0.weight": 5}, "whole": None}


def built(kind, split, sync, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    model = paceline.DataParallel(net, sync=sync)
    return model, paceline.ShardedOptimizer(model, OPTIMIZERS[kind], split=ROWS[split], lr=0.05)


def step(model, optimizer, rank, update=True):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    model.backward(model(x).square().mean())
    if update:
        optimizer.step()
    optimizer.zero_grad()


def save_or_load(rank, size, kind, split, sync, folder, save):
    """Return the whole state that was saved or loaded, and on loading whether another step works."""
    paceline.init()
    model, optimizer = built(kind, split, sync, seed=save)
    with paceline.Checkpoint(folder, model, optimizer) as checkpoint:
        if save:
            step(model, optimizer, rank)
            step(model, optimizer, rank)
            checkpoint.save(wait=True)
        else:
            assert checkpoint.load() is not None
            step(model, optimizer, rank, update=False)  # settles the layout
    optimizer.consolidate_state_dict()
    state = copy.deepcopy(optimizer.state_dict()) if rank == 0 else {}
    step(model, optimizer, rank)
    return state


PLACES = [("sharded", 3), ("bucketed", 1), ("full-shard", 2), ("sharded", 2)]


@pytest.mark.sweep
@pytest.mark.parametrize("split", ["rows", "equal"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", PLACES, ids=lambda place: place[0])
def test_each_block_has_its_own_state_elsewhere(pool, tmp_path, kind, split, first):
    sync, ranks = first
    expected = pool(ranks).run(save_or_load, kind, split, sync, tmp_path, True)[0]
    blocks = [state for number, state in sorted(expected["state"].items())][: 4 if split == "rows" else 5]
    values = [state["norm" if kind == "PerMatrix" else "row_var"] for state in blocks]
    assert any(not torch.equal(values[0], other) for other in values[1:])  # the test can tell them apart
    for sync, ranks in PLACES:
        found = pool(ranks).run(save_or_load, kind, split, sync, tmp_path, False)[0]
        assert difference(found, expected) == "", (sync, ranks)


def refused(rank, size, folder, sync):
    paceline.init()
    model, optimizer = built("PerMatrix", "whole", sync, seed=1)
    with paceline.Checkpoint(folder, model, optimizer) as checkpoint:
        try:
            checkpoint.load()
            step(model, optimizer, rank)
        except UsageError as error:
            return str(error)
    return "loaded"


@pytest.mark.parametrize("sync", ["sharded", "bucketed"])
def test_states_of_blocks_are_refused_for_a_whole_parameter(pool, tmp_path, sync):
    pool(2).run(save_or_load, "PerMatrix", "rows", "sharded", tmp_path, True)
    for text in pool(2).run(refused, tmp_path, sync):
        assert "'0.weight' belongs to its elements" in text
        assert "split parameters as in the run" in text
