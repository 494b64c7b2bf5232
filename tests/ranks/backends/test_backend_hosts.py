"""The paceline backend over several hosts, simulated on one machine by the variables of a launcher."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import CollectiveTimeout, PeerLost
from rank_pool import spawn

SIZES = (0, 1, 7, 8192, 100_003, 1_500_001)
LAYOUTS = {"2+2": (0, 0, 1, 1), "3+1": (0, 0, 0, 1), "1+1+1": (0, 1, 2), "mixed": (0, 1, 0, 1)}


def as_hosts(nodes):
    """Return the variables by which a launcher describes each rank's node."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(set(nodes))),
        }
        for rank, node in enumerate(nodes)
    ]


def enter(path, timeout=60.0):
    paceline.init("paceline", init_method=f"file://{path}/world", timeout=timeout)
    return dist.group.WORLD


def values(rank, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_order(rank_values, nodes):
    """Sum in the documented order: ranks of a host in order, then the hosts in order."""
    order = list(dict.fromkeys(nodes))
    sums = []
    for node in order:
        mine = [value for value, at in zip(rank_values, nodes, strict=True) if at == node]
        sums.append(sum(mine[1:], mine[0].clone()))
    return sum(sums[1:], sums[0])


def collectives(rank, size, path, nodes):
    group = enter(path)
    assert paceline.init().nodes == len(set(nodes))
    even = len({nodes.count(node) for node in nodes}) == 1
    for numel in SIZES:
        every = [values(each, numel) for each in range(size)]
        expected = in_order(every, nodes)
        arena = group.allocate_tensor(numel)
        for tensor in (arena, torch.empty(numel)):
            tensor.copy_(every[rank])
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected), numel
            tensor.copy_(every[rank])
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            assert torch.equal(tensor, expected / size), numel
            tensor.copy_(every[rank])
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            assert torch.equal(tensor, torch.stack(every).amax(0)), numel
            for root in range(size):
                tensor.copy_(every[rank])
                dist.broadcast(tensor, root)
                assert torch.equal(tensor, every[root]), (numel, root)
        outputs = [torch.empty(numel) for _ in range(size)]
        dist.all_gather(outputs, every[rank])
        assert all(map(torch.equal, outputs, every))
        flat = torch.empty(size * numel)
        dist.all_gather_into_tensor(flat, every[rank])
        assert torch.equal(flat, torch.cat(every))
        mine = torch.empty(numel)
        dist.reduce_scatter(mine, [each * (rank + 1) for each in every])
        parts = [every[rank] * (each + 1) for each in range(size)]
        if even:
            assert torch.equal(mine, in_order(parts, nodes))
        assert torch.allclose(mine, sum(parts), atol=1e-4)
        dist.barrier()
    low = values(rank, 50_000, torch.bfloat16)
    dist.all_reduce(low)
    assert torch.allclose(low.float(), sum(values(r, 50_000) for r in range(size)), atol=0.1)
    flags = torch.arange(40_000) % (rank + 2) == 0
    dist.all_reduce(flags, op=dist.ReduceOp.BOR)
    assert torch.equal(flags, torch.stack([torch.arange(40_000) % (r + 2) == 0 for r in range(size)]).any(0))
    whole = torch.full((3,), float(rank))
    dist.reduce(whole, 1)
    assert rank != 1 or whole.tolist() == [sum(range(size))] * 3
    after, before = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(torch.full((9,), float(rank)), after), dist.irecv(whole.resize_(9), before)]
    for work in works:
        work.wait()
    assert whole.tolist() == [before] * 9
    paceline.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_over_hosts(tmp_path, layout):
    nodes = LAYOUTS[layout]
    spawn(collectives, len(nodes), str(tmp_path), nodes, env=as_hosts(nodes))


def cuts(rank, size, path):
    enter(path)
    tensor = values(rank, 300_000)
    whole = tensor.clone()
    dist.all_reduce(whole)
    for numel in (1000, 65_536, 262_145):
        parts = tensor.clone()
        works = [dist.all_reduce(part, async_op=True) for part in parts.split(numel)]
        for work in works:
            work.wait()
        assert torch.equal(parts, whole), numel
    paceline.shutdown()


def test_a_sum_is_bitwise_equal_for_any_cut(tmp_path):
    spawn(cuts, 4, str(tmp_path), env=as_hosts((0, 0, 1, 1)))


def until_lost(rank, size, path, victim, how, timeout):
    """Reduce until a rank is lost, and write the error to a file."""
    group = enter(path, timeout)
    tensor = torch.ones(60_000)
    step = 0
    try:
        while True:
            step += 1
            group.note_step(step)
            if rank == victim and step == 20:
                os.kill(os.getpid(), how)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    except (PeerLost, CollectiveTimeout) as error:
        with open(f"{path}/error-{rank}", "w") as file:
            file.write(f"{type(error).__name__} {error.rank} {error.exit_code} {error}")
    os._exit(0)


