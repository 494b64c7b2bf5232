"""Charts of asynchronous runs: curves, gaps, marks, many workers."""

from __future__ import annotations

import json
import math

import pytest

from paceline.tools.report.hub.hub_charts import break_at, score_chart, staleness_chart, traffic_chart
from paceline.tools.report.hub.hub_downtime import HubDowntime
from paceline.tools.report.hub.hub_records import read_hub_run
from reported_hub_folder import demo, global_score, join, long_run, traffic, update, write


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_hub_run(demo(tmp_path_factory.mktemp("hub") / "run"))


def test_the_chart_of_scores_names_the_global_model_and_workers(run):
    chart = score_chart(run)
    assert chart.curves[0].name == "global model"
    assert {"ann", "bob", "cy"} <= {curve.name for curve in chart.curves}
    assert chart.curves[-1].style == "crosses"
    assert chart.marks == [(2.0, "all adopt the best")]
    assert chart.unit == "score"
    json.loads(chart.json().replace("\\u003c", "<"))


def test_many_workers_are_limited_and_faint(tmp_path):
    chart = score_chart(read_hub_run(write(tmp_path, long_run(3000, workers=30))))
    workers = chart.curves[1:]
    assert len(workers) == 20
    assert {curve.style for curve in workers} == {"faint"}


def test_losses_of_workers_alone_have_a_chart(tmp_path):
    reports = {1: {"steps": 1, "speed": 2.0, "loss": 4.0}}
    records = [join(0, 1, "ann"), *(traffic(5 * at, workers=reports) for at in range(1, 9)), update(50, 1)]
    chart = score_chart(read_hub_run(write(tmp_path, records)))
    assert (chart.title, [curve.name for curve in chart.curves]) == ("Training loss", ["ann"])


def test_a_few_large_values_make_the_axis_logarithmic(tmp_path, run):
    records = [join(0, 1), *(global_score(at, 1, 1.0 if at < 55 else 1e6) for at in range(1, 60))]
    assert score_chart(read_hub_run(write(tmp_path, records))).log
    assert not score_chart(run).log


def test_the_histogram_names_its_rounds(run):
    chart = staleness_chart(run)
    assert [bar.label for bar in chart.bars] == ["0–0.5", "0.5–1", "1–1.5"]
    assert chart.bars[0].remark == "39 %, 16 updates"


def test_traffic_is_in_bytes_per_second_beside_the_reservation(run):
    chart = traffic_chart(run)
    assert [curve.name for curve in chart.curves] == ["in", "out", "reserved"]
    assert chart.number == "bytes/s"
    assert chart.away


def test_a_line_has_a_gap_where_the_hub_was_away():
    points = [(0.0, 1.0), (10.0, 2.0), (40.0, 3.0), (50.0, 4.0)]
    downtimes = [HubDowntime(-9, -5), HubDowntime(12, 30), HubDowntime(41, 45), HubDowntime(60, 70)]
    broken = break_at(points, downtimes)
    assert [at for at, _ in broken] == [0, 10, 30, 40, 45, 50]
    assert [None if math.isnan(value) else value for _, value in broken] == [1, 2, None, 3, None, 4]
