"""The loader in a world of one: equality with torch's DataLoader, epochs, positions, options, errors."""

from __future__ import annotations

import logging
from collections import namedtuple
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from numbered_dataset import Numbers, batches_of, samples_of
from paceline.errors import UsageError

Pair = namedtuple("Pair", ["x", "y"])
POLICIES = ["join", "rebalance", "truncate", "pad", "drop", "error"]
STREAM_POLICIES = ["join", "truncate", "pad", "drop", "error"]


class Rows(IterableDataset):
    """The samples of a map-style dataset, one after the other."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[number] for number in range(len(self.dataset)))


def in_order(size, batch_size, **options):
    return paceline.Loader(list(range(size)), batch_size, shuffle=False, **options)


# ------------------------------------------------------------------ equality with torch's DataLoader


def squares(samples):
    return {"sum": torch.tensor(sum(samples)), "all": samples}


DATASETS = {
    "tensors": ([torch.full((2, 3), float(number)) for number in range(11)], None),
    "numbers": (list(range(11)), None),
    "tuples": (TensorDataset(torch.arange(11.0), torch.arange(11)), None),
    "dicts": ([{"x": torch.ones(2) * number, "name": f"n{number}"} for number in range(11)], None),
    "namedtuples": ([Pair(torch.ones(2) * number, number) for number in range(11)], None),
    "arrays": ([np.full(3, number) for number in range(11)], None),
    "lists": ([[number, [number, "text"]] for number in range(11)], None),
    "own": (list(range(11)), squares),
}


def same(left, right):
    if isinstance(right, torch.Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(right, dict):
        return (
            isinstance(left, type(right))
            and left.keys() == right.keys()
            and all(same(left[k], right[k]) for k in right)
        )
    if isinstance(right, tuple | list):
        return isinstance(left, type(right)) and len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("kind", DATASETS)
def test_batches_are_those_of_torch(kind, iterable):
    dataset, collate = DATASETS[kind]
    dataset = Rows(dataset) if iterable else dataset
    ours = list(paceline.Loader(dataset, 4, shuffle=False, collate_fn=collate))
    theirs = list(DataLoader(dataset, 4, collate_fn=collate))
    assert same(ours, theirs)
    assert [batch.samples for batch in ours] == [4, 4, 3]


@pytest.mark.parametrize("iterable", [False, True])
def test_batches_of_two_workers_are_those_of_torch(iterable):
    dataset = Numbers(23) if iterable else TensorDataset(torch.arange(23.0))
    ours = list(paceline.Loader(dataset, 4, shuffle=False, num_workers=2, prefetch_factor=3))
    assert same(ours, list(DataLoader(dataset, 4, num_workers=2)))
    assert sum(batch.samples for batch in ours) == 23


@pytest.mark.parametrize("policy", POLICIES)
def test_on_one_rank_only_drop_changes_anything(policy):
    ours = batches_of(in_order(10, 4, uneven=policy))
    expected = {"drop": [4, 4], "rebalance": [3, 3, 4]}.get(policy, [4, 4, 2])
    assert [len(batch) for batch in ours] == expected
    assert [sample for batch in ours for sample in batch] == list(range(sum(expected)))


@pytest.mark.parametrize("policy", STREAM_POLICIES)
@pytest.mark.parametrize("stream", [None, "own", "whole"])
def test_on_one_rank_only_drop_changes_a_stream(policy, stream):
    ours = batches_of(paceline.Loader(Numbers(10), 4, uneven=policy, stream=stream))
    assert ours == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]][: 2 if policy == "drop" else 3]


@pytest.mark.sweep
@pytest.mark.parametrize("batch_size", [1, 3, 10, 1000])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_served_once_in_another_order_each_epoch(batch_size, workers):
    loader = paceline.Loader(list(range(101)), batch_size, num_workers=workers)
    epochs = [samples_of(loader) for _ in range(2)]
    assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    assert epochs[0] == samples_of(paceline.Loader(list(range(101)), batch_size))
    assert epochs[0] != samples_of(paceline.Loader(list(range(101)), batch_size, seed=1))


def test_blocks_are_shuffled_as_wholes():
    order = samples_of(paceline.Loader(list(range(20)), 4, shuffle="blocks", block=4))
    blocks = [order[first : first + 4] for first in range(0, 20, 4)]
    assert all(block == list(range(block[0], block[0] + 4)) for block in blocks)
    assert sorted(order) == list(range(20))
    assert order != sorted(order)


# ------------------------------------------------------------------ lengths and epochs


def test_length_is_the_number_of_steps():
    loader = in_order(10, 4)
    assert len(loader) == 3
    assert len(in_order(10, 4, uneven="drop")) == 2
    assert len(in_order(10, 4, uneven="rebalance")) == 3
    assert len(list(loader)) == 3
    with pytest.raises(TypeError, match="an iterable dataset has no length"):
        len(paceline.Loader(Numbers(3)))


@pytest.mark.parametrize("dataset", [list(range(9)), Numbers(9)], ids=["map", "stream"])
def test_every_iteration_is_the_next_epoch(dataset):
    loader = paceline.Loader(dataset, 4)
    assert loader.epoch == 0
    for epoch in range(3):
        for _ in loader:
            assert loader.epoch == epoch
        assert loader.epoch == epoch
    loader.set_epoch(7)
    for _ in loader:
        assert loader.epoch == 7


def test_set_epoch_starts_at_the_first_batch():
    loader = paceline.Loader(list(range(30)), 4)
    epochs = [batches_of(loader) for _ in range(4)]
    for epoch in (2, 0, 0, 3):
        loader.set_epoch(epoch)
        assert batches_of(loader) == epochs[epoch]
    assert list(islice(loader, 2))
    loader.set_epoch(loader.epoch)
    assert batches_of(loader) == batches_of(after_epochs(30, 4))


def after_epochs(size, epochs):
    loader = paceline.Loader(list(range(size)), 4)
    loader.set_epoch(epochs)
    return loader


def test_a_loop_with_set_epoch_serves_each_epoch_once():
    loader, plain = paceline.Loader(list(range(30)), 4), paceline.Loader(list(range(30)), 4)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert batches_of(loader) == batches_of(plain)


@pytest.mark.parametrize("dataset", [list(range(30)), Numbers(30)], ids=["map", "stream"])
def test_an_abandoned_iteration_is_not_continued(dataset):
    loader = paceline.Loader(dataset, 4)
    list(islice(loader, 2))
    assert len(list(loader)) == 8
    assert loader.epoch == 1


@pytest.mark.parametrize("dataset", [list(range(30)), Numbers(30)], ids=["map", "stream"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_two_loops_at_once_are_refused(dataset, first):
    loader = paceline.Loader(dataset, 4)
    one = iter(loader)
    list(islice(one, first))
    two = iter(loader)
    with pytest.raises(UsageError, match="another iteration of this loader started before this one ended"):
        next(one)
    assert len(list(two)) == 8


def test_an_exhausted_iteration_stays_exhausted():
    batches = iter(in_order(5, 4))
    assert len(list(batches)) == 2
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)


# ------------------------------------------------------------------ messages


def test_the_use_of_the_data_is_logged_once(caplog):
    loader = in_order(10, 4, uneven="drop")
    assert (
        str(loader) == "10 samples to 1 ranks: 2 steps on every rank; 2 of 10 samples (20.0%) are never used"
    )
    with caplog.at_level(logging.INFO, "paceline.data"):
        list(loader), list(loader), list(in_order(8, 4))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[0].message == str(loader)


# ------------------------------------------------------------------ arguments that make no sense


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": "4"}, "batch_size='4'"),
        ({"dispatch": "randomly"}, "unknown dispatch scheme 'randomly'.*did you mean 'random'"),
        ({"dispatch": "shares"}, "by shares without shares"),
        ({"block": 0}, "block=0"),
        ({"block": -3}, "block=-3"),
        ({"block": 1.5}, "block=1.5"),
        ({"shares": [0.5]}, "sum to 0.5, not 1.*pass for example 1"),
        ({"shares": [0.5, 0.5]}, "2 shares .* for 1 rank"),
        ({"shares": []}, "0 shares .* for 1 rank"),
        ({"shares": [-1.0]}, "share -1.0 of rank 0"),
        ({"shares": [float("nan")]}, "share nan of rank 0"),
        ({"shares": ["a"]}, r"shares=\['a'\]"),
        ({"shares": 0.5}, "shares=0.5"),
        ({"shares": "measure"}, "unknown shares 'measure'.*did you mean 'measured'"),
        ({"uneven": "joined"}, "unknown policy .*'joined'.*did you mean 'join'"),
        ({"uneven": None}, "unknown policy .*None"),
        ({"seed": None}, "seed=None"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": "a"}, "seed='a'"),
        ({"shuffle": "block"}, "unknown shuffle 'block'.*blocks"),
        ({"shuffle": None}, "unknown shuffle None"),
        ({"shuffle": []}, r"unknown shuffle \[\]"),
        ({"redeal_every": 5}, "redeal_every=5 without shares='measured'"),
        ({"redeal_every": 0, "shares": "measured"}, "redeal_every=0"),
        ({"redeal_every": 2.5, "shares": "measured"}, "redeal_every=2.5"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dataset", [list(range(10)), Numbers(10)], ids=["map", "stream"])
def test_invalid_arguments_are_named(dataset, options, message):
    more = {"stream": "whole"} if isinstance(dataset, Numbers) else {}
    if more and options.get("shares") == "measured":
        message = "shares='measured' with an iterable dataset|redeal_every"
    with pytest.raises(UsageError, match=f"(?s){message}"):
        paceline.Loader(dataset, **options, **more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 11}, "a block of 11 samples is larger than the data .10 samples"),
        ({"stream": "own"}, "stream='own' with a map-style dataset"),
        ({"shares": "measured", "uneven": "pad"}, "shares='measured' with uneven='pad'"),
        ({"batch_size": 11, "uneven": "drop"}, "no step can be made: rank 0 has 10 samples, batches have 11"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_the_data_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        paceline.Loader(list(range(10)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": "each"}, "unknown stream 'each'; valid: own, whole"),
        ({"shares": "measured"}, "shares='measured' with an iterable dataset"),
        ({"shuffle": "blocks"}, "shuffle='blocks' with an iterable dataset"),
        ({"uneven": "rebalance"}, "uneven='rebalance' with an iterable dataset"),
        ({"dispatch": "random"}, "dispatch with an iterable dataset of which every rank reads its own"),
        ({"block": 2, "stream": "own"}, "block with an iterable dataset of which every rank"),
        ({"shares": [1.0]}, "shares with an iterable dataset of which every rank"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_a_stream_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        paceline.Loader(Numbers(10), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"num_workers": 0, "prefetch_factor": 2},
        {"persistent_workers": True},
        {"timeout": -1},
        {"multiprocessing_context": "spawn"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dataset", [list(range(10)), Numbers(10)], ids=["map", "stream"])
def test_torch_refuses_its_own_options_before_anything_is_read(dataset, options):
    with pytest.raises(ValueError, match=next(iter(options)) + "|prefetch_factor"):
        paceline.Loader(dataset, **options)


@pytest.mark.parametrize("dataset", [[], (), torch.empty(0, 3), TensorDataset(torch.empty(0))])
def test_an_empty_dataset_is_refused(dataset):
    with pytest.raises(UsageError, match="the dataset is empty"):
        paceline.Loader(dataset)


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(UsageError, match="type generator has no length"):
        paceline.Loader(number for number in range(3))


def test_epochs_are_counted_from_0():
    loader = in_order(5, 4)
    for epoch in (-1, 1.0, "1", None):
        with pytest.raises(UsageError, match="epoch"):
            loader.set_epoch(epoch)


def test_dispatch_by_shares_accepts_measured_shares():
    assert sorted(
        samples_of(paceline.Loader(list(range(9)), 4, dispatch="shares", shares="measured"))
    ) == list(range(9))
    assert sorted(samples_of(paceline.Loader(list(range(9)), 4, dispatch="shares", shares=[1.0]))) == list(
        range(9)
    )