@pytest.mark.sweep
@pytest.mark.parametrize("victim", range(4))
def test_a_rank_that_is_killed_is_named_on_every_host(tmp_path, victim):
    with pytest.raises(Exception, match=f"rank {victim}: died of SIGKILL"):
        spawn(until_lost, 4, str(tmp_path), victim, signal.SIGKILL, 60.0, env=as_hosts((0, 0, 1, 1)))
    for rank in set(range(4)) - {victim}:
        kind, named, code, text = (tmp_path / f"error-{rank}").read_text().split(" ", 3)
        assert (kind, int(named), int(code)) == ("PeerLost", victim, -signal.SIGKILL), text
        assert "in step 20" in text


def along_tree(every):
    """Sum four ranks' values along the tree."""
    return (every[0] + every[1]) + (every[2] + every[3])


def overlapping(rank, size, path):
    """Make calls while the ones before are pending, each rank at its own pace, some of them from callbacks."""
    enter(path)
    kinds, pace = random.Random(0), random.Random(rank)
    pending = []
    for number in range(60):
        numel = kinds.choice((3, 70_001, 600_000, 1_500_000))
        every = [values(each + 10 * number, numel) for each in range(size)]
        total = along_tree(every)
        kind = kinds.choice(("sum", "sum", "mean", "scatter", "gather", "copy", "barrier", "callback"))
        mine = every[rank].clone()
        if kind in ("sum", "callback"):
            work, expected = dist.all_reduce(mine, async_op=True), total
        elif kind == "mean":
            work, expected = dist.all_reduce(mine, op=dist.ReduceOp.AVG, async_op=True), total / size
        elif kind == "scatter":
            work = dist.reduce_scatter(out := torch.empty(numel), [mine] * size, async_op=True)
            mine, expected = out, total
        elif kind == "gather":
            out = torch.empty(size * numel)
            work = dist.all_gather_into_tensor(out, mine, async_op=True)
            mine, expected = out, torch.cat(every)
        elif kind == "copy":
            work, expected = dist.broadcast(mine, 2, async_op=True), every[2]
        else:
            work, expected = dist.barrier(async_op=True), mine
        if kind == "callback":
            again = every[rank].clone()
            done = work.get_future().then(lambda _, again=again: dist.all_reduce(again))
            pending.append((number, done.wait, again, total))
        pending.append((number, work.wait, mine, expected))
        if pace.random() < 0.3:
            time.sleep(0.02 * pace.random())
        while len(pending) > 8 * pace.random():
            check(*pending.pop(0))
    for each in pending:
        check(*each)
    paceline.shutdown()


def check(number, wait, tensor, expected):
    wait()
    assert torch.equal(tensor, expected), number


def test_calls_that_overlap_stay_in_order(tmp_path):
    spawn(overlapping, 4, str(tmp_path), env=as_hosts((0, 1, 2, 3)))


def calls_of_callbacks(rank, size, path):
    """Add a callback that makes a call: on even ranks once the call before is done, elsewhere while it is pending."""
    enter(path)
    for number in range(20):
        first = torch.full((70_001,), float(rank))
        work = dist.all_reduce(first, async_op=True)
        if rank % 2 == 0:
            work.wait()
        of_callback, behind = first.new_full((3,), rank + 1.0), first.new_full((600_000,), rank + 2.0)
        done = work.get_future().then(lambda _, tensor=of_callback: dist.all_reduce(tensor))
        last = dist.all_reduce(behind, async_op=True)
        done.wait()
        last.wait()
        for offset, tensor in enumerate((first, of_callback, behind)):
            assert (tensor == size * (size - 1) / 2 + offset * size).all(), (number, offset)
    paceline.shutdown()


def test_a_call_of_a_callback_precedes_the_next_call_on_every_host(tmp_path):
    spawn(calls_of_callbacks, 4, str(tmp_path), env=as_hosts((0, 1, 2, 3)))


def until_host_lost(rank, size, path, victim):
    """Keep calls pending until a host is lost, and write the error to a file."""
    enter(path)
    tensors = [torch.ones(1_500_000) for _ in range(4)]
    works = []
    try:
        for step in itertools.count():
            works.append(dist.all_reduce(tensors[step % 4], op=dist.ReduceOp.MAX, async_op=True))
            if rank == victim and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            while len(works) > 3:
                works.pop(0).wait()
    except PeerLost as error:
        with open(f"{path}/error-{rank}", "w") as file:
            file.write(f"{error.rank} {error}")
    os._exit(0)


def test_a_host_of_one_rank_that_dies_amid_overlapping_calls_is_named(tmp_path):
    with pytest.raises(Exception, match="rank 1: died of SIGKILL"):
        spawn(until_host_lost, 3, str(tmp_path), 1, env=as_hosts((0, 1, 2)))
    for rank in (0, 2):
        named, text = (tmp_path / f"error-{rank}").read_text().split(" ", 1)
        assert int(named) == 1, text
