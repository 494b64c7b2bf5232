"""Operations between steps, in backward and after mistakes give the parameters of one process.

(test_equality.py holds every strategy against one process where all goes as planned.)
"""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, data, loss_on
from model_zoo import max_difference
from paceline.parallel.engine.loss_weights import LossWeights
from paceline.parallel.gradient_collectives import broadcast_tensors
from single_process import linear, one_process, over_paceline, pair, same

SMALL_BUCKETS = [
    paceline.Sync(2**-11),
    paceline.Sync(2**-11, overlap=False),
    paceline.Sync(2**-11, shard="optimizer"),
]

pool = pytest.fixture(over_paceline)


# ------------------------------------------------------------------ samples


def changing_samples(rank, size, sync, accumulate):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step, shares in enumerate([[4, 9], [7, 2], [0, 5], [3, 0], [11, 11], [1, 2]]):
        micros = [
            [data(r, 10 * step + micro, n) for r, n in enumerate(shares)] for micro in range(accumulate)
        ]
        for micro, parts in enumerate(micros):
            model.engine.sync_enabled = micro == accumulate - 1
            x, y = parts[rank]
            model.backward(model_zoo.loss_of(model, "", x, y) if len(x) else None, samples=len(x))
        optim.step()
        optim.zero_grad()
        x, y = (torch.cat(part) for part in zip(*(pair for parts in micros for pair in parts), strict=True))
        one_process(reference, other, [model_zoo.loss_of(reference, "", x, y)])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sync", [*ALL, *SMALL_BUCKETS], ids=str)
def test_samples_may_change_from_step_to_step(pool, sync, accumulate):
    same(pool(2).run(changing_samples, sync, accumulate))


def a_loss_that_does_not_count(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(3):
        model.backward(loss_on(model, rank, step), samples=0 if rank == 1 else 6)
        optim.step()
        optim.zero_grad()
        one_process(reference, other, [loss_on(reference, 0, step)])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", ALL)
def test_a_loss_with_no_samples_counts_for_nothing(pool, sync):
    same(pool(2).run(a_loss_that_does_not_count, sync))


def many_samples(rank, size, sync):
    torch.manual_seed(0)
    model = paceline.DataParallel(torch.nn.Linear(4, 1), sync=sync)
    model.backward(model(torch.ones(2, 4)).mean(), samples=2**24 + 1)  # not a float32
    return model.samples


@pytest.mark.parametrize("sync", ALL)
def test_samples_are_counted_exactly_beyond_float32(pool, sync):
    assert pool(3).run(many_samples, sync) == [3.0 * (2**24 + 1)] * 3


def low_precision_loss(rank, size):
    torch.manual_seed(0)
    model = paceline.DataParallel(torch.nn.Linear(model_zoo.WIDTH, 1).bfloat16(), reduce_dtype=torch.float32)
    x, y = data(rank, n=(3, 7)[rank])
    model.backward(model_zoo.loss_of(model, "", x.bfloat16(), y.bfloat16()), samples=len(x))
    return model.samples


def test_samples_of_a_loss_in_bf16_follow_its_rounded_weight(pool):
    expected = 2 * sum(torch.tensor(n / 2).bfloat16().item() for n in (3, 7))
    assert pool(2).run(low_precision_loss) == [expected] * 2


def low_precision_steps(rank, size, through_model):
    """Train alone; return the largest distance from a float32 gradient, rounded, of each step."""
    torch.manual_seed(0)
    model = paceline.DataParallel(torch.nn.Linear(model_zoo.WIDTH, 3).bfloat16(), reduce_dtype=torch.float32)
    reference = torch.nn.Linear(model_zoo.WIDTH, 3).bfloat16()
    reference.load_state_dict(model.module.state_dict())
    optim, gaps = torch.optim.SGD(model.parameters(), lr=0.0), []
    for step, n in enumerate((8, 8, 5)):
        x = data(rank, step, n)[0].bfloat16()
        loss = (model if through_model else model.module)(x).square().mean()
        model.backward(loss, samples=n) if through_model else loss.backward()
        reference(x).square().mean().backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        gaps.append(max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs))
        optim.step()
        optim.zero_grad()
        reference.zero_grad()
    return gaps


@pytest.mark.parametrize("through_model", [True, False], ids=["weighted", "plain, by the bare module"])
def test_a_world_of_one_reduces_low_precision_gradients_too(through_model):
    assert max(low_precision_steps(0, 1, through_model)) < 0.01


def two_weighted_backwards(rank, size, sync):
    model, optim, reference, other = pair(sync, linear)
    for step in (0, 1):
        model.backward(loss_on(model, rank, step), samples=6)
    optim.step()
    one_process(reference, other, [loss_on(reference, r, step) for r in range(size) for step in (0, 1)])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", ALL)
