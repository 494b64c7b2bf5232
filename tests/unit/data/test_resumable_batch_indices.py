"""Epochs and positions in them: every sample once, wherever training stops and however it resumes."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch_strategies import SCHEMES, SEEDS, shares
from paceline.data.map_loader_state import DispatchSettings, LoaderPosition
from paceline.data.resumable_batch_indices import EpochPlan, SampleOrder, ShuffleMode, remaining_samples
from paceline.data.sampling.block_dispatch import BlockDispatch
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import RankPortions
from paceline.errors import UsageError

MODES = st.sampled_from(get_args(ShuffleMode))
ORDERS = st.builds(
    SampleOrder, st.integers(1, 200), MODES, st.integers(1, 30), seed=SEEDS, epoch=st.integers(0, 10**6)
)


def dispatch_settings(policies=("join", "rebalance")):
    return st.builds(
        DispatchSettings, shares(), st.integers(1, 40), SCHEMES, st.integers(1, 12), st.sampled_from(policies)
    )


def served(position, steps):
    """Return the samples of the next `steps` steps on all ranks, and the position after them."""
    found = []
    for _ in range(steps):
        for rank in range(position.epoch.dispatch.ranks):
            found += position.epoch.batch(rank, position.step).tolist()
        position = LoaderPosition(position.epoch, position.step + 1)
    return found, position


def through_json(position):
    return LoaderPosition.of(json.loads(json.dumps(position.state(), allow_nan=False)))


# ------------------------------------------------------------------ the row


@given(order=ORDERS)
@settings(deadline=None)
def test_an_order_holds_every_sample_once(order):
    found = order.at(np.arange(order.samples)).tolist()
    assert sorted(found) == list(range(order.samples))
    if order.shuffle == "none":
        assert found == list(range(order.samples))
    if order.shuffle == "blocks":
        for first in range(0, order.samples, order.block):
            together = found[first : first + order.block]
            assert together == list(range(together[0], together[0] + len(together)))
            assert together[0] % order.block == 0


def test_epochs_and_seeds_differ_and_repeat():
    def order(seed, epoch):
        return tuple(SampleOrder(100, seed=seed, epoch=epoch).at(np.arange(100)).tolist())

    assert order(1, 2) == order(1, 2)
    assert len({order(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25
    assert SampleOrder(10, seed=3, epoch=1).at(np.arange(10)).tolist() == GOLDEN_ROW


GOLDEN_ROW = [7, 6, 5, 4, 1, 2, 3, 0, 8, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": "sample"}, "unknown shuffle mode 'sample'.*did you mean 'samples'"),
        ({"samples": -1}, "-1 samples"),
        ({"block": 0}, "block=0"),
    ],
)
def test_an_invalid_order_is_refused(arguments, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        SampleOrder(**{"samples": 10} | arguments)


# ------------------------------------------------------------------ stopping and going on


@given(order=ORDERS, dispatch=dispatch_settings())
@settings(deadline=None)
def test_an_epoch_serves_every_sample_once(order, dispatch):
    start = LoaderPosition.start(order, dispatch)
    found, end = served(start, start.remaining)
    assert sorted(found) == list(range(order.samples))
    assert end.remaining == 0
    assert remaining_samples(order, [end.epoch.after(end.step)]) == 0


@given(
    order=ORDERS,
    dispatch=dispatch_settings(),
    others=st.lists(dispatch_settings(), max_size=4),
    data=st.data(),
)
@settings(deadline=None, max_examples=300)
def test_resumed_anywhere_by_any_ranks_no_sample_is_lost_or_repeated(order, dispatch, others, data):
    position, found = LoaderPosition.start(order, dispatch), []
    for other in others:
        more, position = served(position, data.draw(st.integers(0, position.remaining)))
        found += more
        position = through_json(position)
        if len(found) == order.samples:
            break
        position = position.redistribute(other)
    more, position = served(position, position.remaining)
    assert sorted(found + more) == list(range(order.samples))


@given(
    order=ORDERS, dispatch=dispatch_settings(("join", "rebalance", "truncate", "drop", "pad")), data=st.data()
)
@settings(deadline=None)
def test_resumed_with_the_same_settings_the_batches_are_the_same(order, dispatch, data):
    try:
        start = LoaderPosition.start(order, dispatch)
    except UsageError:
        return  # a rank without samples, or no full batch: nothing to stop
    whole, _ = served(start, start.remaining)
    before, stopped = served(start, data.draw(st.integers(0, start.remaining)))
    resumed = through_json(stopped)
    assert resumed == stopped
    assert before + served(resumed, resumed.remaining)[0] == whole


@given(
    order=ORDERS,
    dispatch=dispatch_settings(("truncate", "drop", "pad")),
    other=dispatch_settings(),
    data=st.data(),
)
@settings(deadline=None)
def test_samples_that_an_inexact_policy_left_remain_for_an_exact_one(order, dispatch, other, data):
    try:
        start = LoaderPosition.start(order, dispatch)
    except UsageError:
        return
    found, stopped = served(start, data.draw(st.integers(0, start.remaining)))
    assert dispatch.uneven == "pad" or max(Counter(found).values(), default=1) == 1
    if len(set(found)) < order.samples:
        position = through_json(stopped).redistribute(other)
        more, _ = served(position, position.remaining)
        assert sorted({*found, *more}) == list(range(order.samples))
        assert not set(found) & set(more)
        assert max(Counter(more).values()) == 1


def test_the_first_epoch_is_assigned_as_forecast_with_its_seed():
    dispatch = DispatchSettings(RankShares.equal(7), 10, "random", 64, "join")
    first, second = (
        LoaderPosition.start(SampleOrder(50_000, seed=3, epoch=epoch), dispatch) for epoch in (0, 1)
    )
    forecast = BlockDispatch(50_000, RankShares.equal(7), 10, "random", seed=3)
    assert first.epoch.dispatch == forecast
    assert second.epoch.dispatch.counts != forecast.counts


def test_another_number_of_ranks_serves_the_rest():
    dispatch = DispatchSettings(RankShares((5, 5, 2, 8)), 10, "shares", 64, "join")
    found, stopped = served(LoaderPosition.start(SampleOrder(10_000, seed=4), dispatch), 7)
    assert len(found) == 7 * 4 * 64
    rest = stopped.redistribute(DispatchSettings(RankShares.equal(3), 1, "round_robin", 64, "join"))
    assert rest.epoch.dispatch.samples == 10_000 - len(found)
    assert rest.step == 0
    assert rest.remaining == -(-rest.epoch.dispatch.counts[0] // 64)
    more, _ = served(rest, rest.remaining)
    assert sorted(found + more) == list(range(10_000))


@pytest.mark.parametrize(("block", "samples"), [(1, 1003), (1, 96), (2, 200)])
def test_other_ranks_with_the_same_global_batch_size_make_the_same_batches(block, samples):
    """12 samples per step on changing numbers of ranks: the batches are those of a constant number."""

    def by(ranks):
        return DispatchSettings(RankShares.equal(ranks), block, "round_robin", 12 // ranks, "join")

    def steps(position, count):
        ranks = range(position.settings.shares.ranks)
        batches = [
            [position.epoch.batch(rank, position.step + step) for rank in ranks] for step in range(count)
        ]
        return [sorted(np.concatenate(each).tolist()) for each in batches], served(position, count)[1]

    start = LoaderPosition.start(SampleOrder(samples, seed=4), by(2))
    expected, _ = steps(start, start.remaining)
    found, position = steps(start, 3)
    for ranks in (3, 1, 6):
        more, position = steps(through_json(position).redistribute(by(ranks)), 1)
        found += more
    last = through_json(position).redistribute(by(4 // block))
    assert found + steps(last, last.remaining)[0] == expected


def test_redistribution_before_the_first_step_leaves_no_layer():
    start = LoaderPosition.start(
        SampleOrder(100), DispatchSettings(RankShares.equal(4), 1, "round_robin", 5, "join")
    )
    again = start.redistribute(DispatchSettings(RankShares.equal(2), 1, "round_robin", 5, "join"))
    assert again.epoch.layers == ()
    assert again.redistribute(again.settings) is again


def test_no_samples_remain_after_the_last_step():
    start = LoaderPosition.start(
        SampleOrder(10), DispatchSettings(RankShares.equal(2), 1, "round_robin", 5, "join")
    )
    with pytest.raises(UsageError, match=r"(?s)no samples remain to assign.*start the next epoch"):
        served(start, start.remaining)[1].redistribute(
            DispatchSettings(RankShares.equal(3), 1, "round_robin", 5, "join")
        )


def test_an_epoch_needs_samples():
    with pytest.raises(UsageError, match="no samples"):
        LoaderPosition.start(
            SampleOrder(0), DispatchSettings(RankShares.equal(2), 1, "round_robin", 5, "join")
        )


def test_an_assignment_of_other_samples_is_refused():
    dealing = BlockDispatch(90, RankShares.equal(2))
    with pytest.raises(UsageError, match="an assignment of 90 samples, but 100 remain"):
        EpochPlan(SampleOrder(100), (), dealing, RankPortions(dealing.counts, 5))


def test_an_epoch_of_a_trillion_samples_is_resumed_at_once():
    dispatch = DispatchSettings(RankShares((5, 5, 2, 8)), 1000, "random", 64, "join")
    position = LoaderPosition.start(SampleOrder(10**12, seed=1), dispatch)
    position = LoaderPosition(position.epoch, position.remaining // 2)
    position = through_json(position).redistribute(
        DispatchSettings(RankShares.equal(3), 64, "round_robin", 64, "join")
    )
    found, _ = served(position, 3)
    assert len(set(found)) == 3 * 3 * 64
    assert max(found) < 10**12


# ------------------------------------------------------------------ states


def a_state():
    dispatch = DispatchSettings(RankShares((5, 5, 2, 8)), 10, "random", 16, "join")
    _, stopped = served(LoaderPosition.start(SampleOrder(1003, seed=4, epoch=2), dispatch), 3)
    _, stopped = served(
        stopped.redistribute(DispatchSettings(RankShares.equal(3), 7, "round_robin", 16, "rebalance")), 2
    )
    return json.loads(json.dumps(stopped.state()))


def test_a_state_has_the_documented_fields():
    state = a_state()
    assert state["format"] == 2
    assert {name: state[name] for name in ("samples", "seed", "shuffle", "epoch", "step", "uneven")} == {
        "samples": 1003,
        "seed": 4,
        "shuffle": "samples",
        "epoch": 2,
        "step": 2,
        "uneven": "rebalance",
    }
    assert state["done"][0]["parts"] == [5, 5, 2, 8]
    assert state["done"][0]["taken"] == [48, 48, 48, 48]
    assert state["dealt"]["samples"] == 1003 - 4 * 48
    assert LoaderPosition.of(state).state() == state


def changed(path, value):
    state = a_state()
    at = state
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "of format None"),
        ([], "of format 'list'"),
        (changed(["format"], 1), "of format 1.*this version reads format 2"),
        (changed(["samples"], 1004), "an assignment of 1003 samples, but 1004 remain"),
        (changed(["samples"], None), "state.samples is missing"),
        (changed(["samples"], 1003.0), "state.samples is 1003.0: expected `int`, got `float`"),
        (changed(["samples"], "1003"), 'state.samples is "1003": expected `int`, got `str`'),
        (changed(["samples"], -1003), "-1003 samples"),
        (changed(["seed"], float("inf")), "state.seed is Infinity: expected `int`, got `float`"),
        (changed(["shuffle"], "yes"), "state.shuffle is .yes.: invalid enum value"),
        (changed(["shuffle_block"], 0), "block=0"),
        (changed(["step"], 1000), "at step 1000 of"),
        (changed(["step"], -1), "at step -1 of"),
        (changed(["step"], True), "state.step is true: expected `int`, got `bool`"),
        (changed(["batch_size"], 0), "batch_size=0"),
        (changed(["uneven"], "maybe"), "state.uneven is .maybe.: invalid enum value"),
        (changed(["done"], 7), "state.done is 7: expected `array`"),
        (changed(["done"], []), "an assignment of 811 samples, but 1003 remain"),
        (changed(["done", 0, "taken"], [48, 48, 48]), "taken"),
        (changed(["done", 0, "taken", 2], 10**6), "taken"),
        (changed(["done", 0, "taken", 2], -1), "taken"),
        (changed(["done", 0, "taken", 2], 47), "an assignment of 811 samples, but 812 remain"),
        (changed(["done", 0, "parts"], []), "shares in parts of"),
        (changed(["dealt", "parts"], [1, -1, 3]), "shares in parts of 1, -1, 3"),
        (changed(["dealt", "parts"], [10**15, 1]), "shares in parts of"),
        (changed(["dealt", "block"], 0), "block=0"),
        (changed(["dealt", "block"], 2**70), "block="),
        (changed(["dealt", "scheme"], ["random"]), r"state.dealt.scheme is \[.random.\]: expected `str`"),
        (changed(["dealt", "samples"], 812), "an assignment of 812 samples, but 811 remain"),
    ],
)
def test_a_damaged_state_is_refused(state, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        LoaderPosition.of(state)


def leaves(value, path=()):
    """Return the path of every number, string and list in a state."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in leaves(each, (*path, key)))]


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**4), st.integers(), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-1, 9), max_size=4), st.just({}),
)  # fmt: skip


@given(path=st.sampled_from(leaves(a_state())[1:]), value=ANYTHING)
@settings(deadline=None, max_examples=300)
def test_a_state_with_any_change_is_refused_or_a_valid_position(path, value):
    state = copy.deepcopy(a_state())
    at = state
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        position = LoaderPosition.of(state)
    except UsageError:
        return
    batches = [position.epoch.batch(rank, 0) for rank in range(position.epoch.dispatch.ranks)]
    found = [sample for batch in batches for sample in batch.tolist()]
    assert len(found) == len(set(found)) or position.epoch.portions.policy == "pad"
    assert all(0 <= sample < position.epoch.order.samples for sample in found)
