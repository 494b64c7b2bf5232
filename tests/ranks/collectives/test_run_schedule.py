"""Schedules on real ranks: results equal those of torch's own collectives, and receipts report what was delivered."""

from __future__ import annotations

import importlib
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.collectives.algorithms import ALGORITHMS, make_schedule
from paceline.collectives.run_schedule import run_schedule
from paceline.collectives.schedule import Schedule, Send, pipelined
from paceline.collectives.schedule_send_recv import StreamingExecutor
from paceline.errors import CollectiveError, MismatchError, UsageError
from rank_pool import RankError

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16]


def values(numel, dtype, seed):
    """Return whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 15, (numel,), generator=generator).to(dtype)


def by_torch(op, tensor, rank, size, root):
    """Return the result of torch's own collective; None: undefined on this rank."""
    whole = tensor.clone()
    if op == "broadcast":
        dist.broadcast(whole, root)
    elif op == "reduce":
        dist.all_reduce(whole)  # gloo's reduce leaves others' tensors undefined, but so do ours
    elif op in ("all-reduce", "reduce-scatter"):
        dist.all_reduce(whole)
    share = slice(tensor.numel() * rank // size, tensor.numel() * (rank + 1) // size)
    if op == "reduce-scatter":
        return whole[share]
    if op in ("all-gather", "gather"):
        parts = [torch.empty_like(whole[share]) for _ in range(size)]
        dist.all_gather(parts, whole[share].clone())
        return torch.cat(parts) if op == "all-gather" or rank == root else None
    if op == "scatter":
        parts = list(whole.chunk(size)) if rank == root else None
        mine = torch.empty_like(whole[share])
        dist.scatter(mine, parts, root)
        return mine
    if op == "all-to-all":
        out = torch.empty_like(whole)
        dist.all_to_all_single(out, whole)
        return out
    if op == "send-recv":
        every_rank = [torch.empty_like(whole) for _ in range(size)]
        dist.all_gather(every_rank, whole)
        return every_rank[(rank - 1) % size]
    return whole if op != "reduce" or rank == root else None


def compare(rank, size, seed, rounds):
    """Random operations, algorithms, sizes, dtypes, roots and segments."""
    draw = random.Random(seed)
    for number in range(rounds):
        op = draw.choice(list(ALGORITHMS))
        name = draw.choice(list(ALGORITHMS[op]))
        root = draw.randrange(size) if op in ("broadcast", "reduce", "scatter", "gather") else 0
        dtype = draw.choice(DTYPES)
        share = draw.choice([0, 1, 2, 7, 100, 3001])
        ragged = op in ("broadcast", "reduce", "all-reduce", "send-recv")
        numel = size * share + (draw.randrange(size) if ragged else 0)
        schedule = pipelined(make_schedule(op, name, size, root=root), draw.choice([1, 1, 2, 3]))
        tensor = values(numel, dtype, 1000 * number + rank)
        expected = by_torch(op, tensor, rank, size, root)
        output = torch.full_like(tensor, 99) if op in ("all-to-all", "send-recv") else None
        outcome = run_schedule(
            schedule,
            tensor,
            output,
            segment_nbytes=draw.choice([64, 1000, 1 << 20]),
            lockstep=draw.choice([True, False, False]),
            orderly=draw.choice([True, False]),
            receipts=draw.random() < 0.3,
        )
        if expected is not None:
            assert torch.equal(outcome.result, expected), (schedule, numel, dtype)
    return rounds


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "rounds"), [(1, 40), (2, 40), (3, 40), (4, 40), (5, 40), (6, 30), (7, 20), (8, 15)]
)
def test_results_equal_those_of_torch(pool, size, rounds):
    assert pool(size).run(compare, size, rounds, timeout=120) == [rounds] * size


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_equal_those_of_torch_over_shared_memory(pool, size):
    assert pool(size, "paceline").run(compare, 100 + size, 40, timeout=120) == [40] * size


