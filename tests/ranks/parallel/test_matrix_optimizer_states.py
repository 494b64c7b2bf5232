"""The state of whole-matrix optimizers, resumed on other numbers of ranks and with other strategies."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import paceline
from matrix_cases import batches, one_process, optimizers, step_on_ranks, wrapped
from matrix_models import SPLITS, build_matrices
from matrix_optimizers import PER_PARAMETER
from model_zoo import loss_of, max_difference

TOLERANCE = 1e-11
SHARES = {1: [12], 2: [5, 7], 3: [4, 2, 6], 4: [3, 2, 3, 4]}
"""Samples of each rank: 12 in all, so that a step of any number of ranks is the same step of one process."""


def data(steps, ranks):
    """Return batches with the same samples on any number of ranks."""
    found = []
    for (((x, y),),) in batches(steps, [12]):
        parts = zip(x.split(SHARES[ranks]), y.split(SHARES[ranks]), strict=True)
        found.append([list(parts)])
    return found


def train(model, optims, rank, steps):
    for micro_steps in data(steps, model.comm.size):
        step_on_ranks(model, optims, micro_steps, rank)


def with_weights(name, values):
    """Return the bare model with other weights."""
    net = build_matrices(name)
    with torch.no_grad():
        for param, value in zip(net.parameters(), values, strict=True):
            param.copy_(value)
    return net


def from_rank_0(value):
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def merged(states):
    """Return the shards of all ranks in one state."""
    shards = {}
    for state in states:
        for name, parts in state["shards"].items():
            shards.setdefault(name, []).extend(parts)
    return {"param_groups": states[0]["param_groups"], "shards": shards}


# ------------------------------------------------------------------ state_dict and load_state_dict


def moved(rank, size, name, kind, first, second, before, after, how):
    """Train 3 steps on `before` ranks with strategy `first`, 3 more on `after` with `second`, and in one process."""
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in sorted({before, after})}
    states = weights = None
    if rank < before:
        model, optims = wrapped(name, first, kind, groups[before])
        train(model, optims, rank, range(3))
        if how == "consolidated":
            for optim in optims:
                optim.consolidate_state_dict()
        states = copy.deepcopy([optim.state_dict() for optim in optims])
        weights = [param.detach().clone() for param in model.whole_parameters()]
    if how == "consolidated":
        states, weights = from_rank_0((states, weights))
    else:
        box = [None] * size
        dist.all_gather_object(box, (states, weights))
        weights = box[0][1]
        states = [merged([each[at] for each, _ in box[:before]]) for at in range(2)]
    if rank >= after:
        return 0.0
    model = paceline.DataParallel(with_weights(name, weights), sync=second, group=groups[after])
    optims = optimizers(model, kind, SPLITS.get(name))
    for optim, state in zip(optims, states, strict=True):
        optim.load_state_dict(state)
    train(model, optims, rank, range(3, 6))
    return max_difference(model.whole_parameters(), one_process(name, kind, data(range(6), 1)))


MOVES = [
    ("Fused", "Muon", "sharded", "sharded", 2, 3, "consolidated"),
    ("Fused", "Muon", "sharded", "sharded", 3, 2, "shards"),
    ("Experts", "Muon", "sharded", "bucketed", 2, 2, "consolidated"),
    ("Unequal", "Soap", "bucketed", "sharded", 2, 3, "consolidated"),
    ("Fused", "Soap", "full-shard", "sharded", 2, 3, "consolidated"),
    ("Experts", "Muon", "sharded", "full-shard", 3, 2, "consolidated"),
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: " ".join(map(str, move)))
def test_a_state_moves(pool, move):
    assert max(pool(3).run(moved, *move)) <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        (4, 1, "consolidated"),
        (1, 3, "consolidated"),
        (2, 3, "shards"),
        (3, 2, "consolidated"),
        (4, 1, "shards"),
    ],
)
def test_a_sharded_state_moves_to_any_number_of_ranks(pool, before, after, how):
    for name, kind in [
        ("Fused", "Muon"),
        ("Experts", "Adafactor"),
        ("Unequal", "FactoredRms"),
        ("Single", "Soap"),
    ]:
        move = (name, kind, "sharded", "sharded", before, after, how)
        assert max(pool(max(before, after)).run(moved, *move)) <= TOLERANCE, move


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["sharded", "bucketed", "full-shard"])
@pytest.mark.parametrize("second", ["sharded", "bucketed", "full-shard"])
def test_a_state_moves_between_all_strategies(pool, first, second):
    for name, kind in [("Fused", "Muon"), ("Experts", "Soap")]:
        move = (name, kind, first, second, 3, 2, "consolidated")
        assert max(pool(3, "paceline").run(moved, *move)) <= TOLERANCE, move


def to_torch(rank, size, sync):
    """Give the consolidated state to the plain optimizers of one process, train there, and take it back."""
    model, optims = wrapped("Unequal", sync, "Muon")
    train(model, optims, rank, range(3))
    for optim in optims:
        optim.consolidate_state_dict()
    states, weights = from_rank_0(
        (copy.deepcopy([optim.state_dict() for optim in optims]), model.whole_parameters())
    )
    net = with_weights("Unequal", weights)
    matrices, rest = paceline.matrix_parameters(net)
    cls, options = PER_PARAMETER["Muon"]
    plain = [cls(matrices, **options), torch.optim.AdamW(rest, lr=0.5)]
    for optim, state in zip(plain, states, strict=True):
        optim.load_state_dict(copy.deepcopy(state))
    assert all(plain[0].state[param]["momentum_buffer"].shape == param.shape for _, param in matrices)
    for (((x, y),),) in data(range(3, 6), 1):
        loss_of(net, "", x, y).backward()
        for optim in plain:
            optim.step()
        net.zero_grad()
    gap = max_difference(net.parameters(), one_process("Unequal", "Muon", data(range(6), 1)))

    again = paceline.DataParallel(net, sync=sync)
    last = optimizers(again, "Muon")
    for optim, one in zip(last, plain, strict=True):
        optim.load_state_dict(one.state_dict())
    train(again, last, rank, range(6, 8))
    expected = one_process("Unequal", "Muon", data(range(8), 1))
    return max(gap, max_difference(again.whole_parameters(), expected))


@pytest.mark.parametrize("sync", ["sharded", "full-shard"])
def test_the_state_goes_to_torchs_muon_and_back(pool, sync):
    assert max(pool(2).run(to_torch, sync)) <= TOLERANCE


def held_numel(rank, size, name):
    """Return the numbers of Muon's momentum on this rank, and those of all hidden matrices."""
    model, optims = wrapped(name, "sharded", "Muon")
    train(model, optims, rank, range(1))
    shards = optims[0].state_dict()["shards"]
    held = sum(
        value.numel()
        for parts in shards.values()
        for part in parts
        for value in torch.utils._pytree.tree_leaves(part["state"])
        if isinstance(value, torch.Tensor)
    )
    return held, sum(param.numel() for _, param in paceline.matrix_parameters(model)[0])


