"""`Loader.steps` serves whole optimizer steps, and `Loader.rejoin` goes on with other ranks from the same position."""

from __future__ import annotations

import multiprocessing
from itertools import islice

import pytest

import paceline
from numbered_dataset import Numbers
from paceline.errors import UsageError
from served_leaves import Augmented, collate, drawn, plain, serve


def make(size=10, **options):
    return paceline.Loader(list(range(size)), **{"batch_size": 4, **options})


def by_step(steps):
    return [[batch.tolist() for batch in batches] for batches in steps]


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("dataset", [list(range(10)), Numbers(10)], ids=["map", "stream"])
def test_steps_are_those_of_the_epochs(dataset):
    loader = paceline.Loader(dataset, batch_size=4)
    epochs = [[[batch.tolist()] for batch in loader] for _ in range(3)]
    again = paceline.Loader(dataset, batch_size=4)
    assert by_step(again.steps()) == epochs[0]
    assert by_step(again.steps()) == []
    assert by_step(again.steps(epochs=3)) == epochs[1] + epochs[2]
    assert again.state_dict() == loader.state_dict()


def test_a_step_has_the_batches_of_all_own_virtual_ranks():
    def options():
        return {"batch_size": 3, "collate_fn": collate, "virtual_ranks": 4}

    loader, expected = paceline.Loader(Augmented(), **options()), []
    for _ in range(2):
        expected += [(found[0], found[3]) for found in serve(loader).values()]
        after = drawn()
    again, found = paceline.Loader(Augmented(), **options()), []
    for batches in again.steps(epochs=2):
        leaves = [(plain(batch), drawn()) for batch in batches]
        assert len(leaves) == 4
        found += leaves
    assert found == expected
    assert drawn() == after, "the random numbers after an epoch are those of all ranks"
    stream = paceline.Loader(Numbers(20), 2, stream="whole", virtual_ranks=3)
    assert [len(step) for step in by_step(stream.steps(epochs=2))] == [3] * 8


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 2, "batch_size": 2}], ids=["plain", "virtual"])
def test_steps_start_from_the_position(options):
    whole = by_step(make(**options).steps(epochs=3))
    loader = make(**options)
    taken = by_step(islice(loader.steps(epochs=3), 4))
    state = loader.state_dict()
    assert taken + by_step(loader.steps(epochs=3)) == whole, "after an abandoned loop"
    again = make(**options)
    again.load_state_dict(state)
    assert taken + by_step(again.steps(epochs=3)) == whole
    again.set_epoch(2)
    assert by_step(again.steps(epochs=3)) == whole[6:]
    again.set_epoch(2)
    assert by_step(again.steps(epochs=2)) == []


def test_a_step_whose_state_is_loaded_again_is_repeated():
    loader, found = make(virtual_ranks=4, batch_size=1), []
    for number, batches in enumerate(loader.steps(epochs=2)):
        before = loader.state_dict()
        step = [batch.tolist() for batch in islice(batches, 2 if number % 3 == 1 else 4)]
        if number % 3:
            loader.load_state_dict(before)
        else:
            found.append(step)
    assert found == by_step(make(virtual_ranks=4, batch_size=1).steps(epochs=2))


def test_nothing_happens_before_the_first_batch_of_a_step_is_requested():
    class Read(list):
        def __getitem__(self, number):
            read.append(number)
            return number

    read, counts = [], []
    for batches in paceline.Loader(Read(range(10)), batch_size=4).steps(epochs=2):
        counts.append(len(read))
        list(batches)
    assert counts == [0, 4, 8, 10, 14, 18]


@pytest.mark.parametrize("used", [0, 1, 2])
def test_a_step_of_which_batches_are_left_is_an_error(used):
    steps = make(virtual_ranks=3).steps()
    list(islice(next(steps), used))
    with pytest.raises(UsageError, match="not all used before the next step"):
        next(steps)


def test_the_only_batch_of_a_step_can_be_taken_without_a_loop():
    assert [next(batches).samples for batches in make().steps()] == [4, 4, 2]


@pytest.mark.parametrize("epochs", [0, -1, 1.0, None])
def test_invalid_numbers_of_epochs_are_refused(epochs):
    with pytest.raises(UsageError, match="epochs="):
        make().steps(epochs)


# ------------------------------------------------------------------ other ranks


