"""Retention of checkpoints: each rule alone, and what holds for every history of saves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.retention import Retention
from paceline.errors import UsageError


def kept(policy, checkpoints):
    """Return what stays of checkpoints, newest first."""
    removed = set(policy.steps_to_remove(checkpoints))
    return [each for each in checkpoints if each[0] not in removed]


def history(saves, policy):
    """Return what is there after every save, removing what the policy says each time; newest first."""
    there = []
    for save in saves:
        there = kept(policy, [save, *there])
        yield there


METRICS = st.none() | st.floats(-10, 10) | st.sampled_from([math.nan, math.inf, -math.inf, 1.0, 2.0])
SAVES = st.lists(
    st.tuples(st.integers(0, 500), METRICS), min_size=1, max_size=40, unique_by=lambda each: each[0]
).map(lambda saves: sorted(saves, key=lambda each: each[0]))
POLICIES = st.builds(
    Retention,
    keep=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 200),
    keep_best=st.integers(0, 4),
)


# ---------------------------------------------------------------------- each rule


def test_the_newest_stay():
    saves = [(step, None) for step in (500, 400, 300, 200, 100)]
    assert Retention().steps_to_remove(saves) == [100, 200, 300]
    assert Retention(keep=1).steps_to_remove(saves) == [100, 200, 300, 400]
    assert Retention(keep=9).steps_to_remove(saves) == []
    assert Retention().steps_to_remove([]) == []


def test_the_first_checkpoint_at_or_after_each_multiple_stays_forever():
    policy = Retention(keep=1, keep_every=1000)
    steps = (4100, 4000, 2900, 2500, 1030, 1010, 990, 10)
    # 1010 stands for 1000 and 2500 for 2000; nothing was saved between 3000 and 4000.
    assert kept(policy, [(step, None) for step in steps]) == [
        (4100, None), (4000, None), (2500, None), (1010, None),
    ]  # fmt: skip


def test_saves_on_multiples_are_kept_as_they_are():
    policy = Retention(keep=1, keep_every=100)
    *_, there = history([(step, None) for step in range(50, 1001, 50)], policy)
    assert [step for step, _ in there] == list(range(1000, 99, -100))


def test_the_begin_of_a_run_is_no_multiple():
    assert Retention(keep=1, keep_every=100).steps_to_remove([(60, None), (30, None), (0, None)]) == [0, 30]


def test_a_checkpoint_that_stands_for_a_multiple_stays_when_the_one_before_it_is_removed():
    policy = Retention(keep=1, keep_every=100)
    *_, there = history([(step, None) for step in (90, 130, 170, 190, 260)], policy)
    assert [step for step, _ in there] == [260, 130]


def test_those_with_the_lowest_metric_stay():
    saves = [(500, 3.0), (400, 1.0), (300, 2.0), (200, 0.5), (100, 4.0)]
    assert Retention(keep=1, keep_best=2).steps_to_remove(saves) == [100, 300]
    assert Retention(keep=1, keep_best=0).steps_to_remove(saves) == [100, 200, 300, 400]


def test_of_equal_metrics_the_newer_is_better():
    saves = [(400, 9.0), (300, 1.0), (200, 1.0), (100, 1.0)]
    assert Retention(keep=1, keep_best=2).steps_to_remove(saves) == [100]
    assert Retention(keep=1, keep_best=1).steps_to_remove(saves) == [100, 200]


@pytest.mark.parametrize("metric", [None, math.nan, math.inf, -math.inf])
def test_a_checkpoint_without_a_finite_metric_is_never_one_of_the_best(metric):
    saves = [(300, 5.0), (200, metric), (100, 4.0)]
    assert Retention(keep=1, keep_best=3).steps_to_remove(saves) == [200]
    assert Retention(keep=1, keep_best=3).steps_to_remove([(300, metric), (200, metric)]) == [200]


def test_a_checkpoint_that_several_rules_keep_counts_for_each():
    """The newest is also the best: the second best is not kept in its place."""
    saves = [(300, 1.0), (200, 2.0), (100, 3.0)]
    assert Retention(keep=1, keep_best=1).steps_to_remove(saves) == [100, 200]


# ---------------------------------------------------------------------- every history


@given(SAVES, POLICIES)
def test_the_newest_is_never_removed_and_enough_stay(saves, policy):
    newest_first = saves[::-1]
    there = kept(policy, newest_first)
    assert there[: policy.keep] == newest_first[: policy.keep]
    finite = [each for each in saves if each[1] is not None and math.isfinite(each[1])]
    assert len(there) <= policy.keep + policy.keep_best + (500 // (policy.keep_every or 501))
    assert sum(each in there for each in finite) >= min(policy.keep_best, len(finite))


@given(SAVES, POLICIES)
def test_removing_again_removes_nothing(saves, policy):
    there = kept(policy, saves[::-1])
    assert policy.steps_to_remove(there) == []


@given(SAVES, POLICIES)
def test_nothing_that_was_removed_would_stay_later(saves, policy):
    """So it makes no difference whether checkpoints are removed after every save, or all at once at the end."""
    for count, there in enumerate(history(saves, policy), start=1):
        assert there == kept(policy, saves[:count][::-1])


@given(SAVES, POLICIES, st.data())
def test_a_crash_in_the_middle_of_removing_changes_nothing(saves, policy, data):
    newest_first = saves[::-1]
    removed = policy.steps_to_remove(newest_first)
    done = set(removed[: data.draw(st.integers(0, len(removed)))])
    assert kept(policy, [each for each in newest_first if each[0] not in done]) == kept(policy, newest_first)


@given(SAVES, POLICIES)
def test_a_policy_that_keeps_less_keeps_a_part_of_what_stays(saves, policy):
    newest_first = saves[::-1]
    there = kept(policy, newest_first)
    for less in (
        replace(policy, keep=max(1, policy.keep - 1)),
        replace(policy, keep_best=max(0, policy.keep_best - 1)),
        replace(policy, keep_every=None),
        replace(policy, keep_every=policy.keep_every and 2 * policy.keep_every),
    ):
        assert set(kept(less, newest_first)) <= set(there)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "bad",
    [
        {"keep": 0}, {"keep": -1}, {"keep": 2.0}, {"keep": True}, {"keep": None}, {"keep": "2"},
        {"keep_every": 0}, {"keep_every": -5}, {"keep_every": 10.0}, {"keep_every": True}, {"keep_every": "1h"},
        {"keep_best": -1}, {"keep_best": 1.5}, {"keep_best": None}, {"keep_best": False},
    ],
)  # fmt: skip
def test_invalid_numbers_are_refused_by_name(bad):
    (name,) = bad
    with pytest.raises(UsageError, match=rf"^{name}={bad[name]!r}\n  → "):
        Retention(**bad)


@pytest.mark.parametrize("steps", [(100, 200), (200, 200), (300, 100, 200)])
def test_checkpoints_in_another_order_are_refused(steps):
    with pytest.raises(ValueError, match="newest first"):
        Retention(keep=1).steps_to_remove([(step, None) for step in steps])
