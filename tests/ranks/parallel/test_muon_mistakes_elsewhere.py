"""Mistakes with Muon that DeepSpeed's users reported, as tests; its issue numbers are in the docstrings."""

from __future__ import annotations

import math

import pytest
import torch

import paceline
from engine_cases import same_on_all_ranks
from matrix_cases import ADAMW, batches, one_process, optimizers, step_on_ranks, wrapped
from matrix_models import build_matrices
from matrix_optimizers import PER_PARAMETER
from model_zoo import loss_of, max_difference

TOLERANCE = 1e-11
EVERY_STRATEGY = ["naive", "flat", "bucketed", "sharded", "full-shard"]


def by_muon_and_not_by(rank, size, sync, other, ranks_of_data):
    """Return the gap to Muon in one process, and to `other` on the same matrices."""
    data = batches(range(2), ranks_of_data)
    model, optims = wrapped("Unequal", sync)
    for micro_steps in data:
        step_on_ranks(model, optims, micro_steps, rank)
    net = build_matrices("Unequal")
    matrices, rest = paceline.matrix_parameters(net)
    changed = [
        other([param for _, param in matrices], lr=PER_PARAMETER["Muon"][1]["lr"]),
        torch.optim.AdamW([param for _, param in rest], **ADAMW),
    ]
    for micro_steps in data:
        x, y = (torch.cat([pair[at] for micro in micro_steps for pair in micro]) for at in range(2))
        loss_of(net, "", x, y).backward()
        for optim in changed:
            optim.step()
        net.zero_grad()
    whole = model.whole_parameters()
    return max_difference(whole, one_process("Unequal", "Muon", data)), max_difference(
        whole, net.parameters()
    )


@pytest.mark.parametrize(("sync", "ranks"), [(sync, 2) for sync in EVERY_STRATEGY] + [("sharded", 1)])
def test_muon_is_muon_without_sharding_too(pool, sync, ranks):
    """deepspeedai/DeepSpeed#8441: at stage 0, parameters meant for Muon are trained with SGD."""
    for gap, from_sgd in pool(ranks).run(by_muon_and_not_by, sync, torch.optim.SGD, [6, 4][:ranks]):
        assert gap <= TOLERANCE
        assert from_sgd > 1e-3


def chosen_after_sharding(rank, size):
    """Return the names of matrices in a bare model, and in one whose parameters are sharded already."""
    bare = [name for name, _ in paceline.matrix_parameters(build_matrices("Unequal"))[0]]
    model = paceline.DataParallel(build_matrices("Unequal"), sync="full-shard")
    found = [name.removeprefix("module.") for name, _ in paceline.matrix_parameters(model)[0]]
    return bare, found


def test_muon_is_muon_where_parameters_are_sharded(pool):
    """deepspeedai/DeepSpeed#8438: under zero.Init, no parameter looks like a matrix, and AdamW trains all of them."""
    for bare, found in pool(3).run(chosen_after_sharding):
        assert bare == found
        assert len(found) == 5
    for gap, from_adamw in pool(3).run(by_muon_and_not_by, "full-shard", torch.optim.AdamW, [6, 4, 2]):
        assert gap <= TOLERANCE
        assert from_adamw > 1e-3


def one_overflow(rank, size, sync, clips):
    """Take steps with a GradScaler; in one of them the loss of the last rank overflows.

    Returns:
        Whether that step changed nothing, whether ranks agree at the end, whether the momentum is finite, and the gap
        to a training without that step.
    """
    model, optims = wrapped("Unequal", sync)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    data, skipped = batches(range(4), [5] * size), 2
    for number, micro_steps in enumerate(data):
        before = [param.detach().clone() for param in model.whole_parameters()]
        loss = loss_of(model, "", *micro_steps[0][rank])
        scaler.scale(loss * math.inf if number == skipped and rank == size - 1 else loss).backward()
        for optim in optims:
            if clips:
                scaler.unscale_(optim)
        if clips:
            model.clip_grad_norm_(0.05)
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        for optim in optims:
            optim.zero_grad()
        if number == skipped:
            unchanged = max_difference(model.whole_parameters(), before) == 0.0
    optims[0].consolidate_state_dict()
    held = torch.utils._pytree.tree_leaves(optims[0].state_dict()) if rank == 0 else []
    finite = all(value.isfinite().all().item() for value in held if isinstance(value, torch.Tensor))
    expected = one_process("Unequal", "Muon", data[:skipped] + data[skipped + 1 :], clips)
    whole = model.whole_parameters()
    return unchanged, same_on_all_ranks(whole), finite, max_difference(whole, expected)


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("sync", ["bucketed", "sharded", "full-shard"])
def test_an_overflow_leaves_the_momentum_finite(pool, sync, clips):
    """deepspeedai/DeepSpeed#8432: the momentum is NaN for good after one step that overflows in fp16."""
    for unchanged, equal, finite, gap in pool(3).run(one_overflow, sync, clips):
        assert unchanged
        assert equal
        assert finite
        assert gap <= TOLERANCE


def micro_batches(rank, size, sync, how):
    """Return the gap between steps of four micro-batches and steps of the same samples at once."""
    whole = batches(range(3), [8] * size)
    made = [wrapped("Unequal", sync) for _ in range(2)]
    for micro_steps in whole:
        x, y = micro_steps[0][rank]
        parts = list(zip(x.chunk(4), y.chunk(4), strict=True))
        model, optims = made[0]
        if how == "accumulate":
            step_on_ranks(model, optims, [{rank: part} for part in parts], rank)
        else:
            for part in parts:
                model.backward(loss_of(model, "", *part) / 4)
            for optim in optims:
                optim.step()
            for optim in optims:
                optim.zero_grad()
        step_on_ranks(*made[1], micro_steps, rank)
    return max_difference(made[0][0].whole_parameters(), made[1][0].whole_parameters())


@pytest.mark.parametrize(
    ("sync", "how"),
    [
        ("sharded", "accumulate"),
        ("full-shard", "accumulate"),
        ("bucketed", "backward"),
        ("full-shard", "backward"),
    ],
)
def test_micro_batches_are_orthogonalised_once(pool, sync, how):
    """deepspeedai/DeepSpeed#8600: at stage 3, the gradient of each micro-batch is orthogonalised, not their sum."""
    assert max(pool(2).run(micro_batches, sync, how)) <= TOLERANCE


def optimizers_in_either_order(rank, size, first):
    """Step the optimizer of the matrices before the other one, or after it."""
    data = batches(range(3), [5, 3])
    model = paceline.DataParallel(build_matrices("Fused"), sync="sharded")
    optims = optimizers(model, "Muon", {"*qkv.weight": 3})
    for micro_steps in data:
        step_on_ranks(model, optims if first == "matrices" else optims[::-1], micro_steps, rank)
    return max_difference(model.whole_parameters(), one_process("Fused", "Muon", data))


@pytest.mark.parametrize("first", ["matrices", "rest"])
def test_the_order_of_steps_does_not_matter(pool, first):
    assert max(pool(2).run(optimizers_in_either_order, first)) <= TOLERANCE
