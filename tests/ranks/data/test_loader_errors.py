"""Errors of the loader on several ranks: raised on all of them, with the rank and the batch."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from contextlib import suppress
from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset

import paceline
from paceline.errors import DataError, MismatchError, PeerLost, SyncError, UsageError
from paceline.world.control_collectives import gather_rows, gather_rows_async, sum_over_ranks


class Broken(Dataset):
    """Its sample 22 can't be loaded, in some way, once it may."""

    def __init__(self, way):
        self.way, self.may = way, multiprocessing.Event()

    def __len__(self):
        return 40

    def __getitem__(self, number):
        if number == 22 and self.way == "raise":
            raise ValueError("no such file: cat.png")
        if number == 22 and self.way == "exit":
            self.may.wait(60)
            os._exit(7)
        return number


# ------------------------------------------------------------------ ranks that mean different things


def mismatched(rank, size, cases):
    """Return the error of each case: (arguments, arguments on rank 1)."""
    messages = []
    for common, special in cases:
        options = {"dataset": list(range(20)), "batch_size": 4, **common, **(special if rank == 1 else {})}
        loader = paceline.Loader(**options)
        with pytest.raises(MismatchError) as caught:
            iter(loader)
        assert caught.value.rank == 1
        messages.append(str(caught.value))
    return messages


MISMATCHES = [
    ({}, {"dataset": list(range(23))}, "rank 0 has 20 samples; rank 1 has 23 samples"),
    ({}, {"seed": 5}, "rank 0 has seed=0, shuffle='samples'; rank 1 has seed=5"),
    ({}, {"shuffle": False}, "shuffle='samples'; rank 1 has seed=0, shuffle='none'"),
    ({"shuffle": "blocks", "block": 2}, {"block": 4}, "block=2.*rank 1 has .*block=4"),
    ({}, {"batch_size": 5}, "rank 0 has batch_size=4, uneven='join'; rank 1 has batch_size=5"),
    ({}, {"uneven": "pad"}, "uneven='join'; rank 1 has batch_size=4, uneven='pad'"),
    ({}, {"dispatch": "random"}, "dispatch='round_robin'.*rank 1 has dispatch='random'"),
    ({}, {"shares": [0.5, 0.2, 0.3]}, "shares 0.3333 0.3333 0.3333; rank 1 has .*shares 0.5 0.2 0.3"),
    ({"shares": "measured"}, {"redeal_every": 3}, "redeal_every=None.*rank 1 has .*redeal_every=3"),
]


def test_differences_between_ranks_are_named_on_all_of_them(pool):
    results = pool(3).run(mismatched, [case[:2] for case in MISMATCHES])
    for (_, _, message), messages in zip(MISMATCHES, zip(*results, strict=True), strict=True):
        assert len(set(messages)) == 1, "the same on all ranks"
        assert re.search(f"the loader differs between ranks: .*{message}", messages[0])


def on_one_rank(rank, size):
    """Position, epoch and dataset differ."""
    messages = []
    place = paceline.Loader(list(range(20)), 2)
    next(iter(place))
    grown = list(range(20))
    for change in ("load", "epoch", "grow", "length"):
        loader = paceline.Loader(grown if change == "grow" else list(range(20)), 2)
        if rank == 1 and change == "load":
            loader.load_state_dict(place.state_dict())
        if rank == 1 and change == "epoch":
            loader.set_epoch(4)
        if rank == 1 and change == "grow":
            grown.append(20)
        if change == "length":
            loader.set_epoch(2)
            loader.load_state_dict({**place.state_dict(), "step": 1 + (rank == 1)})
        with pytest.raises(MismatchError) as caught:
            iter(loader)
        messages.append(str(caught.value))
    return messages


def test_a_different_position_epoch_or_length_on_one_rank_is_named(pool):
    for load, epoch, grow, step in pool(2).run(on_one_rank):
        assert "rank 0 has epoch 0, step 0; rank 1 has epoch 0, step 1" in load
        assert "rank 0 has epoch 0, step 0; rank 1 has epoch 4, step 0" in epoch
        assert "rank 0 has 20 samples; rank 1 has 21 samples" in grow
        assert "rank 0 has epoch 0, step 1; rank 1 has epoch 0, step 2" in step
        assert "the same state" in load