def test_each_matrix_has_its_state_on_one_rank(pool):
    held, total = zip(*pool(3).run(held_numel, "Unequal"), strict=True)
    assert sum(held) == total[0]
    assert max(held) < total[0]


# ------------------------------------------------------------------ checkpoints


def save_after_three(rank, size, name, kind, sync, folder):
    paceline.init()
    model, (matrices, rest) = wrapped(name, sync, kind)
    train(model, (matrices, rest), rank, range(3))
    with paceline.Checkpoint(folder, model, matrices=matrices, rest=rest) as checkpoint:
        checkpoint.save(wait=True)


def resume_after_three(rank, size, name, kind, sync, folder):
    paceline.init()
    model, (matrices, rest) = wrapped(name, sync, kind)
    with paceline.Checkpoint(folder, model, matrices=matrices, rest=rest) as checkpoint:
        assert checkpoint.load() is not None
    train(model, (matrices, rest), rank, range(3, 6))
    return max_difference(model.whole_parameters(), one_process(name, kind, data(range(6), 1)))


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "kind"), [("Fused", "Muon"), ("Experts", "Soap"), ("Unequal", "Adafactor")])
@pytest.mark.parametrize("first", ["sharded", "bucketed", "full-shard"])
def test_a_checkpoint_resumes_on_other_ranks_and_with_other_strategies(pool, tmp_path, first, name, kind):
    pool(2).run(save_after_three, name, kind, first, tmp_path)
    for ranks, sync in [(3, "sharded"), (2, "bucketed"), (1, "sharded"), (2, "full-shard")]:
        assert max(pool(ranks).run(resume_after_three, name, kind, sync, tmp_path)) <= TOLERANCE, (
            ranks,
            sync,
        )
