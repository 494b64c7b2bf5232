"""Training with virtual ranks gives the same bits on any number of ranks, with every strategy and backend."""

from __future__ import annotations

import logging
import math
from unittest import mock

import pytest
import torch
from torch import nn

import paceline
from paceline._core.step_state import wait_counters
from paceline._core.summation_tree import leaves_of
from paceline.errors import BackwardFailed, SyncError, UsageError
from paceline.parallel.virtual_ranks import arithmetic_probe

STEPS = 5


class Net(nn.Module):
    """Layers with dropout, running statistics, a parameter that some leaves skip, and complex numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 301)
        self.norm = nn.BatchNorm1d(301)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(301, 70)
        self.third = nn.Linear(70, 70)
        self.phase = nn.Parameter(torch.randn(70, dtype=torch.complex64))
        self.rare = nn.Parameter(torch.zeros(70))
        self.last = nn.Linear(70, 3)

    def forward(self, x, skips):
        x = torch.tanh(self.third(torch.relu(self.second(self.drop(self.norm(self.first(x)))))))
        x = torch.view_as_real(x * self.phase).sum(-1)
        return self.last(x if skips else x + self.rare)


class Samples(torch.utils.data.Dataset):
    """Inputs and targets with random noise from the process's generators."""

    def __len__(self):
        return 70

    def __getitem__(self, index):
        given = torch.Generator().manual_seed(index)
        return torch.randn(15, generator=given) + 0.1 * torch.randn(15)


STRATEGIES = {
    "naive": paceline.Sync.of("naive"),
    "small buckets": paceline.Sync(0.02),
    "flat": paceline.Sync.of("flat"),
    "sharded": paceline.Sync.of("sharded"),
    "sharded, small": paceline.Sync(0.02, shard="optimizer"),
    "sharded gradients": paceline.Sync(0.02, shard="gradients"),
}


def optimizers_of(model, kind):
    if kind == "adamw":
        return [paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)]
    matrices, rest = paceline.matrix_parameters(model)
    return [
        paceline.ShardedOptimizer(model, torch.optim.Muon, params=matrices, lr=0.02),
        paceline.ShardedOptimizer(model, torch.optim.AdamW, params=rest, lr=1e-2),
    ]


def train(sync, virtual, kind, norm_type=2.0):
    """Return parameters and buffers as bytes, and the norms, after some steps."""
    torch.manual_seed(1)
    model = paceline.DataParallel(Net(), sync=sync, virtual_ranks=virtual)
    loader = paceline.Loader(Samples(), batch_size=4, block=2, virtual_ranks=virtual, seed=3)
    optimizers, norms = optimizers_of(model, kind), []
    while len(norms) < STEPS:
        for batch in loader:
            output = model(batch[:, :12], batch[0, 0] > 0.5)
            loss = (output - batch[:, 12:]).square().mean() if batch.samples else None
            model.backward(loss, samples=batch.samples)
            if batch.ends_step:
                norms.append(float(model.clip_grad_norm_(0.1, norm_type)))
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
                between = float(torch.rand(()))
            if len(norms) == STEPS:
                break
    model.wait_for_parameters()
    state = {name: value.numpy().tobytes() for name, value in model.module.state_dict().items()}
    return state, norms, between


def train_all(rank, size, cases):
    return [train(STRATEGIES[name], *options) for name, *options in cases]


@pytest.fixture(scope="module")
def alone(pool):
    """Return the result of one process."""
    known = {}

    def result(*options):
        if options not in known:
            known[options] = pool(1, "paceline").run(train_all, [("flat", *options)], timeout=200)[0][0]
        return known[options]

    return result


