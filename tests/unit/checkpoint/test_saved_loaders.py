"""What a checkpoint saves of loaders and other objects, and which digests find differences."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import paceline
from paceline.checkpoint.parts.loader_epochs import LoaderEpochs, with_loader
from paceline.checkpoint.parts.loader_states import check_states, collect_state, load_state
from paceline.checkpoint.parts.named_objects import NamedObjects
from paceline.checkpoint.parts.rank_digests import state_digest
from paceline.errors import UsageError


class Positions(IterableDataset):
    """A stream with a state."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        first, self.position = self.position, 0
        for number in range(first, 8):
            self.position = number + 1
            yield number

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Counter:
    """An object with a state that is not a loader."""

    def state_dict(self):
        return {"count": 3}

    def load_state_dict(self, state):
        self.count = state["count"]


# ------------------------------------------------------------------ digests


def test_digests_differ_where_states_do():
    def digest(**values):
        return state_digest("it", {"step": 1, "mean": torch.zeros(3), "set": {"a", "b"}, **values})

    others = [
        digest(step=2),
        digest(step="1"),
        digest(mean=torch.tensor([0.0, 0.0, 1e-30])),
        digest(mean=torch.zeros(3, dtype=torch.float64)),
        digest(mean=torch.zeros(3, 1)),
        digest(set={"a"}),
        digest(more=None),
    ]
    assert digest() == digest()
    assert len({digest(), *others}) == 1 + len(others)


def test_digests_of_tensors_of_any_dtype_and_shape():
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex64, torch.float64):
        for shape in ((), (0,), (2, 3)):
            tensor = torch.ones(shape, dtype=dtype)
            assert state_digest("it", tensor) == state_digest("it", tensor.clone())
    assert state_digest("it", torch.ones(2, 3).t()) == state_digest("it", torch.ones(3, 2))


def test_contents_of_large_tensors_are_not_compared():
    large = torch.zeros(1 << 20)
    assert state_digest("it", large) == state_digest("it", large + 1)


def test_digests_are_equal_in_another_process():
    """Where strings have other hashes, so that sets have another order."""
    code = (
        "from paceline.checkpoint.parts.rank_digests import state_digest;"
        "print(state_digest('it', {'names': {chr(97 + n) * 3 for n in range(20)}, 'nested': [({'x', 'y'}, 1)]}))"
    )
    names = {chr(97 + number) * 3 for number in range(20)}
    expected = state_digest("it", {"names": names, "nested": [({"x", "y"}, 1)]})
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        assert found.stdout.strip() == expected


# ------------------------------------------------------------------ what is saved and loaded


def test_whose_state_is_saved():
    common, own, digest = collect_state("it", Counter(), 1, 2)
    assert common == {"count": 3}
    assert own is None
    assert digest
    common, own, digest = collect_state("it", paceline.Loader(list(range(8)), 4), 1, 2)
    assert common["epoch"] == 0
    assert own is None
    assert digest
    common, own, digest = collect_state("it", Positions(), 1, 2)
    assert common == {"paceline_loader": "Positions"}
    assert own == {"state": {"position": 0}, "workers": 0}
    assert not digest


def part(name, other, rank=0, ranks=1):
    """Return a rank's part of a checkpoint with one object."""
    state = collect_state(name, other, rank, ranks)
    return {"others": {name: state.common}, "own": {} if state.own is None else {name: state.own}}


def test_every_rank_loads_its_own_state():
    states = [part("it", stream) for stream in (Positions(), Positions())]
    states[1]["own"]["it"]["state"] = {"position": 5}
    stream = Positions()
    check_states({"it": stream}, states, 1, 2, "here")
    load_state("it", stream, states, 1, 2)
    assert list(stream) == [5, 6, 7]


def test_checkpoints_of_one_rank_by_earlier_versions():
    """They had rank 0's state, as it is."""
    stream, states = Positions(), [{"others": {"it": {"position": 5}}, "own": {}}]
    check_states({"it": stream}, states, 0, 1, "here")
    load_state("it", stream, states, 0, 1)
    assert list(stream) == [5, 6, 7]
    with pytest.raises(UsageError, match="or by a version of Paceline that saved rank 0's state only"):
        check_states({"it": stream}, [*states, {"own": {}}], 0, 2, "here")


