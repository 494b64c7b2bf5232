"""Shares measured while training: they follow the ranks' throughput, and samples and gradients stay exact."""

from __future__ import annotations

import json
import logging
import time
from itertools import pairwise

import pytest
import torch
from test_loader import data, gathered, one_process

import model_zoo
import paceline

SAMPLES = 640
SECONDS_PER_SAMPLE = (0.0005, 0.0015)


def train(loader, sync="bucketed", seconds=0.0, epochs=2):
    """Train, sleeping for every sample; return the worst gradient, the samples and the shares of each epoch."""
    dataset, sizes, served, shares, worst = data(SAMPLES), [], [], [], 0.0
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    for _ in range(epochs):
        steps, parameters = [], [whole(model)]
        for batch in loader:
            x, y, numbers = batch
            time.sleep(seconds * batch.samples)
            model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=batch.samples)
            optim.step()
            optim.zero_grad()
            parameters.append(whole(model))
            steps.append(numbers.tolist() if batch.samples else [])
        assert len(loader) == len(steps), "though it was dealt again on the way"
        seen = [gathered(numbers) for numbers in steps]  # afterwards, so that this wait is not measured
        for union, (before, after) in zip(seen, pairwise(parameters), strict=True):
            for old, new, exact in zip(before, after, one_process(before, dataset, union), strict=True):
                worst = max(worst, ((old - new - exact).abs().max() / exact.abs().max()).item())
        sizes += map(len, steps)
        served.append(sorted(number for union in seen for number in union) == list(range(SAMPLES)))
        shares.append(list(loader.state_dict()["dealt"]["parts"]))
    return worst, served, shares, sizes


def whole(model):
    return [param.clone() for param in model.whole_parameters()]


def one_rank_is_slower(rank, size, sync, every):
    loader = paceline.Loader(data(SAMPLES), 16, shares="measured", redeal_every=every)
    assert loader.state_dict()["speeds"] is None
    return *train(loader, sync, SECONDS_PER_SAMPLE[rank]), loader.state_dict()


@pytest.mark.thorough
@pytest.mark.parametrize("every", [None, 6])
@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_the_faster_rank_gets_more_and_results_stay_exact(pool, sync, every):
    fast, slow = pool(2, "paceline").run(one_rank_is_slower, sync, every)
    for worst, served, _, _, _ in (fast, slow):
        assert worst <= 1e-12
        assert served == [True, True], "every sample once in each epoch"
    assert fast[2] == slow[2], "all ranks deal alike"
    assert fast[4] == slow[4], "and are at the same place"
    (first, second), sizes = fast[2], [count for _, _, _, counts, _ in (fast, slow) for count in counts]
    assert second[0] > second[1], "after the first epoch"
    assert first[0] > first[1] if every else first == [1, 1]
    assert fast[3][-2] > slow[3][-2], "batches are as large as the share"
    assert min(sizes) > 0, "no rank runs out"
    speeds = fast[4]["speeds"]
    assert speeds[0] > speeds[1] > 0


def continue_from(rank, size, state, epochs):
    loader = paceline.Loader(data(SAMPLES), 16, shares="measured")
    loader.load_state_dict(json.loads(json.dumps(state)))
    shares = loader.state_dict()["dealt"]["parts"]
    seen = gathered_all(loader)
    return shares, sorted(seen) == list(range(SAMPLES)), loader.state_dict()["speeds"]


def gathered_all(loader):
    return [number for batch in loader for number in gathered(batch[2].tolist() if batch.samples else [])]


def test_measured_shares_are_resumed_by_the_same_number_of_ranks(pool):
    state = pool(2, "paceline").run(one_rank_is_slower, "bucketed", None)[0][4]
    for shares, complete, speeds in pool(2).run(continue_from, state, 1):
        assert shares == state["dealt"]["parts"]
        assert complete, "an epoch later"
        assert speeds == state["speeds"]
    for shares, complete, speeds in pool(3).run(continue_from, state, 1):
        assert shares == state["dealt"]["parts"], "nothing is left of that epoch"
        assert complete
        assert speeds is None, "of three ranks nobody knows the speed"


def without_waiting(rank, size, sync, every):
    """Serve without a model that measures waits, and return the shares and the log."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("paceline.data")
    log.addHandler(handler)
    try:
        loader = paceline.Loader(data(SAMPLES), 64, shares="measured", redeal_every=every)
        if sync is None:
            for _ in range(2):
                list(loader)
            shares = loader.state_dict()["dealt"]["parts"]
        else:
            shares = train(loader, sync)[2][-1]
    finally:
        log.removeHandler(handler)
    return shares, [each for each in messages if "shares stay as they are" in each]


@pytest.mark.parametrize(("sync", "every"), [(None, None), (None, 1), ("full-shard", 2)])
def test_without_known_waits_shares_stay_and_one_warning_is_logged(pool, sync, every):
    (shares, messages), (others, silent) = pool(2).run(without_waiting, sync, every)
    assert shares == others == [1, 1]
    assert len(messages) == 1
    assert "paceline.DataParallel" in messages[0]
    assert silent == []


def alone(rank, size):
    loader = paceline.Loader(data(SAMPLES), 16, shares="measured", redeal_every=3)
    return train(loader, epochs=1)[:3]


def test_on_one_rank_shares_stay(pool):
    ((worst, served, shares),) = pool(1).run(alone)
    assert worst <= 1e-12
    assert served == [True]
    assert shares == [[1]]