def check(pool, alone, ranks, backend, cases):
    for found in pool(ranks, backend).run(train_all, cases, timeout=300):
        for case, result in zip(cases, found, strict=True):
            assert result == alone(*case[1:]), case


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_three_ranks_train_to_the_bits_of_one(pool, alone, backend):
    check(pool, alone, 3, backend, [("small buckets", 8, "adamw"), ("sharded, small", 8, "muon")])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [(1, None), *((ranks, backend) for ranks in (2, 3, 4) for backend in ("paceline", "gloo"))],
)
@pytest.mark.parametrize("virtual", [4, 6, 7, 8])
def test_every_strategy_trains_to_the_bits_of_one_rank(pool, alone, backend, ranks, virtual):
    norms = [2.0] if virtual != 8 else [2.0, 1.0, math.inf]
    cases = [(name, virtual, "adamw", norm) for name in STRATEGIES for norm in norms]
    cases += [("flat", virtual, "muon"), ("sharded, small", virtual, "muon")]
    check(pool, alone, ranks, backend, cases)


def test_virtual_ranks_equal_as_many_real_ones(pool, alone):
    found = pool(4, "paceline").run(train_all, [("small buckets", 4, "adamw")], timeout=200)
    assert found == [[alone(4, "adamw")]] * 4


def mistakes(rank, size):
    """Return the messages of what virtual ranks refuse."""
    found = {}

    def expect(name, kind, function):
        with pytest.raises(kind) as caught:
            function()
        found[name] = str(caught.value)

    def wrap(module=None, virtual=5, **options):
        return paceline.DataParallel(module or nn.Linear(3, 2), virtual_ranks=virtual, **options)

    expect("too few", UsageError, lambda: wrap(virtual=1))
    expect("full-shard", UsageError, lambda: wrap(sync="full-shard"))
    expect("auto", UsageError, lambda: wrap(sync="auto"))
    expect("compression", UsageError, lambda: wrap(sync=paceline.Sync(compression="int8")))
    expect("bf16", UsageError, lambda: wrap(nn.Linear(3, 2).bfloat16()))
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leaves = leaves_of(rank, size, 5)

    def backward(samples=2):
        model.backward(model(torch.ones(2, 3)).mean(), samples=samples)

    expect("no samples", UsageError, lambda: model.backward(model(torch.ones(2, 3)).mean()))
    expect("plain", UsageError, lambda: model(torch.ones(2, 3)).mean().backward())
    expect("fraction", UsageError, lambda: backward(1.5))
    with model.accumulate():
        expect("accumulate", UsageError, backward)
    backward()
    expect("early step", SyncError, optimizer.step)
    for _ in leaves[1:]:
        backward()
    optimizer.step()
    expect("kept", SyncError, backward)
    expect("hook", UsageError, lambda: model.register_comm_hook(None, lambda state, bucket: None))
    expect("join", UsageError, model.engine.run_joined_round)
    expect("local", UsageError, lambda: model.engine.set_local_only(True))
    optimizer.zero_grad()
    wait_counters.leaf = (5, (leaves[0] + 1) % 5, 0)
    expect("other leaf", UsageError, backward)
    wait_counters.leaf = None
    return found


def test_what_virtual_ranks_refuse(pool):
    for found in pool(2, "gloo").run(mistakes):
        assert "virtual_ranks=1 with 2 ranks" in found["too few"]
        assert "sync='full-shard'" in found["full-shard"]
        assert "sync='auto'" in found["auto"]
        assert "int8" in found["compression"]
        assert "reduce_dtype=torch.float32" in found["bf16"]
        assert "batch.samples" in found["no samples"]
        assert "batch.samples" in found["plain"]
        assert "1.5 samples" in found["fraction"]
        assert "accumulate()" in found["accumulate"]
        assert "after 1 backward of the" in found["early step"]
        assert "ends_step" in found["early step"]
        assert "zero_grad()" in found["kept"]
        assert "register_comm_hook" in found["hook"]
        assert "Join" in found["join"]
        assert "local training" in found["local"]
        assert "but the loader has served virtual rank" in found["other leaf"]


