"""Every strategy gives, on any number of ranks, the parameters of one process on the whole batch."""

from __future__ import annotations

import itertools

import pytest
import torch

import model_zoo
import paceline

STEPS = 3
TOLERANCE = 1e-11
STRATEGIES = ["naive", "flat", "overlap", "bucketed", "sharded", "full-shard"]
SHARES = {1: [10], 2: [4, 16], 3: [10, 4, 6], 4: [10, 10, 4, 16]}
EMPTY = {2: [0, 16], 3: [10, 0, 6], 4: [10, 10, 0, 16]}


OPTIONS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.05}),
}


ALL_WAYS = list(itertools.product(OPTIONS, [1, 3]))
FEW_WAYS = {3: [("sgd", 3), ("adamw", 1)], 4: [("adamw", 3), ("sgd", 1)]}
"""Optimizer and accumulation for unequal ranks, and with an empty one: more ranks than cores take long."""


def batches(shares, accumulate):
    """Return, for every step and micro-step, the inputs and targets of each rank."""
    generator = torch.Generator().manual_seed(17)
    return [
        [
            [
                (
                    torch.randn(n, model_zoo.WIDTH, generator=generator, dtype=torch.float64) + 0.5 * rank,
                    torch.randn(n, 1, generator=generator, dtype=torch.float64),
                )
                for rank, n in enumerate(shares)
            ]
            for _ in range(accumulate)
        ]
        for _ in range(STEPS)
    ]


def one_process(name, kind, data, clip):
    """Train on whole batches without Paceline; return the parameters."""
    model = model_zoo.build(name)
    cls, options = OPTIONS[kind]
    optim = cls([param for param in model.parameters() if param.requires_grad], **options)
    for step in data:
        x = torch.cat([x for micro in step for x, _ in micro])
        y = torch.cat([y for micro in step for _, y in micro])
        model_zoo.loss_of(model, name, x, y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        optim.zero_grad()
    return [param.detach() for param in model.parameters()]


def many_ranks(rank, name, sync, kind, data, clip):
    """Train on this rank's part of each batch; return the parameters, whole."""
    model = paceline.DataParallel(model_zoo.build(name), sync=sync)
    cls, options = OPTIONS[kind]
    optim = paceline.ShardedOptimizer(model, cls, **options)
    for step in data:
        for index, micro in enumerate(step):
            x, y = micro[rank]
            if index < len(step) - 1:
                with model.accumulate():
                    run_backward(model, name, x, y)
            else:
                run_backward(model, name, x, y)
        if clip:
            model.clip_grad_norm_(clip)
        optim.step()
        optim.zero_grad()
    return model.whole_parameters()


def run_backward(model, name, x, y):
    if len(x):
        model.backward(model_zoo.loss_of(model, name, x, y), samples=len(x))
    else:
        model.backward(None, samples=0)


def differences(rank, size, cases):
    """Return, per case, the largest difference of any parameter from one process."""
    found = {}
    for name, sync, kind, accumulate, shares, clip in cases:
        data = batches(shares, accumulate)
        expected = one_process(name, kind, data, clip)
        actual = many_ranks(rank, name, sync, kind, data, clip)
        found[name, str(sync), kind, accumulate, tuple(shares), clip] = model_zoo.max_difference(
            actual, expected
        )
    return found


def check(pool, ranks, cases, backend="paceline", timeout=240):
    for found in pool(ranks, backend).run(differences, cases, timeout=timeout):
        wrong = {case: gap for case, gap in found.items() if not gap <= TOLERANCE}
        assert not wrong
        assert len(found) == len(cases)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("gloo", 1), ("paceline", 2), ("gloo", 3), ("paceline", 4)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("sync", STRATEGIES)
def test_equal_to_one_process(pool, backend, ranks, sync):
    amounts = [SHARES[ranks], *([EMPTY[ranks]] if ranks > 1 else [])]
    ways = itertools.product(ALL_WAYS, amounts) if ranks < 3 else zip(FEW_WAYS[ranks], amounts, strict=True)
    cases = [
        (name, sync, kind, accumulate, shares, None)
        for ((kind, accumulate), shares), name in itertools.product(ways, model_zoo.MODELS)
    ]
    check(pool, ranks, cases, backend)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("sync", [paceline.Sync(2**-11), paceline.Sync(2**-11, shard="optimizer")], ids=str)
def test_many_buckets_of_several_parameters(pool, ranks, sync):
    models = ("Plain", "Branches", "Tied", "CheckpointedReentrant", "Strided")
    cases = [
        (name, sync, "adamw", 3, shares, None) for name in models for shares in (SHARES[ranks], EMPTY[ranks])
    ]
    check(pool, ranks, cases)


@pytest.mark.sweep
@pytest.mark.parametrize("sync", STRATEGIES)
def test_clipping_with_accumulation_and_an_empty_rank(pool, sync):
    cases = [(name, sync, "adamw", 3, EMPTY[3], 0.05) for name in ("Plain", "Branches", "Strided")]
    check(pool, 3, cases)


def large_units(rank, size):
    """A unit whose collectives go point to point, and small ones that do not."""

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(model_zoo.WIDTH, 600), Wide(), torch.nn.Linear(600, 1)
        ).double()

    model = paceline.DataParallel(build(), sync="full-shard")
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    reference = build()
    other = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in batches([3, 5], 1):
        x, y = step[0][rank]
        model.backward(model_zoo.loss_of(model, "", x, y), samples=len(x))
        optim.step(), optim.zero_grad()
        x, y = (torch.cat(part) for part in zip(*step[0], strict=True))
        model_zoo.loss_of(reference, "", x, y).backward()
        other.step(), other.zero_grad()
    return model_zoo.max_difference(model.whole_parameters(), reference.parameters()), len(model.engine.units)


class Wide(torch.nn.Module):
    """Two units of 2.9 MB each."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(600, 600) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def test_full_shard_gathers_unit_by_unit(pool):
    for gap, units in pool(2).run(large_units):
        assert gap <= TOLERANCE
        assert units == 2