def every_algorithm(rank, size, numel):
    for op in ALGORITHMS:
        for name in ALGORITHMS[op]:
            tensor = values(numel, torch.float32, rank)
            expected = by_torch(op, tensor, rank, size, 0)
            output = torch.empty_like(tensor) if op in ("all-to-all", "send-recv") else None
            result = run_schedule(make_schedule(op, name, size), tensor, output, segment_nbytes=4096).result
            assert expected is None or torch.equal(result, expected), (op, name)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [3, 4, 7])
def test_every_algorithm_in_pieces(pool, size):
    pool(size).run(every_algorithm, size * 12_345)


def sums_of_floats(rank, size):
    tensor = torch.randn(10_001, generator=torch.Generator().manual_seed(rank))
    expected = tensor.double()
    dist.all_reduce(expected)
    results = []
    for name in ALGORITHMS["all-reduce"]:
        mine = run_schedule(
            make_schedule("all-reduce", name, size), tensor.clone(), segment_nbytes=1000
        ).result
        torch.testing.assert_close(mine, expected.float(), rtol=1e-5, atol=1e-5)
        again = run_schedule(
            make_schedule("all-reduce", name, size), tensor.clone(), segment_nbytes=1 << 20
        ).result
        assert torch.equal(mine, again), "the order of additions does not depend on pieces"
        results.append(mine)
    return results


def test_sums_of_floats_are_the_same_bits_on_all_ranks(pool):
    first, *others = pool(5).run(sums_of_floats)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def in_a_subgroup(rank, size):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        tensor = torch.full((1000,), float(rank))
        receipts = run_schedule(
            make_schedule("all-reduce", "ring", 2), tensor, group=group, receipts=True
        ).receipts
        return tensor.unique().tolist(), None if receipts is None else [one.rank for one in receipts]
    return None


def test_runs_in_a_subgroup(pool):
    assert pool(4).run(in_a_subgroup) == [None, ([4.0], [0, 1]), None, ([4.0], None)]


def with_receipts(rank, size, op, name):
    tensor = torch.arange(8_000 - 8_000 % size, dtype=torch.float32) + rank
    output = torch.empty_like(tensor) if op in ("all-to-all", "send-recv") else None
    return run_schedule(
        make_schedule(op, name, size), tensor, output, segment_nbytes=4096, receipts=True
    ).receipts


def test_receipts_list_what_every_rank_received(pool):
    receipts, *others = pool(4).run(with_receipts, "broadcast", "tree")
    assert others == [None] * 3
    assert [one.rank for one in receipts] == [0, 1, 2, 3]
    assert [one.nbytes for one in receipts] == [0, 32_000, 32_000, 32_000]
    assert [one.messages for one in receipts] == [0, 1, 1, 1]
    assert len({one.checksum for one in receipts}) == 1
    assert receipts[0].last_arrival == 0 < min(one.last_arrival for one in receipts[1:])
    assert all(one.last_arrival <= one.seconds for one in receipts)


@pytest.mark.parametrize(("op", "name"), [(op, next(iter(ALGORITHMS[op]))) for op in ALGORITHMS])
def test_every_operation_gives_receipts(pool, op, name):
    receipts = pool(3).run(with_receipts, op, name)[0]
    assert len(receipts) == 3


class DamagedReceive(StreamingExecutor):
    """Flips a bit of a message to rank 2 in round 1."""

    def _record(self, records, transfer, offset, piece):
        if records is self.log.received and self.rank == 2 and transfer.number == 1:
            piece.view(torch.uint8)[3] ^= 1
        super()._record(records, transfer, offset, piece)


class LostSend(StreamingExecutor):
    """Omits the sends of rank 1 in round 0."""

    def _post_sends(self, transfer, regions):
        if not (self.rank == 1 and transfer.number == 0):
            super()._post_sends(transfer, regions)


class ErrorWithoutText(StreamingExecutor):
    """Raises an error without a text on rank 0."""

    def run(self):
        super().run()
        if self.rank == 0:
            raise MemoryError


def run_with_fault(rank, size, executor, name, seconds):
    module = importlib.import_module("paceline.collectives.run_schedule")
    module.StreamingExecutor, original = executor, module.StreamingExecutor
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    dist.barrier(group)  # connected, so that the time-out is that of a message
    tensor = torch.arange(400, dtype=torch.float32) + rank
    try:
        run_schedule(make_schedule("all-reduce", name, size), tensor, group=group, receipts=True, timeout=30)
    except CollectiveError as error:
        return str(error)
    except RuntimeError:
        return "timed out"
    finally:
        module.StreamingExecutor = original
    return "ok"


