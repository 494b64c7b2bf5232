"""Workers of the loader: their random numbers, the dataset that they see, exceptions and exits."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import paceline
from numbered_dataset import Numbers, samples_of
from paceline.errors import DataError


class Draws(Dataset):
    """Random numbers of the worker that reads it."""

    def __len__(self):
        return 40

    def __getitem__(self, number):
        return torch.rand(()).item()


class DrawsStream(IterableDataset):
    def __iter__(self):
        return (torch.rand(()).item() for _ in range(20))


def drawn(loader, epoch=None):
    if epoch is not None:
        loader.set_epoch(epoch)
    return samples_of(loader)


@pytest.mark.thorough
@pytest.mark.parametrize("dataset", [Draws(), DrawsStream()], ids=["map", "stream"])
def test_random_numbers_of_workers_follow_seed_and_epoch(dataset):
    def loader(seed=0):
        return paceline.Loader(dataset, 4, num_workers=2, seed=seed)

    first = loader()
    epochs = [drawn(first), drawn(first)]
    assert len({*epochs[0], *epochs[1]}) == 80, "no two samples draw the same"
    assert epochs == [drawn(loader()), drawn(loader(), 1)]
    assert drawn(loader(seed=1)) not in epochs


def test_random_numbers_differ_after_a_resume():
    loader = paceline.Loader(Draws(), 4, num_workers=2)
    before = samples_of(islice(loader, 5))
    again = paceline.Loader(Draws(), 4, num_workers=2)
    again.load_state_dict(loader.state_dict())
    after = samples_of(again)
    assert len({*before, *after}) == 40
    dealt_again = paceline.Loader(Draws(), 5, num_workers=2)
    dealt_again.load_state_dict(loader.state_dict())
    assert not {*before, *after} & {*samples_of(dealt_again)}


def test_the_programs_random_generators_are_not_touched():
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    for dataset in (Numbers(9), list(range(9))):
        torch.manual_seed(5)
        list(paceline.Loader(dataset, 2)), list(paceline.Loader(dataset, 2, num_workers=1))
        assert torch.rand(3).tolist() == expected


class Halves(IterableDataset):
    """A stream that torch's users split in `worker_init_fn`."""

    def __init__(self):
        self.numbers = range(20)

    def __iter__(self):
        info = get_worker_info()
        assert info is None or info.dataset is self
        return iter(self.numbers)


def split_halves(worker):
    info = get_worker_info()
    assert (worker, type(info.dataset), info.num_workers) == (info.id, Halves, 2)
    info.dataset.numbers = range(10 * worker, 10 * worker + 10)


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_sees_the_users_dataset(persistent):
    loader = paceline.Loader(
        Halves(), 4, num_workers=2, worker_init_fn=split_halves, persistent_workers=persistent, stream="whole"
    )
    for _ in range(2):
        assert sorted(samples_of(loader)) == list(range(20))


class Pids(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, number):
        return os.getpid()


class PidsStream(IterableDataset):
    def __iter__(self):
        return iter([os.getpid()] * 10)


@pytest.mark.sweep
@pytest.mark.parametrize("dataset", [Pids(), PidsStream()], ids=["map", "stream"])
@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_stay_for_the_next_epoch(dataset, persistent):
    loader = paceline.Loader(dataset, 2, num_workers=2, persistent_workers=persistent)
    epochs = [set(samples_of(loader)) for _ in range(2)]
    assert [len(pids) for pids in epochs] == [2, 2]
    assert (epochs[0] == epochs[1]) == persistent
    assert os.getpid() not in epochs[0]


def test_persistent_workers_serve_an_epoch_after_an_abandoned_one():
    loader = paceline.Loader(list(range(30)), 4, num_workers=2, persistent_workers=True)
    for _ in range(3):
        list(islice(loader, 3))
    assert sorted(samples_of(loader)) == list(range(30))


# ------------------------------------------------------------------ failures


class Broken(Dataset):
    """Fails at one sample, in some way, once it may."""

    def __init__(self, way, bad=6):
        self.way, self.bad, self.may = way, bad, multiprocessing.Event()

    def __len__(self):
        return 10

    def __getitem__(self, number):
        if number == self.bad:
            self.may.wait(60)
            fail(self.way)
        return number


class BrokenStream(IterableDataset):
    """Its first worker fails after six samples, in some way, once it may."""

    def __init__(self, way):
        self.way, self.may = way, multiprocessing.Event()

    def __iter__(self):
        yield from range(6)
        if get_worker_info() is None or get_worker_info().id == 0:
            self.may.wait(60)
            fail(self.way)


def fail(way):
    if way == "exit":
        os._exit(7)
    if way == "sleep":
        time.sleep(2.5)
    if way == "silent":
        raise ValueError
    raise {"value": ValueError, "stop": StopIteration, "key": KeyError, "sleep": ValueError}[way](
        "no such file: cat.png\nlook there"
    )


