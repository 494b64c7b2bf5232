"""Published NCCL times (benchmarks/nccl-tables): fitted on every second size, the others predicted."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from paceline.cost_model.collective_prediction import PredictionError
from paceline.cost_model.fit_measurements import MeasuredPoint, held_out_sizes

FOLDER = Path(__file__).parents[3] / "benchmarks" / "nccl-tables"
TABLES = runpy.run_path(str(FOLDER / "fit.py"))["load"]()


@pytest.mark.parametrize(("name", "mean"), [("8×H200", 0.03), ("8×B200", 0.09), ("32×B200", 0.056)])
def test_every_second_size_is_predicted_from_the_others(name, mean):
    points = TABLES[name]
    found, line = (
        PredictionError.of(held_out_sizes(points, "all-reduce", max_segments=most)) for most in (3, 1)
    )
    assert found is not None
    assert line is not None
    assert found.points == (len(points) - 1) // 2
    assert found.mean <= mean < line.mean


def test_sizes_that_are_held_out_change_nothing():
    points = TABLES["8×H200"]
    doubled = [
        MeasuredPoint(p.nbytes, p.ranks, p.seconds * (2 if at % 2 else 1)) for at, p in enumerate(points[:-1])
    ]
    pairs = zip(
        held_out_sizes(points, "all-reduce"),
        held_out_sizes([*doubled, points[-1]], "all-reduce"),
        strict=True,
    )
    assert all(one.predicted == other.predicted for one, other in pairs)


def test_the_committed_result_equals_the_fit():
    rows = json.loads((FOLDER / "result.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == list(TABLES)
    for row in rows:
        assert TABLES[row["name"]][0].nbytes == row["segments_of_all_sizes"][0]["low"]
        found = PredictionError.of(held_out_sizes(TABLES[row["name"]], "all-reduce"))
        assert found is not None
        assert vars(found) == pytest.approx(row["held_out"])


def test_times_follow_from_bus_bandwidth():
    first = TABLES["8×H200"][0]
    assert (first.nbytes, first.ranks) == (32768, 8)
    assert 32768 / first.seconds / 1e9 == pytest.approx(0.82, abs=0.005)  # the published algbw
