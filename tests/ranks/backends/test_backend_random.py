"""A thousand random collectives: equal to the bit to a plain loop, and close to gloo."""

from __future__ import annotations

import os
import random
import time
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import random_calls as calls
from paceline.backends.op_arguments import as_bytes

CALLS = {2: 340, 3: 340, 4: 340}
SUBGROUPS = {2: [], 3: [[0, 2], [1, 2]], 4: [[0, 3], [1, 3], [0, 1, 2], [1]]}


def same(left, right):
    """Return whether two tensors are equal to the bit."""
    left, right = (as_bytes(each.contiguous()) for each in (left, right))
    return torch.equal(left, right)


def near(left, right):
    """Return whether two tensors agree as far as another order of additions allows."""
    if left.dtype == torch.bool:
        left, right = (as_bytes(each.contiguous()) != 0 for each in (left, right))  # gloo's True + True is 2
    if not (left.is_floating_point() or left.is_complex()):
        return same(left, right)
    left, right = left.reshape(-1), right.reshape(-1)
    exact = torch.complex128 if left.is_complex() else torch.float64
    loose = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(left.dtype, 1e-4)
    return torch.allclose(left.to(exact), right.to(exact), rtol=loose, atol=loose * 30)


def check(call, rank, tensors, agrees=same):
    wanted = calls.expected(call, rank)
    assert len(wanted) == len(tensors.taken)
    for piece, (want, got) in enumerate(zip(wanted, tensors.taken, strict=True)):
        if not agrees(want, got):
            wrong = (want.reshape(-1) != got.reshape(-1)).nonzero()[:3].flatten().tolist()
            raise AssertionError(f"rank {rank}, piece {piece}, elements {wrong}: {call}")
    if call.op not in calls.IN_PLACE and not call.overlap[rank]:
        for piece, (want, got) in enumerate(zip(calls.given(call, rank), tensors.given, strict=True)):
            assert same(want, got), f"rank {rank}: given piece {piece} was changed by {call}"


def compare_with_gloo(call, rank, ours, gloo):
    """Make the call on gloo, and return whether gloo supports it."""
    if call.op == "all_to_all":  # of unequal pieces gloo takes one tensor alone
        call = replace(call, op="all_to_all_single")
    theirs = calls.prepare(call, rank, None, plain=True)
    try:
        calls.make(call, theirs, rank, gloo, asynchronous=False)
    except (RuntimeError, ValueError, TypeError):
        return False
    if call.op == "reduce" and rank != call.root:
        return True  # gloo leaves anything there
    for ours_, theirs_ in zip(ours.taken, theirs.taken, strict=True):
        assert near(ours_, theirs_), f"rank {rank}: gloo gives another result for {call}"
    return True


COMPILED = {  # which ranks have compiled code
    "compiled": lambda rank: True,
    "python": lambda rank: False,
    "mixed": lambda rank: rank % 2 == 0,
}


def stream(rank, size, seed, count, backend="paceline", agrees=same, code="compiled"):
    """Make random calls on random groups, some of them in a row without waiting."""
    os.environ["PACELINE_NATIVE"] = str(int(COMPILED[code](rank)))
    warnings.simplefilter("ignore", FutureWarning)  # torch renames calls
    members = [list(range(size)), *SUBGROUPS[size]]
    ours = [dist.new_group(ranks, backend=backend) for ranks in members]
    gloos = [dist.new_group(ranks, backend="gloo") for ranks in members]
    rng, number, on_gloo, began = random.Random(seed), 0, 0, time.monotonic()
    while number < count:
        drawn = []
        for _ in range(rng.randint(1, 5)):
            group = rng.randrange(len(members)) if rng.random() < 0.3 else 0
            drawn.append(calls.draw(rng, number + seed * 10_000, len(members[group]), group))
            number += 1
        order = rng.sample(range(len(drawn)), len(drawn))
        pending = []
        for call in drawn:
            if rank in members[call.group]:
                mine, group = members[call.group].index(rank), ours[call.group]
                tensors = calls.prepare(
                    call, mine, lambda n, dtype, g=group: g.allocate_tensor(n, dtype=dtype)
                )
                pending.append((call, mine, tensors, calls.make(call, tensors, mine, group)))
            else:
                pending.append(None)
        for each in order:
            if pending[each] is not None and pending[each][3] is not None:
                pending[each][3].wait()
        for call, mine, tensors, _ in filter(None, pending):
            check(call, mine, tensors, agrees)
            on_gloo += compare_with_gloo(call, mine, tensors, gloos[call.group])
    for group in (*ours, *gloos):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return number, on_gloo, time.monotonic() - began


