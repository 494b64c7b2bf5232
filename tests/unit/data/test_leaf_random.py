"""Random numbers with virtual ranks: they depend on seed, epoch, step and leaf only."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import paceline
from paceline.data.leaf_random import (
    between_steps_seed,
    preserved_generators,
    seed_between_steps,
    seed_generators,
    seed_leaf,
)
from served_leaves import Augmented, collate, drawn, on_ranks, serve


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(as_rank, ranks, workers):
    def make(num_workers=workers, persistent_workers=True):
        return paceline.Loader(
            Augmented(),
            3,
            collate_fn=collate,
            virtual_ranks=4,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
        )

    expected = on_ranks(as_rank, 1, lambda: make(0, False))
    assert on_ranks(as_rank, ranks, make) == expected


def test_random_numbers_differ_by_leaf_step_epoch_and_seed():
    found = []
    for seed in (0, 1):
        loader = paceline.Loader(Augmented(), 3, collate_fn=collate, virtual_ranks=4, seed=seed)
        for _ in range(2):
            for batch, _, common, numbers in serve(loader).values():
                drawn_in_all = [*(each for _, each in batch["samples"]), batch["collated"], numbers]
                found += [number for each in drawn_in_all for number in each]
                seed_generators(common)
                assert drawn() not in drawn_in_all
    # Random numbers of torch are float32, of which two in a few hundred are hardly ever the same.
    assert len(set(found)) > 0.99 * len(found)


def test_how_much_is_drawn_does_not_matter():
    loader = paceline.Loader(list(range(12)), 2, virtual_ranks=3)
    expected = serve(loader)
    loader.set_epoch(0)
    for batch in loader:
        place = next(key for key, each in expected.items() if each[0] == batch.tolist())
        assert drawn() == expected[place][3]
        torch.rand(7), np.random.rand(3), random.random()  # noqa: NPY002


def test_the_keys_are_those_of_seed_leaf_and_seed_between_steps():
    loader = paceline.Loader(list(range(12)), 2, virtual_ranks=3, seed=4)
    for _ in range(2):
        for (epoch, step, leaf), (_, _, common, numbers) in serve(loader).items():
            seed_leaf(4, epoch, step, leaf)
            assert drawn() == numbers
            assert common == between_steps_seed(4, epoch, step)
    list(loader)
    after = drawn()
    seed_between_steps(4, 2, len(loader) - 1)
    assert drawn() == after


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_after_an_epoch_all_ranks_draw_the_same(as_rank, ranks):
    found = set()
    for rank in range(ranks):
        as_rank(rank, ranks)
        for _ in paceline.Loader(Augmented(), 3, collate_fn=collate, virtual_ranks=3):
            drawn()
        found.add(drawn())
    as_rank(0, 1)
    list(paceline.Loader(list(range(30)), 3, virtual_ranks=3))
    assert found == {drawn()}


def test_without_virtual_ranks_nothing_is_seeded():
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    list(paceline.Loader(list(range(9)), 2))
    assert torch.rand(3).tolist() == expected


class Registered(Dataset):
    """Its workers are prepared by `register`."""

    def __init__(self):
        self.number = 0

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return self.number

    def __getitems__(self, numbers):
        return [self.number + number for number in numbers]


def register(worker):
    info = get_worker_info()
    assert type(info.dataset) is Registered
    info.dataset.number = 100
    seed_generators(worker)


def test_worker_init_fn_prepares_the_users_dataset():
    loader = paceline.Loader(
        Registered(), 2, shuffle=False, num_workers=2, worker_init_fn=register, virtual_ranks=2
    )
    assert [batch.tolist() for batch in loader][:2] == [[100, 102], [101, 103]]


def test_redistributed_steps_draw_other_numbers():
    loader = paceline.Loader(list(range(40)), 2, virtual_ranks=4)
    first = serve(loader, steps=1)
    again = paceline.Loader(list(range(40)), 2, virtual_ranks=2)
    again.load_state_dict(loader.state_dict())
    rest = serve(again)
    assert not {each[3] for each in first.values()} & {each[3] for each in rest.values()}
    assert not {each[2] for each in first.values()} & {each[2] for each in rest.values()}


def test_generators_are_preserved():
    seed_generators(3)
    expected = [drawn() for _ in range(2)]
    seed_generators(3)
    found = [drawn()]
    with pytest.raises(KeyError), preserved_generators():
        {}[drawn()]
    assert [*found, drawn()] == expected