def use(loader, steps=None):
    """Return the samples of the next steps of this epoch, without those of placeholders."""
    taken = islice(loader.steps(), steps)
    return [sample for batches in taken for batch in batches if batch.samples for sample in batch.tolist()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"uneven": "rebalance", "dispatch": "random", "block": 2},
        {"shares": "measured"},
        {"virtual_ranks": 6},
    ],
    ids=["join", "rebalance", "measured", "virtual"],
)
def test_an_epoch_goes_on_with_other_ranks(as_rank, options):
    as_rank(0, 1)
    joiners = [make(61, batch_size=2, **options) for _ in range(4)]
    members, found, state = [], [], None
    for size, steps in ((3, 1), (3, 1), (2, 1), (4, 1), (1, 1), (1, 0), (3, None)):
        members, states = (members + joiners)[:size], []
        for rank, loader in enumerate(members):
            as_rank(rank, size)
            loader.rejoin()
            if state is not None:
                loader.load_state_dict(state)
            assert loader.epoch == 0
            assert 0 < loader.steps_left <= len(loader)
            found += use(loader, steps)
            states.append(loader.state_dict())
        state = states[0]
        assert all(each == state for each in states)
    assert sorted(found) == list(range(61))


def test_the_position_does_not_depend_on_ranks_in_between(as_rank):
    as_rank(0, 3)
    direct, roundabout, late = (make(50, batch_size=2) for _ in range(3))
    for loader in (direct, roundabout, late):
        use(loader, 1)
    as_rank(0, 4)
    roundabout.rejoin()
    assert roundabout.steps_left == 6
    late.rejoin()
    as_rank(0, 3)
    for loader in (direct, roundabout, late):
        loader.rejoin()
    assert direct.steps_left == roundabout.steps_left == late.steps_left == 8
    assert direct.state_dict() == roundabout.state_dict() == late.state_dict()


def test_more_ranks_than_virtual_ranks_may_be_passed_through(as_rank):
    as_rank(0, 2)
    loader = make(30, virtual_ranks=3, batch_size=2)
    use(loader, 1)
    before = loader.state_dict()
    as_rank(0, 5)
    loader.rejoin()
    assert loader.state_dict() == before
    with pytest.raises(UsageError, match="virtual_ranks=3 with 5 ranks"):
        len(loader)
    as_rank(0, 1)
    loader.rejoin()
    assert (loader.state_dict(), loader.steps_left, len(loader)) == (before, 4, 5)
    assert [len(step) for step in by_step(loader.steps())] == [3] * 4


def test_iterations_of_earlier_ranks_end(as_rank):
    loader = make(30)
    batches, steps = iter(loader), loader.steps()
    next(batches)
    as_rank(0, 2)
    loader.rejoin()
    with pytest.raises(UsageError, match=r"with paceline.Elastic, loop over steps\(\)"):
        next(batches)
    assert len(by_step(steps)) == 4


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_earlier_ranks_end(as_rank, persistent):
    loader = make(30, num_workers=1, persistent_workers=persistent, batch_size=2)
    before, seen = {each.pid for each in multiprocessing.active_children()}, []
    for number, batches in enumerate(loader.steps()):
        if number == 2:
            as_rank(0, 2)
            loader.rejoin()
        list(batches)
        seen.append({each.pid for each in multiprocessing.active_children()} - before)
    assert [len(each) for each in seen] == [1] * len(seen)
    assert seen[1] != seen[2]
    del batches, loader
    assert {each.pid for each in multiprocessing.active_children()} == before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shares": [1.0]}, "a share for each rank"),
        ({"uneven": "drop"}, "uneven='drop'"),
        ({"uneven": "error"}, "uneven='error'"),
        ({"dataset": Numbers(9)}, "an iterable dataset"),
    ],
)
def test_loaders_that_cannot_move_are_refused(options, problem):
    loader = paceline.Loader(**{"dataset": list(range(9)), "batch_size": 3, **options})
    for refused in (loader.check_rejoin, loader.rejoin):
        with pytest.raises(UsageError, match=f"a Loader with {problem}.* can't move to other ranks"):
            refused()
    assert len(by_step(loader.steps())) == 3


def test_with_virtual_ranks_shares_and_policies_move():
    make(virtual_ranks=2, shares=[0.5, 0.5], uneven="drop").check_rejoin()
