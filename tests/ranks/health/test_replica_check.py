"""One bit of one parameter flips on one rank: every rank names it, or copies the parameters of another rank."""

from __future__ import annotations

import logging

import pytest
import torch

import model_zoo
import paceline
from paceline.errors import MismatchError, ReplicasDiverged

EVERY = 2


def flip(model, name, bit=20):
    """Flip one bit of a parameter of this rank."""
    param = dict(model.module.named_parameters())[name]
    words = param.data.view(-1).view(torch.int64)
    words[0] ^= 1 << bit


def wrapped(sync="bucketed", optimizer=torch.optim.AdamW, **options):
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim = paceline.ShardedOptimizer(model, optimizer, lr=0.01)
    return model, optim, paceline.ReplicaCheck(model, optim, every=EVERY, **options)


def step(model, optim, rank):
    inputs = torch.randn(
        3, model_zoo.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )
    model.backward(model(inputs).square().mean(), samples=3)
    optim.step()
    optim.zero_grad()


def flips(rank, size, sync, victims):
    """Return the error, its step, and the number of comparisons before."""
    model, optim, check = wrapped(sync)
    for _ in range(4):
        step(model, optim, rank)
    comparisons = check.comparisons
    names = [name for name, _ in model.module.named_parameters()]
    if rank in victims:
        flip(model, names[1])
        flip(model, names[-1])
    raised = None
    for number in range(5, 9):
        try:
            step(model, optim, rank)
        except ReplicasDiverged as error:
            raised = number, str(error), error.rank
            break
    return comparisons, raised, names[1], check.compared, len(names)


@pytest.mark.parametrize("sync", ["naive", "flat", "bucketed"])
def test_a_flipped_bit_is_named_on_all_ranks_one_step_later(pool, sync):
    for comparisons, raised, name, compared, params in pool(3, "paceline").run(flips, sync, [2]):
        assert (comparisons, compared) == (1, params)
        number, text, rank = raised
        assert (number, rank) == (7, 2), "hashed after step 6, compared in step 7"
        assert f"after optimizer step 6, rank 2 holds another parameter {name!r} than the majority" in text
        assert f"; 2 of {params} differ" in text
        assert "resume from the last checkpoint" in text


def test_rank_0_may_differ_and_two_ranks_have_no_majority(pool):
    for _, (_, text, rank), name, *_ in pool(3).run(flips, "bucketed", [0]):
        assert rank == 0
        assert f"rank 0 holds another parameter {name!r} than the majority" in text
    for _, (_, text, _), name, *_ in pool(2).run(flips, "bucketed", [0]):
        assert f"rank 1 holds another parameter {name!r} than rank 0" in text


def checks(rank, size, sync):
    """Between two steps a sharded model's parameters may differ: the next step gathers them anew."""
    model, optim, check = wrapped(sync)
    step(model, optim, rank)
    check.check()
    name = "scale" if sync == "full-shard" else "layers.0.weight"
    if rank == 1:
        flip(model, name)
    with pytest.raises(ReplicasDiverged, match=f"parameter '{name}'"):
        check.check()
    return check.compared, check.comparisons


@pytest.mark.parametrize(("sync", "compared"), [("sharded", None), ("full-shard", 1)])
def test_sharded_strategies_are_checked_on_demand(pool, sync, compared):
    for found, comparisons in pool(2).run(checks, sync):
        assert comparisons == 2
        assert found == (compared or len(list(model_zoo.build("Plain").parameters())))


def repairs(rank, size, optimizer, source):
    """Flip a bit on rank 1 and continue; return the number of repairs, parameters, log messages and the error."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("paceline.health").addHandler(handler)
    model, optim, check = wrapped(optimizer=optimizer, repair=source, buffers=True)
    refused = ""
    for number in range(1, 6):
        step(model, optim, rank)
        if number == 1 and rank == 1:
            flip(model, "layers.0.weight")
    try:
        check.check()
    except ReplicasDiverged as error:
        refused = str(error)
    logging.getLogger("paceline.health").removeHandler(handler)
    return check.repairs, model.whole_parameters(), records, refused


def test_repair_copies_parameters_from_the_given_rank(pool):
    for optimizer, suspect in ((torch.optim.SGD, False), (torch.optim.AdamW, True)):
        (times, first, messages, refused), *others = pool(3).run(repairs, optimizer, 0)
        assert (times, refused) == (1, "")
        for _, params, silent, _ in others:
            assert silent == []
            if not suspect:  # SGD has no state that differs
                assert model_zoo.max_difference(params, first) == 0
        assert len(messages) == 1
        assert messages[0].startswith(
            "after optimizer step 2, rank 1 holds another parameter 'layers.0.weight'"
        )
        assert "all ranks now have rank 0's parameters" in messages[0]
        assert ("its optimizer state may be wrong too" in messages[0]) == suspect


def repairs_from_the_one_that_differs(rank, size):
    model, optim, check = wrapped(repair=1)
    step(model, optim, rank)
    if rank == 1:
        flip(model, "layers.0.weight")
    with pytest.raises(ReplicasDiverged, match="than the majority, and rank 1 was to repair it"):
        check.check()


def test_repair_never_copies_from_a_rank_that_differs_from_the_majority(pool):
    pool(3).run(repairs_from_the_one_that_differs)


def other_settings(rank, size):
    net = torch.nn.Linear(2, 1)
    model = paceline.DataParallel(net)
    with pytest.raises(MismatchError, match="every=1"):
        paceline.ReplicaCheck(model, torch.optim.SGD(net.parameters(), lr=0.1), every=1 + rank)


def test_ranks_with_different_settings_are_refused(pool):
    pool(2).run(other_settings)
