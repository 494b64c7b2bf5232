"""A worker of asynchronous training that is a `DataParallel` of several ranks: equal replicas, the same errors."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from async_group_ranks import DELAY, EVERY, INPUTS, STEPS, TARGETS, Task, network, start, train

import paceline
from hub_process import hub_thread
from paceline.async_dp.hub.hub_settings import HubRules, HubShard
from paceline.async_dp.worker import rank_group

pytestmark = pytest.mark.timeout(180)

# ---------------------------------------------------------------- the same as one process


def train_and_count(rank: int, size: int, hub: str) -> tuple[int, int, torch.Tensor, float]:
    task = Task()
    with task.training(hub) as training:
        start(task, training)
        before = training.counts.sent
        train(task, training, STEPS)
        sent = training.counts.sent - before
        assert training.finish()
    assert training.counts.samples == 16 * training.counts.steps
    return training.counts.steps, sent, task.held(), training.samples


def test_two_ranks_with_half_batches_are_as_one_process_with_whole_ones(pool, job_key) -> None:
    of_size = {}
    for size in (1, 2):
        with hub_thread(HubRules(down="fp32")) as hub:
            of_size[size] = pool(size).run(train_and_count, hub.address, env=[job_key.environment()] * size)
            members = list(hub.hub.members)
            assert len(members) == 1, "one worker, whatever its ranks"
            assert torch.equal(hub.hub.params.fragments[0].theta, of_size[size][0][2])
            updates = [each for each in hub.journal.ledger() if each["kind"] == "update"]
            assert sum(each["samples"] for each in updates) == of_size[size][0][0] * 16
    (alone,), (first, second) = of_size[1], of_size[2]
    assert torch.equal(first[2], second[2])
    assert first[1] == second[1] == alone[1] == STEPS // EVERY
    for steps, _, held, _ in (alone, first):
        task = Task()
        for _ in range(steps):
            task.step()
        torch.testing.assert_close(held, task.held(), rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- equal replicas


def train_beside_another(
    rank: int, size: int, hubs: list[str], sync: str, norm: bool, options: dict
) -> list[tuple]:
    task, history = Task(sync, norm), []
    if "score" in options:  # each rank scores another part of the data
        options = {**options, "score": lambda: score_of(task, slice(128 * rank, 128 * (rank + 1)))}
    with task.training(hubs, **options) as training:
        while training.counts.taken < 5 or training.counts.steps < STEPS:
            task.step()
            time.sleep(0.002)
            if sync != "full-shard" or training.counts.taken != len(history):
                buffers = [each.clone() for each in task.model.buffers() if training._steps == 0]
                history.append((task.held(), training.counts.taken, training.lr_scale, len(buffers)))
        assert training.finish(30.0)
    averaged = [each for each in task.model.buffers() if each.is_floating_point()]
    return [*history, (torch.cat([task.held(), *averaged]), training.counts, training.samples)]


def score_of(task: Task, rows: slice) -> float:
    return float(((task.model.module(INPUTS[rows]) - TARGETS[rows]) ** 2).mean())


def beside(hubs: list[str], stop: threading.Event, norm: bool = False, **options: Any) -> None:
    """Train as another worker, on other batches."""
    net = network(norm)
    optim = torch.optim.SGD(net.parameters(), 0.01)
    net(INPUTS[:32]).mean().backward()  # the first is slow
    optim.zero_grad()
    with paceline.AsyncDataParallel(net, optim, hubs, EVERY, DELAY, name="beside", **options) as training:
        while not stop.is_set():
            # All the data in turn: updates of a worker that knows its few rows by heart are too small to compare with.
            rows = slice(first := 32 * (training.counts.steps % (len(INPUTS) // 32)), first + 32)
            ((net(INPUTS[rows]) - TARGETS[rows]) ** 2).mean().backward()
            optim.step()
            optim.zero_grad()
            time.sleep(0.003)
        training.finish(0.0)


def wait_until_together(hub: Any) -> None:
    """Wait until the other worker has provided the initial parameters: the hub then requests no others."""
    deadline = time.monotonic() + 30.0
    while hub.hub.phase != "together" and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("sync", "norm", "options"),
    [
        ("bucketed", True, {}),
        ("sharded", False, {"compression": "int4"}),
        ("full-shard", False, {}),
        ("full-shard", False, {"score": True, "receive": "better"}),
        ("bucketed", False, {"score": True, "receive": "better", "send": "better"}),
        ("overlap", False, {"every": "auto", "delay": "auto", "warmup": 10}),
    ],
)
def test_replicas_stay_equal_to_the_bit(pool, job_key, sync: str, norm: bool, options: dict) -> None:
    stop = threading.Event()
    with hub_thread(HubRules(down="fp32")) as hub:
        same = {"compression": options.get("compression")}
        other = threading.Thread(target=beside, args=([hub.address], stop, norm), kwargs=same)
        other.start()
        try:
            wait_until_together(hub)
            first, second = pool(2).run(
                train_beside_another,
                [hub.address],
                sync,
                norm,
                options,
                env=[job_key.environment()] * 2,
            )
        finally:
            stop.set()
            other.join(60)
        assert not other.is_alive()
        names = {each.name for each in hub.hub.members}
        assert len(names) == 2
        assert hub.hub.refused == {}
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]


def test_groups_share_fragments_and_hubs(pool, job_key) -> None:
    stop = threading.Event()
    rules = [HubRules(down="fp32", shard=HubShard(index, 2)) for index in range(2)]
    with hub_thread(rules[0]) as one, hub_thread(rules[1]) as two:
        addresses = [one.address, two.address]
        same = {"compression": None, "fragments": 2}
        other = threading.Thread(target=beside, args=(addresses, stop), kwargs=same)
        other.start()
        try:
            runs = pool(2, "paceline").run(
                train_beside_another,
                addresses,
                "bucketed",
                False,
                {"fragments": 2},
                env=[job_key.environment()] * 2,
            )
        finally:
            stop.set()
            other.join(60)
        assert min(one.hub.updates, two.hub.updates) > 2
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]


# ---------------------------------------------------------------- meetings


def count_meetings(rank: int, size: int, hub: str) -> tuple[list[int], list[int]]:
    task, met = Task(), [0]
    broadcast = rank_group.broadcast_text

    def counted(*given: Any, **named: Any) -> str:
        met[0] += 1
        return broadcast(*given, **named)

    rank_group.broadcast_text = counted
    try:
        with task.training(hub, every=10, delay=3) as training:
            start(task, training)
            train(task, training, 15)  # away from the beginning, which meets more often
            together = []
            for _ in range(40):
                before = met[0]
                train(task, training, 1)
                together.append(met[0] - before)
        with task.training("tcp://127.0.0.1:9", every=10, delay=3) as training:
            alone = []
            for _ in range(60):
                before = met[0]
                task.step()
                alone.append(met[0] - before)
            assert not training.finish(0.0)
    finally:
        rank_group.broadcast_text = broadcast
    return together, alone


def test_ranks_meet_only_where_something_may_be_due(pool, job_key) -> None:
    with hub_thread(HubRules(down="fp32")) as hub:
        (together, alone), others = pool(2).run(count_meetings, hub.address, env=[job_key.environment()] * 2)
    assert others == (together, alone)
    assert sum(each == 0 for each in together) == 32, "two of ten steps: where it sends, and where it applies"
    assert sorted(each for each in together if each) == [1] * 4 + [2] * 4, "applying is a command of its own"
    assert sum(alone[:20]) <= 6
    assert sum(alone[20:]) <= 4, "without a hub: every k-th step"
