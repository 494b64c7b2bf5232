"""What a profile holds of training steps: written and read back, merged, compared, refused where it is damaged."""

from __future__ import annotations

import copy
import json
import math

import pytest

from paceline.cost_model.profile import Profile
from paceline.cost_model.step_costs import pick_step_costs
from paceline.cost_model.step_strategy import StepStrategy
from paceline.cost_model.step_time import predict_step
from paceline.errors import UsageError
from paceline.tools.plan.step_measured import accuracy_of, beside, load_measured, ways_measured
from step_profile import exchange, model, profile

PROFILE = profile()


def test_what_is_saved_is_what_is_loaded(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE


def test_a_file_of_earlier_times_has_none_of_it():
    record = PROFILE.to_json()
    for name in ("exchanges", "models", "contentions"):
        del record[name]
    assert Profile.from_json(record) == Profile()


def test_what_is_measured_again_takes_the_place_of_the_old():
    again = model(batch=4)
    merged = PROFILE.merged(Profile(models=(again, model(batch=8))))
    assert len(merged.models) == 2
    assert merged.models[0] is again
    assert merged.exchanges == PROFILE.exchanges


def test_prices_are_compared_where_both_have_them():
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
    ("path", "value", "said"),
    [
        (("models", 0, "forward"), 0, r"models\[0\].forward is 0"),
        (("models", 0, "spread"), -1, r"spread is -1"),
        (("models", 0, "parameters"), [], "parameters in the order"),
        (("models", 0, "parameters", 0, "seconds"), 0.9, "parameters in the order"),
        (("models", 0, "parameters", 9, "seconds"), 1.5, "parameters in the order"),
        (("models", 0, "parameters", 2, "nbytes"), 1.5, r"parameters\[2\].nbytes is 1.5"),
        (("models", 0, "model"), KeyError, "model is missing"),
        (("exchanges", 0, "caller"), "mpi", "one of paceline, torch"),
        (("exchanges", 0, "queued"), 1, "true or false"),
        (("exchanges", 0, "measured", "seconds"), [0.1], "numbers must stand there"),
        (("exchanges", 0, "measured", "seconds"), [math.inf], "a list of numbers"),
        (("exchanges", 0, "measured", "seconds", 0), 0.0, r"measured.seconds is \[0.0, .* numbers above 0"),
        (("exchanges", 0, "op"), "sum", "one of all-reduce"),
        (("contentions", 0, "computing_slows"), 0.5, "a number of 1 or more"),
        (("contentions", 0, "source"), 7, "the number of one of 1 sources"),
    ],
)
def test_a_damaged_field_is_named(path, value, said):
    record = copy.deepcopy(PROFILE.to_json())
    change(record, path, value)
    with pytest.raises(UsageError, match=said):
        Profile.from_json(record)


# ---------------------------------------------------------------- measured steps


def row(strategy, size, step_ms, model="net", ranks=2):
    parts = {f"{name}_ms": step_ms / 4 for name in ("forward", "backward", "exposed", "optimizer")}
    return {
        "model": model,
        "strategy": strategy,
        "bucket_mib": size,
        "ranks": ranks,
        "step_ms": step_ms,
        **parts,
    }


def written(tmp_path, *rows, **changes):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"kind": "bench-step", "schema": 1, "rows": list(rows)} | changes))
    return path


def test_measured_steps_stand_beside_predicted_ones(tmp_path):
    costs = pick_step_costs(PROFILE)
    naive, bucketed = (
        predict_step(costs, StepStrategy("naive")),
        predict_step(costs, StepStrategy("bucketed", 5)),
    )
    path = written(
        tmp_path,
        row("no-sync", None, 1000.0),
        row("naive", None, 1e3 * naive.seconds / 1.1),
        row("bucketed", 5.0, 1e3 * bucketed.seconds),
        row("bucketed", "inf", 1500.0),
        row("ddp", 0, 1500.0),
        row("ddp-static", None, 1500.0),
        row("naive", None, 1.0, ranks=3),
    )
    found = ways_measured(load_measured(path), "net", 2)
    assert set(found) == {
        StepStrategy("naive"),
        StepStrategy("bucketed", 5),
        StepStrategy("bucketed", math.inf),
    }
    pairs = beside([naive, bucketed], found)
    assert [pair[1].way for pair in pairs] == [StepStrategy("naive"), StepStrategy("bucketed", 5)]
    accuracy = accuracy_of(pairs, 2)
    assert accuracy.points == 2
    assert accuracy.maximum == pytest.approx(0.1)
    with pytest.raises(UsageError, match="net with 2 ranks, net with 3 ranks"):
        ways_measured(load_measured(path), "net", 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "bench-machine"}, "no measurement of steps"),
        ({"schema": 2}, "reads up to 1"),
        ({"rows": [row("naive", None, 0)]}, "step_ms is 0"),
        ({"rows": [row("naive", "big", 1)]}, "bucket_mib is 'big'"),
    ],
)
def test_another_file_is_refused(tmp_path, changes, said):
    with pytest.raises(UsageError, match=said):
        load_measured(written(tmp_path, **changes))
    with pytest.raises(UsageError, match="can't read"):
        load_measured(tmp_path / "nothing.json")
