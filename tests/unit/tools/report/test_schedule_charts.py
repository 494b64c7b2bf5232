"""Charts of schedules: an arrow per message, a bar per cost."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from drawn_chart import svg_of
from paceline.collectives.algorithms import ALGORITHMS, make_schedule
from paceline.collectives.simulated_cost import simulate_cost
from paceline.collectives.topology import star
from paceline.tools.report.charts.schedule_charts import CostBar, schedule_chart, schedule_cost_chart


def picture(op, name, ranks):
    made = make_schedule(op, name, ranks)
    return svg_of(schedule_chart(made, simulate_cost(made, star(ranks, 1e6), 1e6), title=str(made)))


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_ranks_and_chunks_are_named():
    labels = texts(picture("all-reduce", "halving-doubling", 4))
    assert {"rank 0", "rank 3", "added", "replaces", "0–1", "2"} <= set(labels)


def test_one_colour_needs_no_legend():
    assert "added" not in texts(picture("broadcast", "tree", 4))


@pytest.mark.sweep
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in ALGORITHMS for name in ALGORITHMS[op]])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_everything_can_be_drawn(op, name, ranks):
    assert f"rank {ranks - 1}" in texts(picture(op, name, ranks))


def test_many_messages_are_drawn_without_names():
    labels = texts(picture("all-reduce", "ring", 16))
    assert "rank 15" in labels
    assert "7" not in labels


def test_prices_are_shown_beside_measurements(tmp_path):
    rows = [CostBar("tree", 15.0, [15.2, 15.6, 15.4]), CostBar("one-by-one", 35.0)]
    chart = schedule_cost_chart(rows, title="broadcast")
    labels = texts(svg_of(chart))
    assert "predicted 15 s, measured 15.4 s (1.03×)" in labels
    assert "35 s" in labels
    assert chart.save(tmp_path / "prices.png").stat().st_size > 1000