def test_an_error_without_a_text_is_reported_by_its_name(pool):
    root, *_ = pool(2).run(run_with_fault, ErrorWithoutText, "ring", 60)
    assert "rank 0 failed: MemoryError" in root


def test_a_damaged_message_is_named(pool):
    root, *others = pool(4).run(run_with_fault, DamagedReceive, "ring", 60)
    assert "message 1→2 of round 2, chunk 3 was sent as 400 bytes with checksum" in root
    assert others == ["ok"] * 3


@pytest.mark.thorough
def test_a_missing_message_is_named(pool):
    root, *_ = pool(3).run(run_with_fault, LostSend, "tree", 5)
    assert "message 1→0 of round 1, chunk 0 never arrived: it was not sent" in root.splitlines()[1]
    assert "rank 0 failed: RuntimeError" in root


def sizes_differ(rank, size):
    run_schedule(make_schedule("all-reduce", "ring", size), torch.ones(100 + (rank == 1)))


def schedules_differ(rank, size):
    run_schedule(make_schedule("all-reduce", "ring" if rank else "tree", size), torch.ones(100))


def pieces_differ(rank, size):
    run_schedule(make_schedule("all-reduce", "ring", size), torch.ones(100), segment_nbytes=64 + 64 * rank)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (sizes_differ, "tensors of different sizes"),
        (schedules_differ, "different schedules"),
        (pieces_differ, "different schedules, dtypes or settings"),
    ],
)
def test_ranks_that_disagree_raise(pool, case, message):
    with pytest.raises(RankError) as caught:
        pool(2).run(case)
    assert isinstance(caught.value.__cause__, MismatchError)
    assert all(message in text for text in caught.value.failures.values())


def refused(rank, size, kind):
    tensor = torch.ones(10)
    calls = {
        "size": lambda: run_schedule(make_schedule("all-reduce", "ring", size + 1), tensor),
        "wrong": lambda: run_schedule(Schedule("all-reduce", "mine", size, 1, ((Send(0, 1, 0),),)), tensor),
        "output": lambda: run_schedule(make_schedule("all-to-all", "direct", size), tensor),
        "no output": lambda: run_schedule(make_schedule("all-reduce", "ring", size), tensor, torch.ones(10)),
        "parts": lambda: run_schedule(
            make_schedule("all-to-all", "direct", size), torch.ones(9), torch.ones(9)
        ),
        "stride": lambda: run_schedule(make_schedule("all-reduce", "ring", size), torch.ones(5, 4).t()),
        "bool": lambda: run_schedule(make_schedule("all-reduce", "ring", size), tensor > 0),
        "segment": lambda: run_schedule(make_schedule("all-reduce", "ring", size), tensor, segment_nbytes=0),
    }
    with pytest.raises(UsageError) as caught:
        calls[kind]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("size", "all-reduce by ring on 3 ranks, but the group has 2"),
        ("wrong", "all-reduce by mine on 2 ranks is wrong"),
        ("output", "pass output=torch.empty_like(tensor)"),
        ("no output", "works in place"),
        ("parts", "all-to-all of 9 elements on 2 ranks"),
        ("stride", "not contiguous"),
        ("bool", "bool tensors can't be summed"),
        ("segment", "segment_nbytes=0"),
    ],
)
def test_invalid_input_is_refused_before_anything_is_sent(pool, kind, message):
    assert all(message in text for text in pool(2).run(refused, kind))


def test_without_a_group_there_is_one_rank():
    tensor = torch.ones(5)
    outcome = run_schedule(make_schedule("all-reduce", "ring", 1), tensor, receipts=True)
    assert outcome.result.tolist() == [1.0] * 5
    assert outcome.receipts is not None
    with pytest.raises(UsageError, match="no process group"):
        run_schedule(make_schedule("all-reduce", "ring", 2), tensor)
