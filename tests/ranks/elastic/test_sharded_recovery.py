"""Sharded optimizers: ranks die at any place, and the others train on to the bits of an undisturbed run."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sharded_ranks import Fault, Setup, start_run, train

import paceline

ONE_BUCKET = paceline.Sync.of("sharded")


def result_of(process, timeout=60.0):
    """Return what a rank has sent last; None: it was killed."""
    end = time.monotonic() + timeout
    while True:
        try:
            message = process.receive(end - time.monotonic())
        except EOFError:
            return None
        if message[0] != "step":
            return message[1:]


def run(fork, folder, size, setup, faults):
    start_run(folder)
    ranks = [fork(train, folder, rank, size, setup, faults.get(rank, ())) for rank in range(size)]
    return [result_of(process) for process in ranks]


@pytest.fixture(scope="module")
def alone(killable):
    """`alone(setup)` is the digest of an undisturbed run of one rank."""
    known = {}

    def digest(setup):
        key = setup.kind, setup.steps
        if key not in known:
            ((known[key], _),) = killable.run_ranks(run, 1, replace(setup, waits_at=-1, pause=0.0), {})
        return known[key]

    return digest


def check(killable, alone, size, setup, faults, worlds):
    """Run ranks with faults; the survivors form `worlds` and have the digest of an undisturbed run."""
    killed = {rank for rank, each in faults.items() if not all(fault.error for fault in each)}
    results = killable.run_ranks(run, size, setup, faults, timeout=120)
    assert {rank for rank, result in enumerate(results) if result is None} == killed, results
    for result in results:
        assert result in (None, (alone(setup), worlds))


PLACES = ["forward", "backward", "launch", "confirm", "confirmed", "updated"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_one_of_some_ranks_dies(killable, alone, size, backend, place):
    faults = {1: [Fault(place)]}
    check(killable, alone, size, Setup(backend=backend), faults, [size - 1])


@pytest.mark.sweep
@pytest.mark.parametrize("step", [0, 1, 7])
@pytest.mark.parametrize("place", ["backward", "confirm", "confirmed", "updated"])
def test_in_the_first_and_the_last_step(killable, alone, place, step):
    check(killable, alone, 3, Setup(), {2: [Fault(place, step)]}, [2])


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("place", ["backward", "confirm", "confirmed", "updated", "between"])
def test_between_the_updates_of_two_optimizers(killable, alone, backend, place):
    check(killable, alone, 3, Setup("muon", backend), {0: [Fault(place)]}, [2])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_one_bucket(killable, alone, kind):
    for faults in ({1: [Fault("confirm")]}, {1: [Fault("updated")]}):
        check(killable, alone, 3, Setup(kind, sync=ONE_BUCKET), faults, [2])


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("place", ["gather", "updated"])
def test_in_the_gathers_of_four(killable, alone, backend, place):
    faults = {2: [Fault(place, count=1 if place == "updated" else 2)]}
    check(
        killable, alone, 4, Setup(backend=backend, sync=paceline.Sync(0.01, shard="optimizer")), faults, [3]
    )


# Where the confirmation passes on some ranks only.


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("held", [(0,), (2,), (0, 2)])
def test_a_confirmation_that_fails_on_some_ranks(killable, alone, kind, held):
    faults = {rank: [Fault("confirmed", error=True)] for rank in held} | {1: [Fault("confirmed", wait=0.2)]}
    check(killable, alone, 3, Setup(kind), faults, [2])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_is_repeated_whose_gradients_only_some_ranks_have(killable, alone, kind):
    faults = {1: [Fault("clip", error=True)], 2: [Fault("confirm", wait=0.2)]}
    check(killable, alone, 3, Setup(kind), faults, [2])


def test_an_optimizer_that_a_failure_keeps_from_its_step(killable, alone):
    faults = {0: [Fault("between", error=True)], 1: [Fault("updated")]}
    check(killable, alone, 3, Setup("muon"), faults, [2])


# Several deaths.


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("places", [("backward", "updated"), ("confirm", "confirmed")])
def test_down_to_one_rank(killable, alone, kind, places):
    faults = {0: [Fault(places[0], 2)], 2: [Fault(places[1], 4)]}
    check(killable, alone, 3, Setup(kind), faults, [2, 1])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_next_world_dies_before_its_first_update(killable, alone, kind):
    faults = {1: [Fault("backward")], 2: [Fault("forward", count=4)]}  # the second time in the repeated step
    check(killable, alone, 3, Setup(kind), faults, [2, 1])


@pytest.mark.parametrize(
    "places", [("launch", "launch"), ("confirmed", "updated"), ("confirmed", "confirmed")]
)
def test_two_of_four_that_are_no_neighbours(killable, alone, places):
    faults = {0: [Fault(places[0])], 2: [Fault(places[1])]}
    results = killable.run_ranks(run, 4, Setup(), faults, timeout=120)
    assert [result is None for result in results] == [True, False, True, False]
    for result in results[1::2]:
        assert result[0] == alone(Setup())
        assert result[1][-1] == 2


@pytest.mark.sweep
@pytest.mark.parametrize("place", ["exchange", "exchanged", "rejoined"])
@pytest.mark.parametrize(("first", "step"), [("backward", 3), ("confirm", 4), ("updated", 4)])
def test_in_recovery(killable, alone, first, step, place):
    faults = {1: [Fault(first)], 3: [Fault(place, step)]}
    results = killable.run_ranks(run, 4, Setup(), faults, timeout=120)
    assert [result is None for result in results] == [False, True, False, True], results
    for result in results[::2]:
        assert result[0] == alone(Setup())
        assert result[1][-1] == 2


def test_two_neighbours_of_four_without_a_checkpoint(killable):
    faults = {1: [Fault("forward")], 2: [Fault("forward")]}
    results = killable.run_ranks(run, 4, Setup(), faults, timeout=120)
    for result in results[::3]:
        assert "state is lost with host/1/0 (dead), host/2/0 (dead), and there is no checkpoint" in result[0]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_two_neighbours_of_four_go_back_to_the_checkpoint(killable, alone, kind):
    faults = {1: [Fault("forward", 5)], 2: [Fault("forward", 5)]}
    setup = Setup(kind, checkpoint=2)
    results = killable.run_ranks(run, 4, setup, faults, timeout=120)
    assert results[::3] == [(alone(Setup(kind)), [2])] * 2, results


@pytest.mark.parametrize(
    ("sync", "problem"),
    [
        (paceline.Sync(0.02, shard="gradients"), "sync='sharded-gradients'"),
        (paceline.Sync.of("full-shard"), "sync='full-shard'"),
    ],
)
def test_other_ways_to_shard_are_refused(killable, sync, problem):
    setup = Setup("plain", sync=sync)
    for (text,) in killable.run_ranks(run, 2, setup, {}, timeout=120):
        assert f"live recovery with {problem}" in text


# Deaths, leaves and joins at random times.


def storm(fork, folder, seed, setup):
    """Let ranks die, leave and join at random times; return the events and the results of those that are left."""
    start_run(folder)
    rng, size, events = random.Random(seed), 3, []
    alive = {rank: fork(train, folder, rank, size, setup) for rank in range(size)}
    wait_for_world(alive, size)
    for incarnation in range(1, 6):
        time.sleep(rng.uniform(0.0, 0.3))
        event = "join" if len(alive) < 2 else rng.choice(["kill", "kill", "leave", "join"])
        events.append(event)
        if event == "join":
            rank = 10 * incarnation
            alive[rank] = fork(train, folder, rank, size, setup, (), incarnation, True)
        else:
            process = alive.pop(rng.choice(list(alive)))
            process.kill(signal.SIGKILL if event == "kill" else signal.SIGTERM)
        wait_for_world(alive, len(alive))
    (Path(folder) / "over").touch()
    return events, [result_of(process) for process in alive.values()]


def wait_for_world(alive, size):
    """Wait until all ranks train in a world of a size."""
    for process in alive.values():
        while (message := process.receive(60))[0] != "step" or message[2] != size:
            assert message[0] == "step", message


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(8))
def test_storms(killable, alone, seed):
    setup = Setup(
        ["adamw", "muon"][seed % 2], ["paceline", "gloo"][seed // 2 % 2], steps=120, pause=0.01, waits_at=100
    )
    events, results = killable.run_ranks(storm, seed, setup, timeout=200)
    assert results, events
    assert {result[0] for result in results} == {alone(setup)}, (events, results)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [2, 3, 5, 7])
def test_storms_with_master_weights(killable, alone, seed):
    setup = Setup("masters", ["paceline", "gloo"][seed // 2 % 2], steps=120, pause=0.01, waits_at=100)
    events, results = killable.run_ranks(storm, seed, setup, timeout=200)
    assert results, events
    assert {result[0] for result in results} == {alone(setup)}, (events, results)
