"""Entries of a profile about training steps: round trip, merging, and refusal of damaged fields."""

from __future__ import annotations

import copy
import math

import pytest

from paceline.cost_model.profile import Profile
from paceline.errors import UsageError
from step_profile import exchange, model, profile

PROFILE = profile()


def test_load_returns_the_saved_values(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE


def test_an_older_file_may_lack_the_entries_about_steps():
    record = PROFILE.to_json()
    for name in ("exchanges", "models", "contentions"):
        del record[name]
    assert Profile.from_json(record) == Profile()


def test_a_new_measurement_replaces_the_old_one():
    again = model(batch=4)
    merged = PROFILE.merged(Profile(models=(again, model(batch=8))))
    assert len(merged.models) == 2
    assert merged.models[0] is again
    assert merged.exchanges == PROFILE.exchanges


def test_exchanges_are_compared_where_both_have_them():
    slower = Profile(exchanges=(exchange("all-reduce", False, call=0.1),))
    found = PROFILE.compare(slower)
    assert len(found) == 3
    assert all(each.what.startswith("all-reduce of paceline alone on gloo, lab, 2 ranks") for each in found)
    assert found[0].ratio > 10
    assert found[0].clear


def change(record, path, value):
    *parents, last = path
    for step in parents:
        record = record[step]
    if value is KeyError:
        del record[last]
    else:
        record[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("models", 0, "forward"), 0, r"models\[0\].forward is 0: expected `float` > 0"),
        (("models", 0, "spread"), -1, r"spread is -1"),
        (("models", 0, "parameters"), [], "parameters in the order"),
        (("models", 0, "parameters", 0, "seconds"), 0.9, "parameters in the order"),
        (("models", 0, "parameters", 9, "seconds"), 1.5, "parameters in the order"),
        (("models", 0, "parameters", 2, "nbytes"), 1.5, r"parameters\[2\].nbytes is 1.5"),
        (("models", 0, "model"), KeyError, "model is missing"),
        (("exchanges", 0, "caller"), "mpi", "expected one of paceline; torch"),
        (("exchanges", 0, "queued"), 1, "queued is 1: expected `bool`"),
        (("exchanges", 0, "measured", "seconds"), [0.1], r"seconds is \[0.1\]: expected 8 numbers"),
        (
            ("exchanges", 0, "measured", "seconds"),
            [math.inf],
            r"seconds\[0\] is Infinity: expected a finite number",
        ),
        (
            ("exchanges", 0, "measured", "seconds", 0),
            0.0,
            r"measured.seconds\[0\] is 0.0: expected `float` > 0",
        ),
        (("exchanges", 0, "op"), "sum", "expected one of all-reduce"),
        (("contentions", 0, "computing_slows"), 0.5, "computing_slows is 0.5: expected `float` >= 1"),
        (("contentions", 0, "source"), 7, "expected the number of one of 1 sources"),
    ],
)
def test_a_damaged_field_is_named(path, value, message):
    record = copy.deepcopy(PROFILE.to_json())
    change(record, path, value)
    with pytest.raises(UsageError, match=message):
        Profile.from_json(record)