def refuse(samples):
    if 6 in samples:
        raise FloatingPointError("can't stack these")
    return torch.tensor(samples)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "workers", "message"),
    [
        ("value", 0, r"batch 2 of epoch 0 .*ValueError: no such file: cat.png \(samples 6, 7, 8\)"),
        ("value", 2, r"batch 2 of epoch 0 .*look there \(samples 6, 7, 8\)"),
        ("silent", 0, r"batch 2 of epoch 0 .*ValueError \(samples 6, 7, 8\)"),
        ("silent", 2, r"batch 2 of epoch 0 .*ValueError \(samples 6, 7, 8\)"),
        ("stop", 0, r"batch 2 of epoch 0 ended the iteration \(samples 6, 7, 8\)"),
        ("stop", 2, r"batch 2 of epoch 0 ended the iteration \(samples 6, 7, 8\)"),
        ("exit", 2, r"a worker ended while batch 2 of epoch 0 was loaded: .*exited unexpectedly"),
        ("sleep", 2, r"batch 2 of epoch 0 .*timed out after 2 seconds \(samples 6, 7, 8\)"),
    ],
)
def test_a_sample_that_cannot_be_loaded_is_named_with_rank_and_batch(way, workers, message):
    options = {"timeout": 2} if way == "sleep" else {}
    dataset = Broken(way)
    batches = iter(paceline.Loader(dataset, 3, shuffle=False, num_workers=workers, **options))
    assert samples_of(islice(batches, 2)) == list(range(6))
    dataset.may.set()
    with pytest.raises(DataError, match=rf"(?s)\[rank 0\] {message}"):
        list(batches)


@pytest.mark.parametrize(
    ("way", "workers", "message"),
    [
        ("value", 0, "batch 2 of epoch 0 .*ValueError: no such file: cat.png"),
        ("value", 2, "batch 4 of epoch 0 .*look there"),
        ("key", 0, "batch 2 of epoch 0 .*KeyError"),
        ("exit", 2, "a worker ended while batch 4 of epoch 0 was loaded"),
    ],
)
def test_a_stream_that_breaks_is_named_with_rank_and_batch(way, workers, message):
    dataset = BrokenStream(way)
    batches = iter(paceline.Loader(dataset, 3, num_workers=workers))
    assert sorted(set(samples_of(islice(batches, 3 if workers else 1)))) == list(range(6 if workers else 3))
    dataset.may.set()
    with pytest.raises(DataError, match=rf"(?s)\[rank 0\] {message}"):
        list(batches)


@pytest.mark.parametrize("dataset", [Broken, BrokenStream])
def test_a_reference_to_the_error_does_not_keep_workers_alive(dataset):
    broken = dataset("value")
    broken.may.set()
    with pytest.raises(DataError) as caught:
        list(paceline.Loader(broken, 3, shuffle=False, num_workers=2))
    for _ in range(100):
        if not multiprocessing.active_children():  # a busy machine takes its time to end them
            break
        gc.collect()  # of tests before, too
        time.sleep(0.1)
    assert not multiprocessing.active_children()
    assert "cat.png" in str(caught.value.__cause__), "it reports the cause after its workers ended"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_that_raises_is_named_with_its_batch(workers):
    loader = paceline.Loader(list(range(9)), 3, shuffle=False, num_workers=workers, collate_fn=refuse)
    with pytest.raises(DataError, match=r"(?s)batch 2 .*can't stack these \(samples 6, 7, 8\)") as caught:
        list(loader)
    assert caught.value.__cause__ is not None
    assert caught.value.rank == 0


def test_the_next_epoch_begins_after_an_error():
    loader = paceline.Loader(broken := Broken("value"), 3, shuffle=False)
    broken.may.set()
    with pytest.raises(DataError):
        list(loader)
    broken.bad = None
    assert samples_of(loader) == list(range(10))
    assert loader.epoch == 1


@pytest.mark.parametrize("dataset", [Broken, BrokenStream])
def test_persistent_workers_serve_the_next_epoch_after_an_error(dataset):
    broken = dataset("value")
    broken.may.set()
    loader = paceline.Loader(broken, 3, shuffle=False, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        with pytest.raises(DataError, match=rf"batch . of epoch {epoch} .*look there"):
            list(loader)


def test_only_the_first_samples_of_a_large_batch_are_named():
    dataset = Broken("value")
    dataset.may.set()
    with pytest.raises(DataError, match=r"\(samples 0, 1, 2, 3, 4, 5, 6, 7, …\)"):
        list(paceline.Loader(dataset, 10, shuffle=False))


class Growing(list):
    """A dataset whose length changes."""


def test_a_dataset_that_has_grown_is_refused():
    loader = paceline.Loader(grown := Growing(range(5)), 2)
    list(loader)
    grown.append(5)
    with pytest.raises(ValueError, match="the dataset had 5 samples, and now has 6"):
        list(loader)


@pytest.mark.parametrize("dataset", [list(range(4)), Numbers(4)], ids=["map", "stream"])
def test_a_batch_that_cannot_carry_its_number_is_refused(dataset):
    with pytest.raises(ValueError, match=r"type int can't carry .samples"):
        list(paceline.Loader(dataset, 2, collate_fn=sum))
