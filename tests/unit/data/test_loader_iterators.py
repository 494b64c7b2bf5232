"""Iterators of a `Loader` that are never used, as libraries create them, and the steps that are left."""

from __future__ import annotations

import pytest
from torch.utils.data import IterableDataset

import paceline


class Stream(IterableDataset):
    """The numbers 0 to 9."""

    def __iter__(self):
        yield from range(10)


def served(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("dataset", [list(range(10)), Stream()], ids=["map", "stream"])
def test_an_unused_iterator_begins_no_epoch(dataset):
    first, second = served(loader := paceline.Loader(dataset, batch_size=4)), served(loader)
    again = paceline.Loader(dataset, batch_size=4)
    iter(again)
    assert (again.epoch, served(again)) == (0, first)
    iter(again)
    iter(again)
    assert (again.epoch, served(again)) == (1, second)
    again.set_epoch(1)
    iter(again)
    assert served(again) == second


def test_an_unused_iterator_keeps_a_loaded_position():
    loader = paceline.Loader(list(range(10)), batch_size=4)
    next(iter(loader))
    again = paceline.Loader(list(range(10)), batch_size=4)
    again.load_state_dict(loader.state_dict())
    iter(again)
    assert served(again) == served(paceline.Loader(list(range(10)), batch_size=4))[1:]


def test_steps_left():
    loader = paceline.Loader(list(range(10)), batch_size=4)
    assert loader.steps_left == 3
    assert [loader.steps_left for _ in loader] == [2, 1, 0]
    assert paceline.Loader(Stream(), batch_size=4).steps_left is None
