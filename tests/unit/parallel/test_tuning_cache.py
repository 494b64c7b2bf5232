"""Candidates, cached results and messages of the tuner, on plain values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cost_model.backward_simulation import ReadyGradient
from paceline.parallel.strategy import STRATEGIES, Sync
from paceline.parallel.tuning.candidates import CallCost, candidate_plans
from paceline.parallel.tuning.tuning_cache import (
    TuningResult,
    cache_file,
    cache_folder,
    load_result,
    save_result,
)

MIB = 1 << 20
LAYERS = [ReadyGradient(4 * MIB, 0.02 * place) for place in range(1, 31)]
KEY = {"model": "0123", "hosts": ["a", "b"]}
ROWS = (
    {"plan": "bucketed, 25 MiB", "seconds": [1.0, 1.1], "ratio": 1.0},
    {"plan": "sharded, 5 MiB", "seconds": [0.8, 0.9], "ratio": 0.81},
    {"plan": "flat", "seconds": [1.2, None], "ratio": 1.2},
)
TUNED = TuningResult(
    plan=Sync(5.0, shard="optimizer"),
    step_seconds=0.85,
    default_seconds=1.05,
    ratio=0.81,
    date="2026-01-02T03:04:05+00:00",
    rows=ROWS,
)


# ---------------------------------------------------------------------- candidates


def test_the_default_comes_first_and_flat_last():
    layers = [ReadyGradient(MIB, 0.005 * place) for place in range(1, 121)]
    plans = candidate_plans(layers, CallCost(1e-3, 1e-9), may_shard=False)
    assert plans[0] == Sync()
    assert plans[-1] == STRATEGIES["flat"]
    assert len(plans) == 5
    assert all(plan.shard == "none" for plan in plans)


def test_sharding_is_tried_at_two_sizes_if_allowed():
    plans = candidate_plans(LAYERS, CallCost(1e-3, 1e-9), may_shard=True)
    assert [plan.shard for plan in plans].count("optimizer") == 2


def test_expensive_calls_lead_to_large_buckets_and_cheap_ones_to_small():
    def sizes(call):
        return [
            plan.bucket_mib for plan in candidate_plans(LAYERS, CallCost(call, 5e-9), may_shard=False)[1:-1]
        ]

    assert max(sizes(0.3)) > 25
    assert min(sizes(1e-6)) < min(sizes(0.3))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0, 0.1)), min_size=1, max_size=30),
    st.floats(0, 0.1),
    st.floats(0, 1e-7),
    st.booleans(),
    st.integers(2, 7),
)
def test_candidates_are_few_and_differ(sizes, call, byte, may_shard, most):
    at, ready = 0.0, []
    for nbytes, later in sizes:
        at += later
        ready.append(ReadyGradient(nbytes, at))
    plans = candidate_plans(ready, CallCost(call, byte), may_shard=may_shard, most=most)
    assert 2 <= len(plans) <= most
    assert len(set(plans)) == len(plans)
    assert plans[0] == Sync()
    assert may_shard or all(plan.shard == "none" for plan in plans)


def test_a_reduce_scatter_passes_the_bytes_once():
    price = CallCost(0.1, 1.0)
    assert price.all_reduce(10) == pytest.approx(10.1)
    assert price.reduce_scatter(10) == pytest.approx(5.1)


# ---------------------------------------------------------------------- cached results


def test_a_result_is_loaded_as_it_was_saved(tmp_path):
    path = save_result(tmp_path / "tuned", KEY, TUNED)
    assert path == cache_file(tmp_path / "tuned", KEY)
    assert load_result(tmp_path / "tuned", KEY) == TUNED
    assert list((tmp_path / "tuned").iterdir()) == [path]


def test_a_single_bucket_can_be_saved(tmp_path):
    flat = TuningResult(
        plan=STRATEGIES["flat"], step_seconds=1.0, default_seconds=1.1, ratio=0.9, date="2026", rows=ROWS
    )
    save_result(tmp_path, KEY, flat)
    found = load_result(tmp_path, KEY)
    assert found is not None
    assert found.plan.bucket_mib == math.inf


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"paceline-tuned"', '"something"'),
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"optimizer"', '"everything"'),
        lambda text: text.replace('"b"', '"another host"'),
        lambda text: text.replace('"ratio": 0.81,\n "date"', '"date"'),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored(tmp_path, damage):
    path = save_result(tmp_path, KEY, TUNED)
    assert path is not None
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert load_result(tmp_path, KEY) is None


def test_other_models_worlds_and_hosts_have_their_own_files(tmp_path):
    save_result(tmp_path, KEY, TUNED)
    assert load_result(tmp_path, {**KEY, "hosts": ["a"]}) is None
    assert load_result(tmp_path / "nowhere", KEY) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert save_result(tmp_path / "file" / "tuned", KEY, TUNED) is None


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "paceline"


# ---------------------------------------------------------------------- messages


def test_the_message_names_the_choice_the_gain_and_the_measurements():
    assert TUNED.sentence == (
        "sharded, 5 MiB, 1.23× faster than the default (bucketed, 25 MiB) in the median of 2 rounds; a step takes "
        "0.85 s. Seconds per step, by rounds: bucketed, 25 MiB: 1 1.1; sharded, 5 MiB: 0.8 0.9; flat: 1.2 –."
    )


def test_the_message_of_a_default_that_stays():
    stays = TuningResult(
        plan=Sync(), step_seconds=1.0, default_seconds=1.0, ratio=1.0, date="2026", rows=ROWS
    )
    assert stays.sentence.startswith("bucketed, 25 MiB, the default, stays: no other plan is faster")
