"""`Checkpoint` with loaders of other libraries: every rank continues with its own next batch, or is refused by name."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from foreign_loaders import BATCHES, Countdown, make_loader
from loader_run import LoaderRun

STOPS = [  # steps between checkpoints, and the step at which a run stops; the latest checkpoint is then
    pytest.param(2, 3, id="in an epoch"),
    pytest.param(4, 5, id="after its last batch", marks=pytest.mark.thorough),
    pytest.param(3, 5, id="between epochs"),
    pytest.param(6, 7, id="in a later epoch", marks=pytest.mark.thorough),
]
CASES = [
    ("StatefulDataLoader", {}),
    ("StatefulDataLoader", {"num_workers": 2}),
    ("StatefulDistributedSampler", {}),
    ("IterableDataset", {}),
    ("IterableDataset in a StatefulDataLoader", {}),
    ("IterableDataset in a StatefulDataLoader", {"num_workers": 2, "persistent_workers": True}),
    ("IterableDataset in a DataLoader", {}),
    ("torchdata.nodes", {}),
    ("Countdown", {}),
]


def need(kind):
    """Skip the test unless the libraries of a loader are installed."""
    if "IterableDataset" in kind:
        pytest.importorskip("datasets")
    if kind not in ("IterableDataset", "IterableDataset in a DataLoader", "Countdown"):
        pytest.importorskip("torchdata")


def logged(action):
    """Call `action`; return its result and the warnings of the logger of checkpoints."""
    lines, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline.checkpoint").addHandler(handler)
    try:
        return action(), lines
    finally:
        logging.getLogger("paceline.checkpoint").removeHandler(handler)


def train(rank, size, folder, kind, every, stop, options):
    paceline.init()
    loader = make_loader(kind, rank, size, **options)
    named = {} if hasattr(loader, "state_dict") else {"data": loader.dataset}
    run = LoaderRun(folder, loader, every=every, **named)
    served, warnings = logged(lambda: run.train(stop=stop))
    assert warnings == []
    return served, run.resumed_step, run.weights


@pytest.mark.parametrize(("every", "stop"), STOPS)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_every_rank_continues_with_its_own_next_batch(pool, tmp_path, kind, options, every, stop):
    """Batches and random numbers of three lives equal those of one."""
    need(kind)
    whole = pool(2).run(train, tmp_path / "whole", kind, every, None, options)
    served, steps = [[], []], []
    for until in (stop, stop + 4, None):
        parts = pool(2).run(train, tmp_path / "parts", kind, every, until, options)
        steps.append(parts[0][1])
        served = [served[rank][: steps[-1]] + parts[rank][0] for rank in range(2)]
    assert 0 == steps[0] < steps[1] < steps[2]
    for rank in range(2):
        assert served[rank] == whole[rank][0]
        assert parts[rank][2] == whole[rank][2]
        assert len(served[rank]) == 3 * BATCHES


# ------------------------------------------------------------------ refused, or started anew


def refused(rank, size, folder, kind, options):
    paceline.init()
    return LoaderRun(folder, make_loader(kind, rank, size, **options)).refusal()


@pytest.mark.parametrize("kind", ["StatefulDataLoader", "IterableDataset", "Countdown"])
def test_another_number_of_ranks_is_refused_by_name(pool, tmp_path, kind):
    need(kind)
    first = pool(2).run(train, tmp_path, kind, 2, 3, {})
    for message in pool(3).run(refused, tmp_path, kind, {}):
        assert (
            f"the loader 'loader', a {kind}, was saved by 2 ranks, and its state can't be dealt to 3"
            in message
        )
        assert "resume on 2 ranks" in message
        assert "paceline.Loader" in message
    rest = pool(2).run(train, tmp_path, kind, 2, None, {})
    assert [each[1] for each in rest] == [2, 2]
    assert len(first[0][0][:2] + rest[0][0]) == 3 * BATCHES


def test_another_number_of_workers_is_refused(pool, tmp_path):
    need("StatefulDataLoader")
    pool(2).run(train, tmp_path, "StatefulDataLoader", 2, 3, {"num_workers": 2})
    for message in pool(2).run(refused, tmp_path, "StatefulDataLoader", {}):
        assert "was saved by 2 ranks with num_workers=2; here it has num_workers=0" in message


def test_another_loader_of_the_same_name_is_refused(pool, tmp_path):
    pool(2).run(train, tmp_path, "Countdown", 2, 3, {})
    for message in pool(2).run(refused_of_paceline, tmp_path):
        assert "the state of 'loader', a Loader, was saved by a Countdown, not by a Loader" in message
        assert "loader_2=…" in message


def refused_of_paceline(rank, size, folder):
    paceline.init()
    return LoaderRun(folder, paceline.Loader(list(range(32)), 4)).refusal()


def replaced(rank, size, folder, keep):
    """Resume with a loader under another name, or with a loader without state."""
    paceline.init()
    loader = paceline.Loader(list(range(4 * BATCHES * size)), 4) if keep else DataLoader([*range(16)], 4)
    run = LoaderRun(folder, loader, every=2, **({"loader_2": loader} if keep else {}))
    served, warnings = logged(run.train)
    if keep:  # the new one is saved, so the next life continues with it
        assert LoaderRun(folder, loader, loader_2=loader).train() == []
    return served, run.resumed_step, warnings


@pytest.mark.parametrize("keep", [True, False])
def test_a_loader_can_be_replaced(pool, tmp_path, keep):
    """On another number of ranks too; the epoch starts anew, the rest is resumed."""
    pool(2).run(train, tmp_path, "Countdown", 6, 7, {})
    results = pool(3).run(replaced, tmp_path, keep)
    for served, step, _ in results:
        assert step == 6
        assert [epoch for epoch, *_ in served] == [1] * BATCHES + [2] * BATCHES
    lines = [line for line in results[0][2] if "not part of this run" in line]
    assert lines == [
        "the loader 'loader' of the checkpoint, a Countdown, is not part of this run: the epoch starts anew"
        + (", with 'loader_2'" if keep else "")
    ]
    assert not any("not part of this run" in line for line in results[1][2])


# ------------------------------------------------------------------ objects whose states should be the same


class Average:
    """An average of parameters, which ranks should have the same, and what a user may keep in such an object."""

    def __init__(self, rank):
        self.values = {"mean": torch.full((4,), 1.0), "names": {"a", "b", f"c{rank}"}, "decay": 0.9}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


def differing(rank, size, folder):
    """A schedule that follows a loss of its own on each rank; an average that differs; a schedule that does not."""
    paceline.init()
    parameters = [nn.Parameter(torch.zeros(1))]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(parameters, lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters, lr=0.1), 3)
    loader = Countdown(rank)
    run = LoaderRun(folder, loader, every=2, plateau=plateau, schedule=schedule, average=Average(rank))
    plateau.step(float(rank))
    return logged(lambda: run.train(stop=8))[1]


def test_states_that_differ_between_ranks_are_named_once(pool, tmp_path):
    first, *others = pool(3).run(differing, tmp_path)
    assert others == [[], []]
    assert [line.partition(":")[0] for line in sorted(first)] == [
        "the state of 'average' on rank 1, 2 differs from rank 0's",
        "the state of 'plateau' on rank 1, 2 differs from rank 0's",
    ]
    assert all("rank_state_dict()" in line for line in first)


class OwnAverage(Average):
    """An object that saves every rank's state."""

    def rank_state_dict(self):
        return {"names": self.values["names"]}

    def load_state_dict(self, state, own=None):
        self.values = {**state, **(own or {})}


def averaged(rank, size, folder, average_rank):
    """Save, or resume if there is a checkpoint; return what the average holds of a rank, and warnings."""
    paceline.init()
    average, loader = OwnAverage(average_rank if average_rank >= 0 else rank), Countdown(rank)
    run = LoaderRun(folder, loader, loader, every=2, average=average)
    if run.checkpoint.load() is None:
        return average.values["names"], logged(lambda: run.train(stop=3))[1]
    run.checkpoint.close()
    return average.values["names"], loader.skipped


def test_an_object_can_save_every_ranks_state(pool, tmp_path):
    names = [{"a", "b", "c0"}, {"a", "b", "c1"}]
    assert pool(2).run(averaged, tmp_path, -1) == [(each, []) for each in names]
    assert pool(2).run(averaged, tmp_path, 7) == [(each, 2) for each in names]