def test_a_second_weighted_backward_adds_to_the_first(pool, sync):
    same(pool(2).run(two_weighted_backwards, sync))


# ------------------------------------------------------------------ sizes


def large():
    """14 MB in float64: several parts of an update, all-reduces sent in two halves."""
    return torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(5)), torch.nn.Linear(600, 1))


def large_model(rank, size, sync):
    model, optim, reference, other = pair(sync, large, torch.optim.AdamW, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        xs = [torch.randn(3 + r + step, 600, generator=generator, dtype=torch.float64) for r in range(size)]
        model.backward(model(xs[rank]).square().mean(), samples=len(xs[rank]))
        optim.step()
        optim.zero_grad()
        one_process(reference, other, [reference(torch.cat(xs)).square().mean()])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize(
    "sync", ["flat", paceline.Sync(2), "sharded", paceline.Sync(2, shard="optimizer")], ids=str
)
def test_a_model_of_many_megabytes(pool, sync):
    same(pool(2).run(large_model, sync), 1e-11)


def broadcast_in_batches(rank, size):
    torch.manual_seed(rank)
    net = model_zoo.Plain().double()
    broadcast_tensors(paceline.DataParallel(linear()).comm, list(net.parameters()), cap_nbytes=64)
    torch.manual_seed(0)
    return max_difference(net.parameters(), model_zoo.Plain().double().parameters())


def test_a_broadcast_in_many_messages_reaches_every_tensor(pool):
    assert pool(2).run(broadcast_in_batches) == [0.0, 0.0]


# ------------------------------------------------------------------ clipping


def clipped(rank, size, sync, make, norm_type):
    model, optim, reference, other = pair(sync, make)
    model.backward(loss_on(model, rank), samples=6)
    norm = model.clip_grad_norm_(0.05, norm_type)
    optim.step()
    (sum(loss_on(reference, r) for r in range(size)) / size).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
    other.step()
    return max_difference([norm, *model.whole_parameters()], [expected, *reference.parameters()])


@pytest.mark.sweep
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("make", [model_zoo.Plain, linear])
@pytest.mark.parametrize("sync", ["bucketed", "sharded", "full-shard"])
def test_clipping_by_any_norm(pool, sync, make, norm_type):
    same(pool(3).run(clipped, sync, make, norm_type))


# ------------------------------------------------------------------ gradients from other sources


def settled(sync):
    """A pair after one common step, so that the buckets exist; the plain one is brought to the same state."""
    model, optim, reference, _ = pair(sync, model_zoo.Plain, lr=0.1)
    loss_on(model, 0).backward()
    optim.step()
    optim.zero_grad()
    with torch.no_grad():
        for param, value in zip(reference.parameters(), model.whole_parameters(), strict=True):
            param.copy_(value)
    return model, reference


def gradient_replaced(rank, size, sync):
    model, reference = settled(sync)
    with model.no_sync():
        loss_on(model, rank, 1).backward()
    for param in model.parameters():
        param.grad = param.grad * 0.5
    loss_on(model, rank, 2).backward()
    (sum(0.5 * loss_on(reference, r, 1) + loss_on(reference, r, 2) for r in range(size)) / size).backward()
    return max_difference([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


@pytest.mark.parametrize("sync", REPLICATED)
def test_a_gradient_that_the_program_replaced_counts(pool, sync):
    same(pool(2).run(gradient_replaced, sync))


def graph_of_the_gradient(rank, size, sync):
    model, reference = settled(sync)
    loss_on(model, rank, 1).backward(create_graph=True)
    (sum(loss_on(reference, r, 1) for r in range(size)) / size).backward()
    return max_difference(
        [p.grad.detach() for p in model.parameters()], [p.grad for p in reference.parameters()]
    )


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("sync", REPLICATED)
def test_create_graph(pool, sync):
    same(pool(2).run(graph_of_the_gradient, sync))


def around_the_wrapper(rank, size, sync):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(3):
        loss_on(model.module, rank, step).backward()
        optim.step()
        optim.zero_grad()
        one_process(reference, other, [loss_on(reference, r, step) for r in range(size)])
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", [*REPLICATED, "sharded"])
def test_a_loss_computed_outside_the_wrapper_is_synchronised(pool, sync):
    same(pool(2).run(around_the_wrapper, sync))


class Repeated(torch.nn.Module):
    """A layer that is used `times` times, each in a re-entrant checkpoint: its hook fires as often."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = (
            torch.nn.Linear(model_zoo.WIDTH, model_zoo.WIDTH),
            torch.nn.Linear(model_zoo.WIDTH, model_zoo.WIDTH),
        )
        self.times = 1

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(lambda z: torch.tanh(self.shared(z)), x, use_reentrant=True)
        return x.sum(1, keepdim=True)


def late_and_plain(rank, size, sync):
    model, optim, reference, other = pair(sync, Repeated)
    for step in range(4):
        model.module.times = reference.times = 1 + step
        loss_on(model, rank, step).backward()
        optim.step()
        optim.zero_grad()
        for r in range(size):
            (loss_on(reference, r, step) / size).backward()
        other.step()
        other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", ["overlap", "bucketed", "sharded"])
def test_late_gradients_of_a_plain_backward(pool, sync):
    same(pool(3).run(late_and_plain, sync))


# ------------------------------------------------------------------ the first weight


def half_precision(rank, size, sync, shares):
    """Return the relative error after two steps in float16 with token counts as samples."""
    model, reference = (torch.nn.Linear(model_zoo.WIDTH, 1) for _ in range(2))
    reference.double().load_state_dict(model.half().state_dict())
    model = paceline.DataParallel(model, sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
    other = torch.optim.SGD(reference.parameters(), lr=0.01)
    total = sum(sum(micros) for micros in shares)
    for step in range(2):
        for micro, samples in enumerate(shares[rank]):
            with contextlib.nullcontext() if micro == len(shares[rank]) - 1 else model.accumulate():
                loss = steep_loss(model, rank, step, micro) if samples else None
                model.backward(loss, samples=samples)
        optim.step()
        optim.zero_grad()
        sum(
            samples / total * steep_loss(reference, r, step, micro)
            for r, micros in enumerate(shares)
            for micro, samples in enumerate(micros)
        ).backward()
        other.step()
        other.zero_grad()
    whole = [param.double() for param in model.whole_parameters()]
    return max_difference(whole, reference.parameters())


def steep_loss(model, rank, step, micro):
    x, y = data(rank, 10 * step + micro)
    dtype = next(model.parameters()).dtype
    return 20 * (model(x.to(dtype)) - y.to(dtype)).abs().mean()


FIRST = {
    "equal": [[16384], [16384]],
    "unequal": [[64], [30000]],
    "accumulated": [[16384, 16384], [5000, 600]],
}


@pytest.mark.sweep
@pytest.mark.parametrize("shares", FIRST)
@pytest.mark.parametrize("sync", [*REPLICATED, "sharded", "full-shard", "auto"])
def test_token_counts_do_not_overflow_half_precision_in_the_first_step(pool, sync, shares):
    same(pool(2).run(half_precision, sync, FIRST[shares]), 1e-2)


@pytest.mark.parametrize("sync", [*REPLICATED, "sharded"])
def test_nor_does_a_first_step_without_data_on_one_rank(pool, sync):
    same(pool(2).run(half_precision, sync, [[0], [16384]]), 1e-2)


def test_nor_does_the_first_step_in_a_world_of_one():
    assert half_precision(0, 1, "bucketed", [[65536, 16384]]) < 1e-2


def first_steps(rank, size, sync, by_ranks):
    """Return the bits after three steps in float32; `by_ranks`: with samples ÷ ranks as the first weight."""
    keep_reference = mock.patch.object(LossWeights, "start")
    with keep_reference if by_ranks else contextlib.nullcontext():
        torch.manual_seed(3)
        model = paceline.DataParallel(model_zoo.Plain(), sync=sync)
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        for step in range(3):
            x, y = data(rank, step)
            with model.accumulate():
                model.backward(model_zoo.loss_of(model, "", x.float(), y.float()), samples=5 + 90 * rank)
            model.backward(model_zoo.loss_of(model, "", x.float(), y.float()), samples=1000)
            optim.step()
            optim.zero_grad()
    return torch.cat([param.reshape(-1) for param in model.whole_parameters()]).numpy().tobytes()


@pytest.mark.parametrize("sync", [*ALL, *SMALL_BUCKETS], ids=str)
def test_the_first_weight_changes_no_bit(pool, sync):
    first, again = (pool(3).run(first_steps, sync, by_ranks) for by_ranks in (True, False))
    assert first == again


def local_steps_first(rank, size):
    """Return the gap to one process when ranks that have trained alone, from other counts each, synchronise."""
    model, optim, reference, other = pair("overlap", model_zoo.Plain)
    step_of_all(model, optim, reference, other, rank, size, 0)
    model.engine.set_local_only(True)
    model.backward(loss_on(model, rank), samples=4**rank)
    model.engine.set_local_only(False)
    step_of_all(model, optim, reference, other, rank, size, 1)
    return max_difference(model.whole_parameters(), reference.parameters())


def step_of_all(model, optim, reference, other, rank, size, step):
    counts = [3, 700, 90]
    model.backward(loss_on(model, rank, step), samples=counts[rank])
    optim.step()
    optim.zero_grad()
    weighted = (n * loss_on(reference, r, step) for r, n in enumerate(counts[:size]))
    one_process(reference, other, [sum(weighted) / sum(counts[:size])])


def test_unequal_counts_after_a_block_of_local_training(pool):
    same(pool(3).run(local_steps_first))