@pytest.mark.thorough
@pytest.mark.parametrize("code", COMPILED)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_collectives_equal_a_plain_loop_and_gloo(pool, size, code):
    arguments = (20 + size, CALLS[size], "paceline", same, code)
    for made, on_gloo, _ in pool(size).run(stream, *arguments, timeout=200):
        assert made >= CALLS[size]
        assert on_gloo > made / 4


# Messages from rank to rank.


def draw_messages(rng, size, number):
    """Return (source, target, tag, dtype, elements) of some messages.

    Tags 0 and 7 are reused between two ranks, in this round and the next; all others are used once.
    """
    found = []
    for _ in range(rng.randint(1, 14)):
        source, target = rng.sample(range(size), 2)
        dtype = rng.choice(calls.COPIED_DTYPES)
        numel = rng.choice([0, 1, 3, 1000, 20_000, (256 << 10) // dtype.itemsize, 300_001])
        found.append((source, target, rng.choice([0, 7, 100 * (number + 1) + len(found)]), dtype, numel))
    return found


def content(number, which, dtype, numel):
    call = calls.Call(number, 1, "broadcast", dtype, "", ((numel,),), 0, ("",), ("",), ("",), False)
    return calls.values(call, 0, which, numel)


def messages(rank, size, seed, rounds, backend="paceline"):
    """Post sends and receives in this rank's own order, with collectives in between, and wait in another."""
    group = dist.new_group(backend=backend)
    common, mine = random.Random(seed), random.Random(seed * 100 + rank)
    moved = 0
    for number in range(rounds):
        drawn = list(enumerate(draw_messages(common, size, number)))
        order = [each for each in drawn if rank in each[1][:2]]
        mine.shuffle(order)
        order.sort(key=lambda each: each[0] if each[1][2] in (0, 7) else mine.random() * len(drawn))
        works = []
        if number % 3 == 0:
            total = group.allocate_tensor(100_000).fill_(rank)
            works.append((dist.all_reduce(total, group=group, async_op=True), None, None, None))
        for which, (source, target, tag, dtype, numel) in order:
            given = content(seed + number, which, dtype, numel)
            if rank == source:
                tensor = calls.lay(given, "plain", torch.empty(numel, dtype=dtype))
                works.append((dist.isend(tensor, target, group, tag=tag), None, None, None))
            else:
                # The next round's may have arrived already.
                any_source = tag not in (0, 7) and mine.random() < 0.5
                layout = mine.choice(calls.LAYOUTS)
                memory = torch.empty(numel * 2 if layout == "strided" else numel, dtype=dtype)
                tensor = calls.lay(None, layout, memory, numel)
                work = dist.irecv(tensor, None if any_source else source, group, tag=tag)
                works.append((work, tensor, given, source))
        for work, got, want, source in mine.sample(works, len(works)):
            work.wait()
            if want is not None:
                assert same(want, got), f"round {number} of seed {seed}, rank {rank}, from rank {source}"
                assert work._source_rank() == source
                moved += 1
    dist.destroy_process_group(group)
    return moved


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_messages_arrive_intact_under_their_tags(pool, size):
    assert sum(pool(size).run(messages, 50 + size, 40, timeout=100)) > 100
