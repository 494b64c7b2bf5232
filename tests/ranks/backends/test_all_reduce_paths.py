"""All-reduce by each path (eager, staged, direct), compiled and in Python: the bits of the summation tree."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paceline._core import native
from paceline._core.summation_tree import split_point
from paceline.backends.shm.control_block import EAGER_NBYTES, STAGING_NBYTES

SIZES = [0, 1, 63, 64, 65, 1000, EAGER_NBYTES // 4, EAGER_NBYTES // 4 + 1, 100_003, STAGING_NBYTES, 700_001]
DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16]
LAYOUTS = ["ordinary", "arena", "one in the arena"]
CODES = {"compiled": lambda rank: 1, "python": lambda rank: 0, "mixed": lambda rank: rank % 2}

pytestmark = pytest.mark.skipif(
    bool(native.why_not_native()), reason=f"no compiled part here: {native.why_not_native()}"
)


def given(rank, numel, dtype):
    drawn = np.random.default_rng([rank, numel]).standard_normal(numel) * 10.0 ** (rank % 5 - 2)
    return torch.from_numpy(drawn * (1e9 if not dtype.is_floating_point else 1)).to(dtype)


def tree_sum(parts):
    if len(parts) == 1:
        return parts[0]
    middle = split_point(range(len(parts)))
    return tree_sum(parts[:middle]) + tree_sum(parts[middle:])


def expected(size, numel, dtype, op):
    parts = [given(rank, numel, dtype) for rank in range(size)]
    if dtype == torch.bfloat16 and size > 2:  # added in float32, rounded once
        parts = [part.float() for part in parts]
    total = tree_sum(parts)
    return (total / size if op == "AVG" else total).to(dtype)


def every_path(rank, size, code, layout):
    os.environ["PACELINE_NATIVE"] = str(CODES[code](rank))
    group = dist.new_group(backend="paceline")
    assert (group._collectives._compiled is not None) == bool(CODES[code](rank))
    checked = 0
    for numel in SIZES:
        for dtype in DTYPES:
            for op in ("SUM", "AVG") if dtype.is_floating_point else ("SUM",):
                in_arena = layout == "arena" or (layout != "ordinary" and rank == 0)
                memory = (
                    group.allocate_tensor(numel, dtype=dtype) if in_arena else torch.empty(numel, dtype=dtype)
                )
                want = expected(size, numel, dtype, op)
                for asynchronous in (False, True):
                    memory.copy_(given(rank, numel, dtype))
                    work = dist.all_reduce(
                        memory, getattr(dist.ReduceOp, op), group=group, async_op=asynchronous
                    )
                    if work is not None:
                        work.wait()
                    assert torch.equal(memory.view(torch.uint8), want.view(torch.uint8)), (numel, dtype, op)
                    checked += 1
    dist.destroy_process_group(group)
    return checked


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_path_gives_the_bits_of_the_tree(pool, size, code, layout):
    assert min(pool(size).run(every_path, code, layout, timeout=200)) == len(SIZES) * 8 * 2


def means_and_sums(rank, size, code, numel, in_arena):
    os.environ["PACELINE_NATIVE"] = str(CODES[code](rank))
    group = dist.new_group(backend="paceline")
    memory = group.allocate_tensor(numel) if in_arena else torch.empty(numel)
    memory.copy_(given(rank, numel, torch.float32))
    dist.all_reduce(memory, dist.ReduceOp.AVG if rank == 0 else dist.ReduceOp.SUM, group=group)
    dist.destroy_process_group(group)
    return torch.equal(memory, expected(size, numel, torch.float32, "AVG" if rank == 0 else "SUM"))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("numel", [1000, 300_000])
def test_a_rank_that_wants_the_mean_divides_the_others_sum(pool, code, in_arena, numel):
    assert pool(3).run(means_and_sums, code, numel, in_arena, timeout=60) == [True] * 3


def repeated(rank, size):
    """Make calls of the general path between those that were prepared."""
    group, found = dist.new_group(backend="paceline"), []
    tensor, other = torch.ones(1000), torch.ones(1000)
    for number in range(5):
        tensor.fill_(rank + number)
        dist.all_reduce(tensor, group=group)
        found.append(tensor[0].item())
        pending = dist.all_reduce(other.fill_(1), group=group, async_op=True)
        dist.all_reduce(tensor.fill_(2), group=group)  # waits for its turn behind the pending one
        assert other.eq(size).all(), "the calls of a group run in order"
        pending.wait()
        dist.all_reduce(tensor.view(10, 100).t().fill_(1), group=group)  # strided
        found.append(tensor[999].item())
    assert (group.calls, group.payload_nbytes) == (20, 20 * 4000)
    work = group.allreduce([tensor.fill_(3)])
    assert work.get_future().wait()[0].eq(3 * size).all()
    dist.destroy_process_group(group)
    return found


def test_prepared_calls_keep_their_place_among_others(pool):
    wanted = [value for number in range(5) for value in (1.0 + 2 * number, 2.0)]
    assert pool(2).run(repeated, timeout=60) == [wanted] * 2


def recorded(rank, size):
    group, tensor = dist.new_group(backend="paceline"), torch.ones(10)
    dist.all_reduce(tensor, group=group)
    with torch.profiler.profile() as profile:
        dist.all_reduce(tensor, group=group)
        dist.barrier(group=group)
    dist.destroy_process_group(group)
    return sorted({event.name for event in profile.events() if event.name.startswith("paceline:")})


def test_a_profiler_sees_calls_that_were_prepared_before(pool):
    assert pool(2).run(recorded, timeout=60) == [["paceline:all_reduce", "paceline:barrier"]] * 2
