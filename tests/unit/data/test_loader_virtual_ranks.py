"""Virtual ranks of the loader: any number of ranks serves the same leaves, in the same steps, from any position."""

from __future__ import annotations

import random
from itertools import islice

import pytest

import paceline
from numbered_dataset import Numbers
from paceline._core.step_state import wait_counters
from paceline._core.summation_tree import leaves_of
from paceline.data.rank_place import RankPlace
from paceline.errors import UsageError
from served_leaves import Augmented, collate, on_ranks, serve

OPTIONS = [
    {},
    {"uneven": "rebalance", "shuffle": False},
    {"uneven": "truncate", "dispatch": "random", "seed": 3},
    {"uneven": "drop", "block": 2},
    {"uneven": "pad", "shuffle": "blocks", "block": 3},
    {"dispatch": "random", "block": 4, "seed": -5},
]


@pytest.mark.sweep
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.get("uneven", "join"))
@pytest.mark.parametrize("virtual", [1, 2, 3, 5, 8])
def test_any_number_of_ranks_serves_the_same(as_rank, virtual, options):
    def make():
        return paceline.Loader(Augmented(67), 3, collate_fn=collate, virtual_ranks=virtual, **options)

    one, state = on_ranks(as_rank, 1, make)
    assert {leaf for _, _, leaf in one} == set(range(virtual))
    assert len(one) == virtual * len(make())
    for ranks in range(2, virtual + 1):
        assert on_ranks(as_rank, ranks, make) == (one, state)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12))
def test_every_sample_is_served_once_and_as_to_that_many_real_ranks(as_rank, seed):
    rng = random.Random(seed)
    virtual, size, batch_size = rng.randint(1, 8), rng.randint(1, 90), rng.choice([1, 2, 5, 16])
    options = {
        "uneven": rng.choice(["join", "rebalance"]),
        "dispatch": rng.choice(["round_robin", "random"]),
        "block": rng.randint(1, min(size, 6)),
        "seed": seed,
    }
    if rng.random() < 0.5:
        parts = [rng.choice([0, 1, 2, 5]) for _ in range(virtual - 1)] + [1]
        options["shares"] = [part / sum(parts) for part in parts]
    real = {}
    for rank in range(virtual):
        as_rank(rank, virtual)
        loader = paceline.Loader(list(range(size)), batch_size, **options)
        for step, batch in enumerate(loader):
            assert batch.ends_step
            assert wait_counters.leaf is None
            real[step, rank] = batch.tolist(), batch.samples
    ranks = rng.randint(1, virtual)
    found, _ = on_ranks(
        as_rank,
        ranks,
        lambda: paceline.Loader(list(range(size)), batch_size, virtual_ranks=virtual, **options),
    )
    assert {(step, leaf): each[:2] for (_, step, leaf), each in found.items()} == real
    samples = [sample for batch, count, *_ in found.values() if count for sample in batch]
    assert sorted(samples) == list(range(size))


def test_placeholders_come_with_random_numbers_too(as_rank):
    def make():
        return paceline.Loader(Augmented(5), 2, collate_fn=collate, virtual_ranks=4)

    one, _ = on_ranks(as_rank, 1, make)
    assert [samples for _, samples, *_ in one.values()] == [2, 1, 1, 1]
    tail, _ = on_ranks(
        as_rank, 1, lambda: paceline.Loader(Augmented(5), 1, collate_fn=collate, virtual_ranks=4)
    )
    assert [samples for _, samples, *_ in tail.values()] == [1, 1, 1, 1, 1, 0, 0, 0]
    assert all(len(batch["samples"]) == 2 for batch, samples, *_ in tail.values() if not samples)


# ------------------------------------------------------------------ lengths and positions


def test_lengths_count_steps():
    loader = paceline.Loader(list(range(40)), 3, virtual_ranks=4)
    assert len(loader) == 4
    left = [(loader.steps_left, batch.ends_step) for batch in loader]
    assert left == [(steps - ends, ends) for steps in (4, 3, 2, 1) for ends in (False, False, False, True)]
    assert str(loader) == (
        "40 samples to 4 virtual ranks on 1 rank: 4 steps on every rank; every sample is used once"
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options", OPTIONS[:3] + OPTIONS[4:], ids=lambda options: options.get("uneven", "join")
)
@pytest.mark.parametrize("before", [1, 2, 4, 6])
def test_an_epoch_continues_on_any_number_of_ranks(as_rank, before, options):
    def make():
        return paceline.Loader(Augmented(75), 3, collate_fn=collate, virtual_ranks=6, **options)

    whole, end = on_ranks(as_rank, 1, make)
    first, state = on_ranks(as_rank, before, make, steps=2)
    assert state["step"] == 2
    for after in (1, 3, 5):
        rest, last = on_ranks(as_rank, after, make, state=state)
        assert {**first, **{(e, step + 2, leaf): each for (e, step, leaf), each in rest.items()}} == whole
        assert last == end


