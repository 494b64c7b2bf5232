"""Virtual ranks of an iterable dataset: its division, its ends, its random numbers."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import paceline
from numbered_dataset import Numbers
from paceline.data.iterable_sharding import StreamLayer
from paceline.data.leaf_streams import CollateLeaves, LeafBatches, LeafStream
from paceline.data.sampling.rank_shares import RankShares
from paceline.errors import DataError, UnevenData
from served_leaves import collate, drawn, serve


def served_numbers(loader):
    return [(batch.tolist(), batch.samples, batch.ends_step) for batch in loader]


def test_a_stream_is_divided_among_virtual_ranks():
    loader = paceline.Loader(Numbers(11), 2, virtual_ranks=3, stream="whole")
    assert str(loader).startswith("one stream, divided among all (3 virtual ranks on 1 rank): ")
    assert served_numbers(loader) == [
        ([0, 3], 2, False),
        ([1, 4], 2, False),
        ([2, 5], 2, True),
        ([6, 9], 2, False),
        ([7, 10], 2, False),
        ([8], 1, True),
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["join", "truncate", "drop", "pad"])
def test_a_stream_ends_by_the_policy(policy, workers):
    loader = paceline.Loader(
        Numbers(23), 2, virtual_ranks=4, stream="whole", uneven=policy, num_workers=workers, block=2
    )
    found = served_numbers(loader)
    assert [ends for *_, ends in found] == [False, False, False, True] * (len(found) // 4)
    samples = [sample for batch, count, _ in found if count for sample in batch]
    if policy == "join":
        assert sorted(samples) == list(range(23))
    if policy in ("truncate", "drop"):
        assert len(set(samples)) == len(samples) <= 23
    if policy == "drop":
        assert {count for _, count, _ in found} == {2}
    if policy == "pad":
        assert set(samples) == set(range(23))
        assert all(count for _, count, _ in found)


def test_a_stream_that_must_not_end_unevenly_names_virtual_ranks():
    with pytest.raises(
        UnevenData, match="with virtual_ranks=3, after 1 steps of epoch 0 rank 1 has no batch"
    ):
        list(paceline.Loader(Numbers(7), 2, virtual_ranks=3, stream="whole", uneven="error"))


class BreaksAt(Numbers):
    def __iter__(self):
        for number in super().__iter__():
            if number == 12:
                raise ValueError("no such file")
            yield number


def test_errors_name_the_step():
    with pytest.raises(DataError, match=r"batch 2 of epoch 0 can't be loaded: ValueError: no such file"):
        list(paceline.Loader(BreaksAt(20), 2, virtual_ranks=3, stream="whole"))
    numbers = [*range(12), "x"]
    for workers in (0, 2):
        loader = paceline.Loader(
            numbers, 2, virtual_ranks=3, shuffle=False, collate_fn=add, num_workers=workers
        )
        with pytest.raises(
            DataError, match=r"batch 2 of epoch 0 can't be loaded: TypeError.* \(samples 12\)"
        ):
            list(loader)


def add(samples):
    return torch.tensor([sample + 1 for sample in samples])


# ------------------------------------------------------------------ random numbers


class Drawing(IterableDataset):
    """Numbers that are shuffled and augmented while they are read, divided among workers."""

    def __init__(self, size=60):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        numbers = [*range(worker, self.size, workers)]
        random.shuffle(numbers)
        for number in numbers:
            yield number, [drawn() for _ in range(1 + number % 2)][-1]


def leaf_batches(own, workers, virtual=5):
    """Return all batches of the leaves `own`, as a process gets them that serves only these."""
    epoch, layer = torch.tensor(7), StreamLayer(RankShares.equal(virtual), 2, "random", 0, ({},) * virtual)

    def fetch():
        stream = LeafStream(Drawing(), [layer], own, batch_size=3, drop_last=False, seed=1, epoch=epoch)
        collated = CollateLeaves(collate)
        for samples in stream:
            yield collated(samples)

    batches = LeafBatches(fetch(), own, workers, layer, 3)
    found = {leaf: [] for leaf in own}
    for leaf in own:
        while (batch := batches.next_of(leaf)) is not None:
            drawn()  # the training step's
            found[leaf].append(batch.batch)
    return found


def test_a_leaf_does_not_depend_on_the_others_of_its_process():
    whole = leaf_batches(range(5), 1)
    assert sorted(number for each in whole.values() for batch in each for number, _ in batch["samples"]) == [
        *range(60)
    ]
    for first in range(5):
        for end in range(first + 1, 6):
            found = leaf_batches(range(first, end), 1)
            assert found == {leaf: whole[leaf] for leaf in range(first, end)}


def make(workers, persistent=False):
    return paceline.Loader(
        Drawing(),
        3,
        collate_fn=collate,
        virtual_ranks=4,
        stream="whole",
        num_workers=workers,
        persistent_workers=persistent,
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_draws_what_the_process_itself_would(persistent):
    plain, with_worker = make(0), make(1, persistent)
    epochs = [serve(plain), serve(plain)]
    assert [serve(with_worker), serve(with_worker)] == epochs
    assert {str(each[0]) for each in epochs[0].values()}.isdisjoint(
        str(each[0]) for each in epochs[1].values()
    )


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_resumed_epoch_is_the_uninterrupted_one(workers, steps):
    whole, loader = serve(make(workers)), make(workers)
    list(islice(loader, 4 * steps + 2))
    assert loader.state_dict()["step"] == steps
    again = make(workers)
    again.load_state_dict(loader.state_dict())
    rest = {(e, step + steps, leaf): each for (e, step, leaf), each in serve(again).items()}
    assert rest == {key: each for key, each in whole.items() if key[1] >= steps}


def test_a_state_of_other_virtual_ranks_is_redistributed():
    loader = paceline.Loader(Numbers(50), 2, virtual_ranks=4, stream="whole")
    taken = [sample for batch in islice(loader, 8) for sample in batch.tolist()]
    for after in (None, 1, 7):
        again = paceline.Loader(Numbers(50), 2, virtual_ranks=after, stream="whole")
        again.load_state_dict(loader.state_dict())
        rest = [sample for batch in again if batch.samples for sample in batch.tolist()]
        assert sorted(taken + rest) == list(range(50))


def test_a_leaf_gets_batches_of_the_workers_in_turns():
    loader = paceline.Loader(Numbers(24), 2, virtual_ranks=2, stream="whole", num_workers=2)
    workers = {0: [], 1: []}
    for number, batch in enumerate(loader):
        (worker,) = {sample % 2 for sample in batch.tolist()}
        workers[number % 2].append(worker)
    assert workers == {0: [0, 1] * 3, 1: [0, 1] * 3}
