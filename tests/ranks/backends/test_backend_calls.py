"""Calls of the paceline backend that differ between ranks, are invalid, work in place, or are many."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from backend_scenes import error_of
from paceline.backends.shm import peer_sockets
from paceline.backends.shm.control_block import FIFO_NBYTES
from paceline.backends.shm.shm_p2p import ByteFifo


def disagree(rank, size):
    group, texts = dist.group.WORLD, []
    large = group.allocate_tensor(20_000).fill_(1)

    def coalesced():
        with dist._coalescing_manager(group, async_ops=False):
            for numel in (3, 4, 5):
                dist.all_reduce(torch.ones(numel))

    def scattered(numel):
        dist.reduce_scatter(torch.ones(numel), [torch.ones(numel)] * size)

    calls = [
        [
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.barrier(),
            lambda: dist.broadcast(torch.ones(4), 0),
        ],
        [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(5))],
        [lambda: dist.all_reduce(large), lambda: dist.all_reduce(large[1:])],
        [lambda: dist.all_reduce(large), lambda: dist.all_reduce(torch.ones(20_001))],
        [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(4).double())],
        [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX)],
        [lambda: dist.broadcast(large, 0), lambda: dist.broadcast(large, 2)],
        [lambda: scattered(20_000), lambda: scattered(20_001)],
        [coalesced, lambda: dist.all_reduce(torch.ones(9))],
        [
            lambda: dist.all_reduce(large, async_op=True),
            lambda: dist.all_gather([torch.ones(2)] * size, torch.ones(2), async_op=True),
        ],
        [
            lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6), [2, 2, 2], [2, 2, 2]),
            lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6), [1, 2, 3], [2, 2, 2]),
        ],
    ]
    for each in calls:
        texts.append(error_of(each[rank % len(each)]))
        total = torch.full((3,), float(rank))
        dist.all_reduce(total)
        assert total.tolist() == [3.0] * 3, "the group stays usable"
    assert large.eq(1).all()
    return texts


@pytest.mark.thorough
def test_different_calls_raise_on_all_ranks_and_the_group_stays_usable(pool):
    texts = pool(3, "paceline").run(disagree)
    for ranks in zip(*texts, strict=True):
        assert {kind for kind, _ in ranks} == {"MismatchError"}, ranks
    zero, one, two = (of_rank[0][1] for of_rank in texts)
    assert "this rank calls all_reduce(float32[4], SUM), rank 1 calls barrier()" in zero
    assert "this rank calls barrier(), rank 0 calls all_reduce(float32[4], SUM)" in one
    assert "this rank calls broadcast(float32[4], root 0), rank 0 calls all_reduce(float32[4], SUM)" in two
    assert "rank 0 sends 8 bytes to rank 1, which expects 4" in texts[0][-1][1]


def misuse(rank, size):
    x, half = torch.ones(6), torch.ones(3)
    wrong = [
        lambda: dist.all_reduce(x, dist.ReduceOp.BAND),
        lambda: dist.all_reduce(x.int(), dist.ReduceOp.AVG),
        lambda: dist.all_gather([x] * (size + 1), x),
        lambda: dist.all_gather([half] * size, x),
        lambda: dist.all_gather_into_tensor(torch.ones(7), half),
        lambda: dist.all_to_all_single(torch.ones(6), x, [5, 0], [3, 3]),
        lambda: dist.group.WORLD.allocate_tensor(-1),
    ]
    found = []
    for call in wrong:
        found.append(error_of(call)[0])
        total = torch.full((3,), float(rank))
        dist.all_reduce(total)
        assert total.tolist() == [1.0] * 3
        if rank == 1:  # one rank alone raises before anything is sent
            assert error_of(call)[0] == found[-1]
    dist.barrier()
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_wrong_arguments_raise_before_anything_is_sent(pool):
    for found in pool(2, "paceline").run(misuse):
        assert set(found) <= {"UsageError", "ValueError", "RuntimeError"}, found
        assert found[:2] == ["UsageError"] * 2


def exchange_in_place(rank, size):
    """Unequal parts, each longer than a staging buffer, replace one another."""
    numels = [
        [200_000 * (1 + (source + 2 * target) % size) for target in range(size)] for source in range(size)
    ]

    def row(source):
        return torch.arange(sum(numels[source])) + 10**9 * source

    mine = row(rank)
    dist.all_to_all_single(mine, mine, [numels[source][rank] for source in range(size)], numels[rank])
    wanted = torch.cat([row(source).split(numels[source])[rank] for source in range(size)])
    return torch.equal(mine, wanted)


def test_all_to_all_may_be_in_place(pool):
    assert pool(3, "paceline").run(exchange_in_place) == [True] * 3


def groups_of_one_name(rank, size):
    """torch counts groups on each rank, so two pairs that create groups give them the same name."""
    read_all = peer_sockets._read_all

    def slowly(*args):
        time.sleep(0.3)  # all have published by now
        return read_all(*args)

    pairs = [dist.new_group(ranks, backend="paceline") for ranks in ([0, 1], [2, 3])]
    peer_sockets._read_all = slowly
    try:
        mine, _ = dist.new_subgroups(1, group=pairs[rank // 2])
    finally:
        peer_sockets._read_all = read_all
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=mine)
    return total.item()


def test_groups_of_different_ranks_may_have_one_name(pool):
    assert pool(4, "paceline").run(groups_of_one_name) == [0.0, 1.0, 2.0, 3.0]


def watch_counters(rank, size, number):
    """Pass bytes through a FIFO at full speed, and check its counters meanwhile."""
    fifo = ByteFifo(dist.group.WORLD._collectives.control, 0, 1)
    one, moved, seen = torch.zeros(1, dtype=torch.uint8), 0, set()
    dist.barrier()
    while moved < number:
        nbytes = fifo.readable()
        seen.add(0 <= nbytes <= FIFO_NBYTES)
        if rank == 0 and nbytes < 300:
            fifo.write(one)
        elif rank == 1 and nbytes > 0:
            fifo.read(one)
        else:
            continue
        moved += 1
    dist.barrier()
    return seen


def test_no_rank_sees_a_partially_written_counter(pool):
    assert pool(2, "paceline").run(watch_counters, 30_000) == [{True}] * 2


def many_small_calls(rank, size, count):
    """Many small calls in a row, some staged or in the arena, each checked: no torn read, no lost wake."""
    group = dist.group.WORLD
    small, kept = torch.empty(3), group.allocate_tensor(30_000)
    staged = torch.empty(400_000)
    for number in range(count):
        value = float(number % 1000)
        dist.all_reduce(small.fill_(rank + value))
        assert small.tolist() == [sum(range(size)) + size * value] * 3, number
        if number % 10 == 0:
            dist.all_reduce(kept.fill_(rank + value))
            assert kept.eq(sum(range(size)) + size * value).all(), number
        if number % 50 == 0:
            dist.all_reduce(staged.fill_(rank + value))
            assert staged.eq(sum(range(size)) + size * value).all(), number
        if number % 7 == 0:
            every = [torch.empty(2) for _ in range(size)]
            dist.all_gather(every, torch.full((2,), rank + value))
            assert [each[1].item() for each in every] == [each + value for each in range(size)], number


@pytest.mark.thorough
def test_thousands_of_small_calls_next_to_busy_processes(pool):
    busy = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            while os.getppid() != 1:
                sum(range(10_000))
            os._exit(0)
        busy.append(pid)
    try:
        pool(4, "paceline").run(many_small_calls, 1500, timeout=200)
    finally:
        for pid in busy:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    pool(2, "paceline").run(many_small_calls, 5000, timeout=100)


def empty_all_to_all(rank, size):
    for numel in (0, size, 0, 2 * size):
        tensor = torch.full((numel,), float(rank))
        output = torch.full_like(tensor, -1)
        dist.all_to_all_single(output, tensor)
        assert output.tolist() == [float(source) for source in range(size) for _ in range(numel // size)]


@pytest.mark.parametrize("size", [2, 3])
def test_an_empty_all_to_all_is_a_regular_call(pool, size):
    pool(size, "paceline").run(empty_all_to_all)