def test_other_objects_must_be_in_the_checkpoint():
    states = [part("it", Counter())]
    with pytest.raises(UsageError, match="object 'it' is in the checkpoint 'here' only"):
        check_states({}, states, 0, 1, "here")
    with pytest.raises(UsageError, match="object 'other' is not in the checkpoint 'here'"):
        check_states({"it": Counter(), "other": Positions()}, states, 0, 1, "here")
    with pytest.raises(
        UsageError, match="the state of 'it', a Positions, was saved by another kind of object"
    ):
        check_states({"it": Positions()}, [*states, *states], 0, 2, "here")
    with pytest.raises(
        UsageError, match="the state of 'it', a Counter, was saved by a Positions, not by a Counter"
    ):
        check_states({"it": Counter()}, [part("it", Positions())], 0, 1, "here")


# ------------------------------------------------------------------ loaders that begin to serve


def none():
    return NamedObjects({}, {}, {})


def test_a_loader_without_state_is_left_out_with_a_warning(caplog):
    assert not with_loader(none(), DataLoader([1, 2]), loaded=False).others
    assert "a DataLoader has no state_dict(): a resumed run repeats its epoch from the start" in caplog.text


def test_a_dataset_with_state_in_a_loader_without(caplog):
    """In this process the dataset's state is the position; workers have copies of the dataset."""
    stream = Positions()
    objects = NamedObjects({}, {}, {"data": stream})
    assert with_loader(objects, DataLoader(stream), loaded=False) is objects
    assert not caplog.text
    with_loader(objects, DataLoader(stream, num_workers=1), loaded=False)
    assert "a resumed run repeats its epoch from the start" in caplog.text


def test_a_loader_with_state_is_added_once(caplog):
    stream = Positions()
    objects = with_loader(none(), stream, loaded=False)
    assert objects.others == {"loader": stream}
    assert with_loader(objects, stream, loaded=True) is objects
    assert not caplog.text
    assert with_loader(none(), stream, loaded=True).others == {}
    assert "was not part of the checkpoint when load() was called" in caplog.text
    with pytest.raises(
        UsageError, match="resume\\(\\) got another loader than the Positions that is called 'loader'"
    ):
        with_loader(objects, Positions(), loaded=False)


def test_loaders_without_a_name_are_called_loader():
    stream = Positions()
    assert NamedObjects.of([stream], {}).others == {"loader": stream}
    with pytest.raises(UsageError, match="two objects of the checkpoint are called 'loader'"):
        NamedObjects.of([stream, paceline.Loader([1, 2], 1)], {})


def test_a_sampler_without_state_is_named(caplog):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    for options, warned in (({"shuffle": True}, False), ({"sampler": RandomSampler(range(8))}, True)):
        caplog.clear()
        NamedObjects.of([], {"train": torchdata.StatefulDataLoader(list(range(8)), **options)})
        assert ("the sampler of 'train', a RandomSampler, draws an order" in caplog.text) == warned


class Wrapped:
    """A loader as an integration wraps it."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


def test_a_loader_of_paceline_that_is_wrapped_has_one_state():
    loader = Wrapped(paceline.Loader(list(range(8)), 4))
    assert collect_state("it", loader, 0, 2).common == loader.loader.state_dict()
    check_states({"it": loader}, [part("it", loader), {"own": {}}], 0, 3, "here")


class Epochs:
    """A loader that is informed of epochs."""

    def __init__(self):
        self.epochs = []

    def __iter__(self):
        return iter([1, 2])

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_set_epoch_is_called_before_every_epoch():
    loader, epochs = Epochs(), LoaderEpochs()
    assert not epochs.between
    assert [list(epochs.batches(loader, number)) for number in range(3)] == [[1, 2]] * 3
    assert loader.epochs == [0, 1, 2]
    assert epochs.between


def test_an_epoch_of_a_paceline_loader_goes_on_by_itself():
    loader, epochs = paceline.Loader(list(range(4)), 2), LoaderEpochs()
    loader.set_epoch(5)
    assert len(list(epochs.batches(loader, 0))) == 2
    assert loader.epoch == 5
    epochs.resume(between=True)
    list(epochs.batches(loader, 3))
    assert loader.epoch == 3


def test_a_stream_of_datasets_in_a_paceline_loader():
    """It is read again from its start, and keeps no state of its own."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)
    options = {"collate_fn": lambda rows: [row["x"] for row in rows]}
    for between in (False, True):
        loader, epochs = paceline.Loader(stream, 2, **options), LoaderEpochs()
        first = epochs.batches(loader, 0)
        served = list(first) if between else [next(first)]
        again, resumed = paceline.Loader(stream, 2, **options), LoaderEpochs()
        again.load_state_dict(loader.state_dict())
        resumed.resume(between=epochs.between)
        served += resumed.batches(again, int(between))
        assert [list(batch) for batch in served] == [[0, 1], [2, 3], [4, 5], [6, 7]] * (1 + between)
