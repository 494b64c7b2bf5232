"""Forty ranks on ten hosts in virtual time: all name faults rightly, none blames departures; little traffic."""

from __future__ import annotations

import pytest

from bench_harness.watchdog_simulation import WatchdogSimulation

PER_HOST, RANKS = 4, 40
STALL, LOST = 8.0, 9.0


def healthy(ranks=RANKS, per_host=PER_HOST, **options):
    world = WatchdogSimulation(ranks, per_host=per_host, stall=STALL, lost=LOST, **options)
    world.run(3.0 + 1.5 * world.groups.depth)
    assert not any(world.decisions().values())
    return world


def host(world, number):
    return [each for each in world.ranks if each.host == f"host{number}"]


def outcome(world, seconds=30.0):
    """Let time pass until all have decided; return kind and rank that each names, and the longest time it took."""
    began = world.now
    world.run(seconds, until=world.all_decided)
    decisions = world.decisions()
    assert all(decisions.values()), [rank for rank, each in decisions.items() if each is None]
    errors = {rank: (each.error.kind, each.error.rank) for rank, each in decisions.items()}
    return errors, max(each.at for each in decisions.values()) - began


def texts(world):
    return {str(each.error).partition("\n")[0] for each in world.decisions().values() if each is not None}


# ------------------------------------------------------------------ faults

LEADERS = [0, 4, 36]  # of the first host, of one that others report to, and of one deepest in the tree


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [*LEADERS, 1, 7, 39])
def test_a_killed_rank_is_named_by_all_with_its_signal(rank):
    world = healthy()
    world.end(world.ranks[rank])
    errors, took = outcome(world)
    assert set(errors.values()) == {("gone", rank)}
    assert len(errors) == RANKS - 1
    assert took < 2.0
    assert all("was ended by SIGKILL" in text for text in texts(world))


@pytest.mark.sweep
@pytest.mark.parametrize("number", [0, 1, 9])
def test_a_host_whose_ranks_are_killed_is_named_with_all_of_them(number):
    world = healthy()
    for each in host(world, number):
        world.end(each)
    errors, took = outcome(world)
    first = number * PER_HOST
    assert set(errors.values()) == {("gone", first)}
    assert took < 2.0
    assert any(text.endswith(f"likewise ranks {first + 1}–{first + 3}") for text in texts(world))


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 6, 36])
def test_a_rank_that_raises_is_named_by_all(rank):
    world = healthy()
    world.fail(world.ranks[rank])
    errors, took = outcome(world)
    assert {each for other, each in errors.items() if other != rank} == {("raised", rank)}
    assert took < 2.0


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 6, 36])
def test_a_rank_that_stands_still_is_named_with_its_phase(rank):
    world = healthy()
    world.stall(world.ranks[rank])
    errors, took = outcome(world)
    assert set(errors.values()) == {("stalled", rank)}
    assert took < STALL + 1.0
    assert all("in forward) has stood still for" in text for text in texts(world))


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 6, 36])
def test_a_stopped_rank_is_named(rank):
    world = healthy()
    world.stop(world.ranks[rank])
    errors, took = outcome(world)
    assert set(errors.values()) == {("stopped", rank)}
    assert took < LOST + 1.5


@pytest.mark.sweep
@pytest.mark.parametrize("number", [0, 1, 9])
def test_a_host_whose_ranks_are_stopped_is_not_taken_for_unreachable(number):
    world = healthy()
    for each in host(world, number):
        world.stop(each)
    errors, took = outcome(world)
    assert {kind for kind, _ in errors.values()} == {"stopped"}
    assert len(set(errors.values())) == 1
    assert next(iter(errors.values()))[1] // PER_HOST == number
    assert took < LOST + 1.5


@pytest.mark.sweep
@pytest.mark.parametrize("number", [0, 1, 9])
def test_a_host_that_is_cut_off_is_named_and_names_itself(number):
    world = healthy()
    world.cut_off([f"host{number}"])
    errors, took = outcome(world)
    own = {each.rank for each in host(world, number)}
    assert {errors[rank] for rank in own} == {("cut off", None)}
    assert {errors[rank] for rank in errors if rank not in own} == {("unreachable", number * PER_HOST)}
    assert took < LOST + 1.5


@pytest.mark.parametrize("first", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_each_part_of_a_split_network_names_a_host_of_the_other(first):
    world = healthy()
    world.cut_off([f"host{number}" for number in range(first, 10)])
    errors, took = outcome(world)
    for ranks, other in ((range(first * 4), range(first * 4, 40)), (range(first * 4, 40), range(first * 4))):
        (named,) = {errors[rank] for rank in ranks} - {("cut off", None)} or {("unreachable", other[0])}
        assert named[0] == "unreachable"
        assert named[1] in other
    assert took < LOST + 8.0


def test_a_parent_and_its_child_that_are_killed_together_are_named():
    world = healthy()
    for number in (1, 9):
        for each in host(world, number):
            world.end(each)
    errors, took = outcome(world)
    assert {kind for kind, _ in errors.values()} == {"gone"}
    assert {rank // PER_HOST for _, rank in errors.values()} <= {1, 9}
    assert took < 3.0


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_leader_that_is_only_slow_is_no_failure(rank):
    world = healthy()
    world.stop(world.ranks[rank])
    world.run(4.0)
    world.resume(world.ranks[rank])
    world.run(12.0)
    assert not any(world.decisions().values())
    assert world.ranks[rank].detector.exchange.search.leads
    world.end(world.ranks[6])
    assert set(outcome(world)[0].values()) == {("gone", 6)}


def test_hosts_of_one_rank_form_a_tree_too():
    world = healthy(24, 1)
    world.end(world.ranks[1])
    errors, took = outcome(world)
    assert set(errors.values()) == {("gone", 1)}
    assert took < 2.0


# ------------------------------------------------------------------ no faults


@pytest.mark.parametrize("remaining", [[0], [39], [36, 37, 38, 39], [1, 20, 39]], ids=str)
def test_ranks_that_remain_while_all_others_have_left_blame_nobody(remaining):
    world = healthy()
    for each in world.ranks:
        if each.rank not in remaining:
            world.leave(each)
    world.run(3 * LOST + 15.0)
    assert not any(world.decisions().values()), texts(world)


def test_a_rank_that_left_its_loop_is_named_where_all_others_wait():
    world = healthy()
    world.leave(world.ranks[6])
    world.waiting_since = world.now
    errors, _ = outcome(world)
    assert {each for rank, each in errors.items() if rank != 6} <= {("finished", 6), ("gone", 6)}


def test_a_healthy_rank_sends_and_receives_little():
    """In 200 ranks on 25 hosts, whose leaders have as many neighbours as those of any larger world."""
    world = WatchdogSimulation(200, measured=())
    world.run(7.0)
    before = [(each.messages, each.nbytes_sent, each.nbytes_received) for each in world.ranks]
    world.run(3.0)
    rates = [
        [
            (now - then) / 3.0
            for now, then in zip((r.messages, r.nbytes_sent, r.nbytes_received), b, strict=True)
        ]
        for r, b in zip(world.ranks, before, strict=True)
    ]
    messages, sent, received = (max(column) for column in zip(*rates, strict=True))
    assert messages < 70
    assert sent < 30_000
    assert received < 20_000
    assert all(sum(each.detector.exchange.times().counts.values()) == 200 for each in world.ranks)