def map_and_stream(rank, size):
    """A rank has an iterable dataset, the others have not."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(10))

    with pytest.raises(
        MismatchError, match=r"the loader differs between ranks: rank 0 has 10 samples; rank 1 has Stream"
    ):
        iter(paceline.Loader(Stream() if rank else list(range(10)), 2))


def test_one_rank_with_another_kind_of_dataset_is_named(pool):
    pool(2).run(map_and_stream)


# ------------------------------------------------------------------ arguments


def refused(rank, size):
    """Return the errors of invalid loaders, on three ranks."""
    messages = []
    for options in (
        {"shares": [0.5, 0.5]},
        {"shares": [0.5, 0.5, 0.5]},
        {"shares": [0.5, 0.7, -0.2]},
        {"block": 11},
        {"dataset": []},
        {"uneven": "pad", "dataset": [1, 2]},
        {"uneven": "drop", "batch_size": 4},
        {"uneven": "error", "batch_size": 1},
        {"uneven": "joint"},
    ):
        with pytest.raises(UsageError) as caught:
            paceline.Loader(**{"dataset": list(range(10)), "batch_size": 2, **options})
        messages.append(str(caught.value))
    return messages


def test_invalid_settings_are_refused_alike_on_all_ranks(pool):
    first, *others = pool(3).run(refused)
    assert all(other == first for other in others)
    for results, message in zip(
        first,
        (
            "2 shares (0.5, 0.5) for 3 ranks",
            "shares 0.5, 0.5, 0.5 sum to 1.5, not 1",
            "share -0.2 of rank 2",
            "a block of 11 samples is larger than the data (10 samples)",
            "the dataset is empty",
            "rank 2 has no samples, so it has none to repeat",
            "no step can be made: rank 1 has 3 samples, batches have 4",
            "ranks have unequal numbers of batches: 4, 3, 3 of up to 1",
            "unknown policy for uneven data 'joint'",
        ),
        strict=True,
    ):
        assert message in results
        assert "\n  → " in results, "there is a remedy"


# ------------------------------------------------------------------ worlds


def made_too_early(rank, size, place):
    loader = paceline.Loader(list(range(10)), 2)
    early = list(loader)
    paceline.init("gloo", init_method=f"file://{place}", rank=rank, size=size)
    with pytest.raises(UsageError, match=rf"made for rank 0 of 1; this process is now rank {rank} of 2"):
        iter(loader)
    served = sum(batch.samples for batch in paceline.Loader(list(range(10)), 2))
    paceline.shutdown()
    return len(early), served


def test_a_loader_made_before_init_is_refused(pool, tmp_path):
    assert pool(2).run(made_too_early, str(tmp_path / "meet"), world=False) == [(5, 5), (5, 5)]


# ------------------------------------------------------------------ data that can't be loaded


def leaves_when_it_fails(rank, size, place, way, workers):
    """Train; a rank with an error leaves, and the others raise."""
    paceline.init("paceline", init_method=f"file://{place}", rank=rank, size=size, timeout=30.0)
    model = paceline.DataParallel(torch.nn.Linear(1, 1))
    dataset = Broken(way if rank == 1 else "")
    loader = paceline.Loader(dataset, 3, shuffle=False, num_workers=workers)
    steps = 0
    try:
        for batch in loader:
            model.backward(model(batch[:, None].float()).mean(), samples=batch.samples)
            model.zero_grad()
            steps += 1
            if steps == 2:
                dataset.may.set()
    except (DataError, PeerLost, SyncError) as error:
        paceline.shutdown()
        return type(error), str(error), steps
    return None, "", steps


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "workers"), [("raise", 0), ("raise", 2), ("exit", 2)])
def test_a_sample_that_one_rank_cannot_load_ends_all(pool, tmp_path, way, workers):
    place = str(tmp_path / "meet")
    first, broken, third = pool(3, "paceline").run(leaves_when_it_fails, place, way, workers, world=False)
    messages = {
        "raise": r"batch 2 of epoch 0 can't be loaded: .*no such file: cat.png \(samples 19, 22, 25\)"
    }
    assert broken[0] is DataError
    assert re.search(rf"\[rank 1\] {messages.get(way, 'a worker ended while batch 2 of epoch 0')}", broken[1])
    for kind, message, steps in (first, third):
        assert issubclass(kind, PeerLost | SyncError)
        assert "rank 1" in message
        assert steps == 2


# ------------------------------------------------------------------ processes that are forked


def held(rank, size):
    """Return whether a work holds each tensor that was exchanged: at once, and some exchanges later."""
    rows = gather_rows(torch.tensor([rank]))
    ahead = gather_rows_async(torch.tensor([rank]))
    total = sum_over_ranks(torch.tensor([rank]))
    tensors = [*rows, *ahead.wait(), total]
    del ahead
    time.sleep(0.2)  # by now gloo's threads have let go of their works
    held = [tensor._use_count() > 1 for tensor in tensors]
    for _ in range(40):
        gather_rows(torch.tensor([rank]))
    time.sleep(0.2)
    return held, [tensor._use_count() > 1 for tensor in tensors]


def test_exchanged_tensors_are_held_until_no_gloo_thread_needs_them(pool):
    """See [Note: held works] in world/control_collectives.py."""
    assert pool(3).run(held) == [([True] * 7, [False] * 7)] * 3


def leave_after_exchanges(rank, size, place):
    """Return how many connections are open in the world, and after leaving it."""
    paceline.init("gloo", init_method=f"file://{place}", rank=rank, size=size, timeout=30.0)
    before = open_sockets()
    for _ in range(3):
        gather_rows(sum_over_ranks(torch.tensor([rank])))
    paceline.shutdown()
    deadline = time.monotonic() + 20
    while open_sockets() >= before and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, open_sockets()


def open_sockets():
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return count


def test_held_works_do_not_keep_connections_open(pool, tmp_path):
    for before, after in pool(2).run(leave_after_exchanges, str(tmp_path / "meet"), world=False):
        assert before - after >= 2, "gloo listens once, and has one connection to the other rank"


def many_workers(rank, size):
    """Begin many epochs, each of which forks workers right after the ranks' exchange."""
    loader = paceline.Loader(list(range(12)), 2, num_workers=2)
    return [sum(batch.samples for batch in islice(loader, 1 + epoch % 2)) for epoch in range(6)]


def test_workers_forked_right_after_an_exchange_start(pool):
    assert pool(3).run(many_workers) == [[2, 4] * 3] * 3
