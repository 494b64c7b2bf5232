"""Results of ``paceline bench step``: read, paired with predictions, and refused where they are damaged."""

from __future__ import annotations

import json
import math

import pytest

from paceline.cost_model.step_costs import pick_step_costs
from paceline.cost_model.step_strategy import StepStrategy
from paceline.cost_model.step_time import predict_step
from paceline.errors import UsageError
from paceline.tools.bench.bench_result_reader import (
    load_measured_steps,
    measured_by_strategy,
    pair_with_measured,
    step_prediction_error,
)
from step_profile import profile


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


def write_steps(tmp_path, *rows, **changes):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"kind": "bench-step", "schema": 1, "rows": list(rows)} | changes))
    return path


def test_predicted_steps_are_paired_with_measured_ones(tmp_path):
    costs = pick_step_costs(profile())
    naive, bucketed = (
        predict_step(costs, StepStrategy("naive")),
        predict_step(costs, StepStrategy("bucketed", 5)),
    )
    path = write_steps(
        tmp_path,
        row("no-sync", None, 1000.0),
        row("naive", None, 1e3 * naive.seconds / 1.1),
        row("bucketed", 5.0, 1e3 * bucketed.seconds),
        row("bucketed", "inf", 1500.0),
        row("ddp", 0, 1500.0),
        row("ddp-static", None, 1500.0),
        row("naive", None, 1.0, ranks=3),
    )
    found = measured_by_strategy(load_measured_steps(path), "net", 2)
    assert set(found) == {
        StepStrategy("naive"),
        StepStrategy("bucketed", 5),
        StepStrategy("bucketed", math.inf),
    }
    pairs = pair_with_measured([naive, bucketed], found)
    assert [pair[1].strategy for pair in pairs] == [StepStrategy("naive"), StepStrategy("bucketed", 5)]
    accuracy = step_prediction_error(pairs, 2)
    assert accuracy.points == 2
    assert accuracy.maximum == pytest.approx(0.1)
    with pytest.raises(UsageError, match="net with 2 ranks, net with 3 ranks"):
        measured_by_strategy(load_measured_steps(path), "net", 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "bench-machine"}, "no measurement of steps"),
        ({"schema": 2}, "reads up to 1"),
        ({"rows": [row("naive", None, 0)]}, "step_ms is 0"),
        ({"rows": [row("naive", "big", 1)]}, 'bucket_mib is "big": expected MiB'),
    ],
)
def test_another_file_is_refused(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        load_measured_steps(write_steps(tmp_path, **changes))
    with pytest.raises(UsageError, match="can't read"):
        load_measured_steps(tmp_path / "nothing.json")