def test_a_step_that_was_not_ended_is_repeated():
    def make():
        return paceline.Loader(Augmented(), 3, collate_fn=collate, virtual_ranks=4)

    whole = serve(make())
    for batches in range(1, 12):
        loader = make()
        list(islice(loader, batches))
        state = loader.state_dict()
        assert state["step"] == batches // 4
        assert loader.steps_left == 3 - batches // 4
        if batches < 12:
            again = make()
            again.load_state_dict(state)
            found = serve(again)
            shifted = {(e, step + batches // 4, leaf): each for (e, step, leaf), each in found.items()}
            assert shifted == {key: each for key, each in whole.items() if key[1] >= batches // 4}


def test_a_state_of_other_virtual_ranks_is_redistributed(as_rank):
    for before, after in ((4, 3), (3, 7), (None, 3), (4, None)):
        as_rank(0, 1)
        loader = paceline.Loader(list(range(50)), 2, virtual_ranks=before)
        taken = [sample for batch in islice(loader, 2 * (before or 1)) for sample in batch.tolist()]
        again = paceline.Loader(list(range(50)), 2, virtual_ranks=after)
        again.load_state_dict(loader.state_dict())
        rest = [sample for batch in again if batch.samples for sample in batch.tolist()]
        assert sorted(taken + rest) == list(range(50))


def test_two_epochs_and_an_abandoned_one():
    loader = paceline.Loader(list(range(20)), 2, virtual_ranks=3)
    list(islice(loader, 2))
    assert wait_counters.leaf is None
    assert serve(loader) == serve_epoch(1)
    loader.set_epoch(0)
    assert serve(loader) == serve_epoch(0)


def serve_epoch(epoch):
    loader = paceline.Loader(list(range(20)), 2, virtual_ranks=3)
    loader.set_epoch(epoch)
    return serve(loader)


def test_facts_name_the_virtual_ranks():
    for dataset, stream in ((list(range(8)), None), (Numbers(8), "whole")):
        loader = paceline.Loader(dataset, 2, virtual_ranks=3, stream=stream)
        assert "virtual_ranks=3" in loader._source.facts()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_ranks": 0}, "virtual_ranks=0 with 1 ranks"),
        ({"virtual_ranks": 2.0}, "virtual_ranks=2.0"),
        ({"virtual_ranks": True}, "virtual_ranks=True"),
        (
            {"virtual_ranks": 2, "shares": "measured"},
            "shares='measured' with virtual ranks, whose samples must not",
        ),
        ({"virtual_ranks": 2, "redeal_every": 3}, "redeal_every=3 with virtual ranks"),
        ({"virtual_ranks": 3, "shares": [0.5, 0.5]}, "with virtual_ranks=3, .*shares"),
        ({"virtual_ranks": 9, "uneven": "pad"}, "with virtual_ranks=9, rank 8 has no samples"),
        (
            {"virtual_ranks": 3, "uneven": "error", "batch_size": 1},
            "with virtual_ranks=3, ranks have unequal",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        paceline.Loader(list(range(8)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "virtual_ranks with an iterable dataset of which every rank reads its own stream"),
        (
            {"stream": "own"},
            "virtual_ranks with an iterable dataset of which every rank reads its own stream",
        ),
        ({"stream": "whole", "shares": [0.5, 0.5]}, "batches of large shares would wait in memory"),
        ({"stream": "whole", "uneven": "rebalance"}, "needs a dataset with a length"),
    ],
)
def test_what_does_not_go_with_a_stream_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        paceline.Loader(Numbers(8), virtual_ranks=2, **options)


def test_more_ranks_than_virtual_ranks_are_refused(as_rank):
    as_rank(1, 3)
    with pytest.raises(UsageError, match=r"\[rank 1\] virtual_ranks=2 with 3 ranks"):
        paceline.Loader(list(range(8)), virtual_ranks=2)


class Slots:
    """A batch with its own number, and no further attributes."""

    __slots__ = ("samples",)

    def __init__(self, samples):
        self.samples = len(samples)


def test_a_batch_that_cannot_carry_the_end_of_a_step_is_refused_only_with_virtual_ranks():
    assert [batch.samples for batch in paceline.Loader(list(range(3)), 2, collate_fn=Slots)] == [2, 1]
    with pytest.raises(UsageError, match=r"type Slots can't carry \.ends_step"):
        list(paceline.Loader(list(range(3)), 2, collate_fn=Slots, virtual_ranks=2))


@pytest.mark.sweep
@pytest.mark.parametrize("virtual", [None, *range(1, 13)])
def test_a_place_names_who_serves_whom(virtual):
    for ranks in range(1, (virtual or 6) + 1):
        places = [RankPlace(rank, ranks, virtual) for rank in range(ranks)]
        assert [served for place in places for served in place.own] == list(range(places[0].served))
        assert all(places[0].server(served) == place.rank for place in places for served in place.own)
        assert max(len(place.own) for place in places) == places[0].most_own
        if virtual:
            assert places[-1].own == leaves_of(ranks - 1, ranks, virtual)
