"""A hundred random set-ups, many of them faulty: each ends correctly or with an error on every rank; none hangs."""

from __future__ import annotations

import contextlib
import gc
import random
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import paceline
from paceline.errors import CollectiveTimeout

STRATEGIES = ["naive", "flat", "overlap", "bucketed", "sharded", "full-shard"]
POLICIES = ["join", "join", "rebalance", "rebalance", "truncate", "pad", "drop", "error"]
EXACT = ("join", "rebalance", "error")
FAULTS = [
    *["none"] * 6,  # as often as all faults together
    "length",
    "seed",
    "batch size",
    "sample",
    "forward",
    "state",
]


@dataclass(frozen=True)
class SetUp:
    """One way to train for an epoch or two.

    Attributes:
        fault: what is wrong on the last rank.
        at: the sample, or the step, at which it goes wrong.
        own: how many samples each rank's own stream has; None: the dataset is map-style.
        stop: after how many steps the first epoch is given up, on all ranks.
    """

    number: int
    samples: int
    batch_size: int
    block: int
    scheme: str
    shares: tuple[float, ...] | None
    policy: str
    strategy: str
    accumulate: int
    fault: str
    at: int
    own: tuple[int, ...] | None
    stop: int | None


def drawn(number, ranks):
    chance = random.Random(number)
    samples = chance.randint(4 * ranks, 60)
    own = tuple(chance.choice([0, 3, 8, 15]) for _ in range(ranks)) if chance.random() < 0.25 else None
    weights = [chance.choice([0, 1, 1, 2, 2, 3, 5]) for _ in range(ranks)]
    shares = None
    if own is None and sum(weights) and chance.random() < 0.5:
        shares = tuple(weight / sum(weights) for weight in weights)
    fault = chance.choice(FAULTS)
    return SetUp(
        number,
        samples,
        batch_size=chance.randint(1, 6),
        block=1 if own is not None else chance.choice([1, 1, 2, 3, 5]),
        scheme="round_robin" if own is not None else chance.choice(["round_robin", "random"]),
        shares=shares,
        policy=chance.choice([policy for policy in POLICIES if own is None or policy != "rebalance"]),
        strategy=chance.choice(STRATEGIES),
        accumulate=chance.choice([1, 1, 2]),
        fault="none" if own is not None and fault in ("length", "state") else fault,
        at=chance.randint(0, 10),
        own=own,
        stop=chance.choice([None, None, None, 1, 2]),
    )


class Numbers:
    """Sample i is i; one of them may be broken."""

    def __init__(self, samples, broken=None):
        self.samples, self.broken = samples, broken

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        if number == self.broken:
            raise LookupError(f"sample {number} is broken")
        return number


class Stream(IterableDataset):
    """The samples first, first + 1, …, one of which may be broken."""

    def __init__(self, first, samples, broken=None):
        self.first, self.numbers = first, Numbers(samples, broken)

    def __iter__(self):
        for number in range(len(self.numbers)):
            yield self.first + self.numbers[number]


def loader_of(setup, rank, ranks, group):
    faulty = rank == ranks - 1
    broken = setup.at if setup.fault == "sample" and faulty else None
    options = {"uneven": setup.policy, "seed": 3, "group": group}
    batch_size = setup.batch_size
    if faulty and setup.fault == "seed":
        options["seed"] = 4
    if faulty and setup.fault == "batch size":
        batch_size += 1
    if setup.own is not None:
        return paceline.Loader(Stream(100 * rank, setup.own[rank], broken), batch_size, **options)
    options |= {"dispatch": setup.scheme, "block": setup.block, "shares": setup.shares}
    loader = paceline.Loader(
        Numbers(setup.samples + (faulty and setup.fault == "length"), broken), batch_size, **options
    )
    if setup.fault == "state" and not faulty:
        loader.load_state_dict({**loader.state_dict(), "epoch": 7})
    return loader


class Net(torch.nn.Module):
    """A small model that may break in one of its forwards."""

    def __init__(self, broken=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 4), torch.nn.Linear(4, 1)])
        self.broken, self.calls = broken, 0

    def forward(self, x):
        self.calls += 1
        if self.calls - 1 == self.broken:
            raise ArithmeticError("this forward is broken")
        return self.layers[1](torch.tanh(self.layers[0](x)))


def train(setup, rank, ranks, group):
    """Train; return the samples of the last epoch that this rank used, and its steps."""
    loader = loader_of(setup, rank, ranks, group)
    broken = setup.at if setup.fault == "forward" and rank == ranks - 1 else None
    net = Net(broken)
    model = paceline.DataParallel(net, sync=setup.strategy, group=group, units=[])
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=1e-3)
    stops = [setup.stop, None] if setup.stop is not None else [None]
    for stop in stops:
        used, steps = [], 0
        for batch in loader:
            used += batch.tolist()[: batch.samples]
            steps += 1
            last = steps % setup.accumulate == 0
            with contextlib.nullcontext() if last else model.accumulate():
                loss = model(batch.float()[:, None] / 100).square().mean()
                model.backward(loss, samples=batch.samples)
            if last:
                optim.step()
                optim.zero_grad()
            if stop is not None and steps >= stop and last:
                break
        model.zero_grad()
    return sorted(used), steps


def all_set_ups(rank, ranks, numbers):
    """Run set-ups one after the other, each in its own group; return their outcomes."""
    found = []
    for number in numbers:
        setup = drawn(number, ranks)
        group = dist.new_group(backend="paceline", timeout=timedelta(seconds=30))
        try:
            outcome = ("ended", train(setup, rank, ranks, group))
        except (paceline.PacelineError, LookupError, ArithmeticError) as error:
            outcome = ("refused", (type(error).__name__, isinstance(error, CollectiveTimeout), str(error)))
        if setup.strategy == "full-shard":
            gc.collect()  # FSDP2's cycles hold the group
        dist.destroy_process_group(group)
        found.append(outcome)
    return found


def check(setup, outcomes):
    kinds = {kind for kind, _ in outcomes}
    assert len(kinds) == 1, (setup, outcomes)
    if kinds == {"refused"}:
        assert not any(hung for _, (_, hung, _) in outcomes), (setup, outcomes)
        if setup.fault == "none":  # invalid settings are refused alike on all ranks
            assert {name for _, (name, _, _) in outcomes} in ({"UsageError"}, {"UnevenData"}), (
                setup,
                outcomes,
            )
            assert setup.policy == "error" or setup.own is None, (setup, outcomes)
        return
    results = [result for _, result in outcomes]
    assert len({steps for _, steps in results}) == 1, (setup, results)
    assert setup.fault in ("none", "sample", "forward"), (setup, results)
    if setup.policy in EXACT:
        expected = list(range(setup.samples))
        if setup.own is not None:
            expected = [100 * rank + each for rank, there in enumerate(setup.own) for each in range(there)]
        assert sorted(sample for used, _ in results for sample in used) == expected, (setup, results)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_set_up_hangs(pool, ranks):
    numbers = range(50 * ranks, 50 * ranks + 50)
    results = pool(ranks, "paceline").run(all_set_ups, numbers, timeout=240)
    ended = 0
    for at, number in enumerate(numbers):
        outcomes = [result[at] for result in results]
        check(drawn(number, ranks), outcomes)
        ended += outcomes[0][0] == "ended"
    assert 15 <= ended <= 40  # both kinds are many
