"""DiLoCo computes the same parameters as torchft's DiLoCo: its regression fixtures hold, delay and mix included.

Numbers: pytorch/torchft at 73dafea, ``test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.*.json``
(BSD-3-Clause). There, two replicas train two layers of one weight each that starts at 1, by SGD with rate 1 and the
gradient 2; the outer optimizer is SGD with rate 2; `sync_every` is 6.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline

# By `fragment_sync_delay` and `fragment_update_alpha`: the local weights of both layers before the first step and after
# each of 15 steps, and their global weights after every third step.
FIXTURES = {
    (0, 0.0): (
        (
            [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
            [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        ),
        (
            [1, -11, -11, -35, -35],
            [1, 1, -23, -23, -47],
        ),
    ),
    (0, 0.5): (
        (
            [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
            [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        ),
        (
            [1, -11, -11, -29, -29],
            [1, 1, -23, -23, -35],
        ),
    ),
    (0, 1.0): (
        (
            [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
            [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
        ),
        (
            [1, -11, -11, -23, -23],
            [1, 1, -23, -23, -23],
        ),
    ),
    (1, 0.0): (
        (
            [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
            [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
        ),
        (
            [1, -7, -7, -27, -27],
            [1, 1, -19, -19, -39],
        ),
    ),
    (1, 0.5): (
        (
            [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
            [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        ),
        (
            [1, -7, -7, -25, -25],
            [1, 1, -19, -19, -31],
        ),
    ),
    (1, 1.0): (
        (
            [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
            [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
        ),
        (
            [1, -7, -7, -23, -23],
            [1, 1, -19, -19, -23],
        ),
    ),
}
# Of `test_diloco_mocked_failure_recovery_0`: the replica that does not fail trains longer, without delay and mix.
LONGER = (
    [-35, -37, -39, -41, -43, -45, -59, -61, -63, -65, -67, -69, -83],
    [-29, -31, -33, -47, -49, -51, -53, -55, -57, -71, -73, -75, -77],
)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for param in self.parameters():
            nn.init.ones_(param)


def histories(rank, size, steps, options):
    """Return local and global weights of both layers, before the first step and after each one."""
    model = TwoLayers()
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"fragments": 2, "outer_lr": 2.0, "outer_momentum": 0.0, "compression": None} | options
    own, shared = [], []
    with paceline.DiLoCo(model, optim, every=6, **options) as loop:
        for step in range(steps + 1):
            own.append([float(param) for param in model.parameters()])
            shared.append([float(param) for param in loop.shared().values()])
            if step < steps:
                for param in model.parameters():
                    param.grad = torch.full_like(param, 2.0)
                optim.step()
    return [list(each) for each in zip(*own, strict=True)], [list(each) for each in zip(*shared, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("delay", "mix"), list(FIXTURES))
def test_local_and_global_weights_are_those_of_the_fixtures(pool, ranks, delay, mix):
    local, shared = FIXTURES[delay, mix]
    for own, theta in pool(ranks).run(histories, 15, {"delay": delay, "mix": mix}):
        assert own == list(local)
        assert [each[:13:3] for each in theta] == list(shared)


def test_weights_of_a_longer_run_are_those_of_the_fixture(pool):
    for own, _ in pool(2).run(histories, 21, {}):
        assert [each[9:] for each in own] == list(LONGER)


def test_all_ranks_take_the_global_weights_when_the_block_ends(pool):
    """torchft leaves each rank its own ones; with mix=1 that would be separate training to the end."""
    for weights in pool(2).run(end_of_block, 1.0):
        # Local weights are -29, global ones -31 after the merge of this step, and -23: θ ← θ - 2·(θ - w).
        assert weights == [-27.0, -35.0]


def end_of_block(rank, size, mix):
    model = TwoLayers()
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"fragments": 2, "outer_lr": 2.0, "outer_momentum": 0.0, "compression": None}
    with paceline.DiLoCo(model, optim, every=6, mix=mix, delay=1, **options):
        for _ in range(15):
            for param in model.parameters():
                param.grad = torch.full_like(param, 2.0)
            optim.step()
    return [float(param) for param in model.parameters()]
