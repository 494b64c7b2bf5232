"""Sharded optimizers: ranks die at any place, and the others train on to the bits of an undisturbed run."""

from __future__ import annotations

import time

import pytest
from sharded_ranks import Fault, Setup, train

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
    ranks = [fork(train, folder, rank, size, setup, faults.get(rank, ())) for rank in range(size)]
    return [result_of(process) for process in ranks]


@pytest.fixture(scope="module")
def alone(killable):
    """`alone(setup)` is the digest of an undisturbed run of one rank."""
    known = {}

    def digest(setup):
        key = setup.kind, setup.steps
        if key not in known:
            ((known[key], _),) = killable.run_ranks(run, 1, setup, {})
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


@pytest.mark.parametrize("step", [0, 1, 7])
@pytest.mark.parametrize("place", ["backward", "confirm", "confirmed", "updated"])
def test_in_the_first_and_the_last_step(killable, alone, place, step):
    check(killable, alone, 3, Setup(), {2: [Fault(place, step)]}, [2])
