"""Positions of loaders: plain JSON after any batch, resumed exactly, refused if invalid."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import pytest

import paceline
from numbered_dataset import Numbers, batches_of, samples_of
from paceline.errors import UsageError


def as_json(state):
    """Return `state` as it is read from a file."""
    text = json.dumps(state)
    assert json.loads(text) == state
    return json.loads(text)


LOADERS = {
    "map": lambda: paceline.Loader(list(range(23)), 4),
    "blocks": lambda: paceline.Loader(list(range(23)), 4, shuffle="blocks", block=3),
    "random": lambda: paceline.Loader(list(range(23)), 4, dispatch="random"),
    "measured": lambda: paceline.Loader(list(range(23)), 4, shares="measured"),
    "own": lambda: paceline.Loader(Numbers(23), 4),
    "whole": lambda: paceline.Loader(Numbers(23), 4, stream="whole", block=3),
    "random stream": lambda: paceline.Loader(Numbers(23), 4, stream="whole", dispatch="random"),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_position_after_any_batch_is_plain_json_and_can_be_resumed(kind):
    loader, places = LOADERS[kind](), []
    first = loader.state_dict()
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        places.append(as_json(loader.state_dict()))
    following = batches_of(loader)
    for done, place in enumerate([as_json(first), *places]):
        again = LOADERS[kind]()
        again.load_state_dict(place)
        assert again.epoch == 0
        assert again.state_dict() == place
        rest = batches_of(again)
        if done == len(batches) and "stream" not in place.get("kind", ""):
            assert rest == following, "an iteration from the end of an epoch serves the next one"
            continue
        assert rest == batches[done:]
        assert batches_of(again) == following


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("last", [False, True], ids=["after the last batch", "after the loop"])
def test_a_loop_over_epochs_resumes_from_the_end_of_one(kind, last):
    loader = LOADERS[kind]()
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append(batches_of(loader))
    again = LOADERS[kind]()
    for number, _ in enumerate(again, 1):
        if number == len(epochs[0]) and not last:
            break
    place, again = as_json(again.state_dict()), LOADERS[kind]()
    again.load_state_dict(place)
    rest = []
    for epoch in range(again.epoch, 3):
        again.set_epoch(epoch)
        rest.append(batches_of(again))
    assert rest == [[], epochs[1], epochs[2]], "nothing is left of the first, nothing is served twice"


@pytest.mark.sweep
@pytest.mark.parametrize("dataset", [list(range(23)), Numbers(23)], ids=["map", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_can_be_stopped_again_and_again(dataset, workers):
    rng, found, place = random.Random(workers), [], None
    for _ in range(30):
        loader = paceline.Loader(dataset, rng.randint(1, 5), num_workers=workers)
        if place:
            loader.load_state_dict(place)
        batches = list(islice(loader, rng.randint(1, 2)))
        if not batches or loader.epoch:
            break
        found += samples_of(batches)
        place = as_json(loader.state_dict())
    assert Counter(found) == Counter(range(23))


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("sent", ["load", "epoch"])
def test_a_running_loop_does_not_continue_from_another_position(kind, sent):
    loader = LOADERS[kind]()
    place = loader.state_dict()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(place) if sent == "load" else loader.set_epoch(3)
    with pytest.raises(UsageError, match="or its position was changed"):
        next(batches)
    assert len(batches_of(loader)) == 6
    assert loader.epoch == (0 if sent == "load" else 3)


def test_a_position_belongs_to_one_dataset_seed_and_order():
    place = paceline.Loader(list(range(23)), 4).state_dict()
    for options, message in (
        (
            {"dataset": list(range(22))},
            "the state is of a dataset of 23 samples; this loader has a dataset of 22",
        ),
        ({"seed": 1}, "the state is of seed=0; this loader has seed=1"),
        ({"shuffle": False}, "the state is of shuffle='samples'; this loader has shuffle='none'"),
        ({"shuffle": "blocks"}, "shuffle='samples'; this loader has shuffle='blocks'"),
    ):
        with pytest.raises(UsageError, match=message):
            paceline.Loader(**{"dataset": list(range(23)), **options}).load_state_dict(place)
    place = paceline.Loader(list(range(23)), 4, shuffle="blocks", block=3).state_dict()
    with pytest.raises(UsageError, match="blocks of 3 samples were shuffled; this loader's have 4"):
        paceline.Loader(list(range(23)), 4, shuffle="blocks", block=4).load_state_dict(place)


def test_a_position_in_a_stream_belongs_to_one_kind_and_number_of_workers():
    own, whole = (paceline.Loader(Numbers(9), 4, stream=stream) for stream in ("own", "whole"))
    with pytest.raises(UsageError, match=r"a stream for every rank .*; this loader has one stream for all"):
        whole.load_state_dict(own.state_dict())
    with pytest.raises(UsageError, match=r"one stream for all ranks .*; this loader has a stream for every"):
        own.load_state_dict(whole.state_dict())
    with pytest.raises(UsageError, match="num_workers=0; this loader has 2"):
        paceline.Loader(Numbers(9), 4, num_workers=2).load_state_dict(own.state_dict())
    with pytest.raises(UsageError, match="not the state of a loader of an iterable dataset"):
        own.load_state_dict(paceline.Loader([1, 2]).state_dict())
    with pytest.raises(
        UsageError, match="the state is of a loader of an iterable dataset; this one's is map-style"
    ):
        paceline.Loader([1, 2]).load_state_dict(own.state_dict())


def damaged(value, wrong):
    """Yield `value` with one entry, at any depth, left out or replaced by each of `wrong`."""
    yield from wrong
    if isinstance(value, dict):
        for name, inner in value.items():
            yield {other: each for other, each in value.items() if other != name}
            yield from ({**value, name: each} for each in damaged(inner, wrong))
    elif isinstance(value, list):
        yield value[:-1]
        yield [*value, *value[:1]]
        for place, inner in enumerate(value):
            yield from ([*value[:place], each, *value[place + 1 :]] for each in damaged(inner, wrong))


WRONG = [None, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "text", [], {}, [None], True]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_damaged_position_is_refused_or_another_valid_one(kind):
    """An impossible state is refused; a possible one is served, and never anything but the data."""
    loader = LOADERS[kind]()
    list(islice(loader, 2))
    place = as_json(loader.state_dict())
    refused = served = 0
    for wrong in damaged(place, WRONG):
        loader = LOADERS[kind]()
        try:
            loader.load_state_dict(wrong)
        except UsageError:
            refused += 1
            continue
        served += 1
        assert set(samples_of(islice(loader, 12))) <= set(range(23))
    assert refused > 5 * served