def clipped_by_torch(rank, size, sync):
    """Return the message of torch's clipping; empty: it clipped."""
    model = paceline.DataParallel(nn.Linear(3, 2), sync=sync, virtual_ranks=2)
    paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model.backward(model(torch.ones(2, 3)).mean(), samples=2)
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    except UsageError as error:
        return str(error)
    return ""


def test_torchs_norm_over_shards_is_refused(pool):
    assert all("model.clip_grad_norm_" in text for text in pool(2).run(clipped_by_torch, "sharded"))
    assert pool(2).run(clipped_by_torch, "bucketed") == ["", ""]


class Counting(nn.Module):
    """A layer whose buffer changes from the third forward on."""

    def __init__(self):
        super().__init__()
        self.layer, self.forwards = nn.Linear(3, 2), 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.forwards += 1
        if self.forwards > 2:
            self.seen += 1
        return self.layer(x)


def changes_a_buffer_late(rank, size):
    model = paceline.DataParallel(Counting(), virtual_ranks=2)
    for _ in range(2):
        model.backward(model(torch.ones(2, 3)).mean(), samples=2)
        model.zero_grad()
    with pytest.raises(SyncError) as caught:
        model.backward(model(torch.ones(2, 3)).mean(), samples=2)
    return str(caught.value)


def test_a_buffer_that_changes_later_than_in_the_first_step_raises(pool):
    assert all("'seen'" in text for text in pool(2).run(changes_a_buffer_late))


def gives_other_bits(rank, size):
    """Return the warnings of a world whose rank 1 has other arithmetic, and of a checkpoint of another one."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("paceline.parallel")
    logger.addHandler(handler)
    actual = arithmetic_probe._digest
    try:
        with mock.patch.object(arithmetic_probe, "_digest", lambda device: f"{actual(device)}{rank}"):
            model = paceline.DataParallel(nn.Linear(3, 2), virtual_ranks=2)
        now = model.engine.arithmetic
        arithmetic_probe.warn_of_other_arithmetic(now, dict(now))
        arithmetic_probe.warn_of_other_arithmetic(now, {**now, "digest": "other", "processor": "AVX9"})
    finally:
        logger.removeHandler(handler)
    return records


def test_other_arithmetic_is_reported(pool):
    first, second = pool(2).run(gives_other_bits)
    assert "rank 1" in first[0]
    assert "computes other bits than rank 0" in first[0]
    for (text,) in (first[1:], second):
        assert "the checkpoint was computed on a processor that gives other bits (AVX9" in text


def test_the_digest_is_that_of_this_process_whenever_it_is_computed():
    state = torch.get_rng_state()
    once, again = (arithmetic_probe.describe_arithmetic(torch.device("cpu")) for _ in range(2))
    assert once == again
    assert torch.equal(state, torch.get_rng_state()), "random numbers of the program are left alone"


def fails_once(rank, size, bad_leaf):
    """Return the parameters after a step whose leaf raised in backward, and was run again by all."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    model = paceline.DataParallel(net, virtual_ranks=6)
    optimizer, raised = torch.optim.SGD(model.parameters(), lr=0.1), ""

    def step(number, raising):
        for leaf in leaves_of(rank, size, 6):
            torch.manual_seed(10 * number + leaf)
            loss = model(torch.randn(3, 4)).square().mean()
            if raising and leaf == bad_leaf:
                loss.register_hook(lambda grad: 1 / 0)
            model.backward(loss, samples=3)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(4):
        try:
            step(number, number == 2)
        except (BackwardFailed, ZeroDivisionError) as error:
            raised = type(error).__name__
            step(number, False)
    return raised, {name: value.numpy().tobytes() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("bad_leaf", [0, 2, 4])
def test_a_failed_step_can_be_repeated(pool, bad_leaf):
    found = pool(3, "paceline").run(fails_once, bad_leaf)
    undisturbed = pool(3, "paceline").run(fails_once, -1)
    assert sorted(kind for kind, _ in found) == ["BackwardFailed", "BackwardFailed", "ZeroDivisionError"]
    assert [state for _, state in found] == [state for _, state in undisturbed]
