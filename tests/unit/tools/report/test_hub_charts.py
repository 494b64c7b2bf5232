"""Charts of asynchronous runs: texts, names with special characters, gaps, many workers."""

from __future__ import annotations

import warnings
import xml.etree.ElementTree as ElementTree

import pytest

from paceline.tools.report.charts.chart_style import ChartLine, time_unit
from paceline.tools.report.hub.hub_charts import (
    ScoreCurves,
    ShareBar,
    _broken,
    contribution_chart,
    escape_mathtext,
    ignore_missing_glyphs,
    score_chart,
    staleness_histogram,
    traffic_chart,
)
from paceline.tools.report.hub.hub_downtime import HubDowntime
from paceline.tools.report.hub.hub_traffic import ReservedRate


def texts(chart):
    svg = ElementTree.fromstring(chart.inline_svg("x"))
    return [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("wide", [True, False])
def test_the_chart_of_scores_names_the_global_model_and_few_workers(wide):
    curves = ScoreCurves(
        [(5, 4.0), (60, 2.0)],
        [ChartLine("ann", [(1, 5.0), (50, 3.0)])],
        merged_at=4.0,
        replacements=[(3, 6.0)],
    )
    found = texts(score_chart(curves, 60, y="score", wide=wide))
    assert {"global model", "ann", "score", "wall time (s)", "all adopt the best"} <= set(found)


def test_many_workers_have_no_names():
    lines = [ChartLine(f"w{each}", [(1, 5.0), (50, 3.0)]) for each in range(20)]
    found = texts(score_chart(ScoreCurves([(5, 4.0), (60, 2.0)], lines), 60, y="score"))
    assert "global model" in found
    assert not any(text and text.startswith("w") and text != "wall time (s)" for text in found)


def test_workers_alone_have_a_chart():
    assert "ann" in texts(score_chart(ScoreCurves([], [ChartLine("ann", [(1, 5.0)])]), 60, y="training loss"))


def test_a_few_large_values_do_not_hide_the_others():
    curves = ScoreCurves([(at, 1.0 if at < 55 else 1e6) for at in range(60)], [])
    assert {"1", "1000", "1e+06"} <= set(texts(score_chart(curves, 60, y="score")))
    assert "1e+06" not in texts(
        score_chart(ScoreCurves([(at, 1.0 + at) for at in range(60)], []), 60, y="score")
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["_hidden", "$x^2$", "$\\frac$", "a$b", "\\$\\$", "{x}", "%s", "<b>&", "日本語 ✓"]
)
@pytest.mark.parametrize("wide", [True, False])
def test_names_are_written_letter_by_letter(name, wide):
    curves = ScoreCurves([(0, 1.0)], [ChartLine(name, [(0, 1.0), (1, 2.0)])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ignore_missing_glyphs():
            assert name in [
                text.strip("\u2009") for text in texts(score_chart(curves, 1, y="score", wide=wide)) if text
            ]
            assert name in [
                text.strip("\u2009")
                for text in texts(contribution_chart([ShareBar(name, 0.5, name)], wide=wide))
                if text
            ]


def test_long_names_are_cut():
    assert "x" * 23 + "…" in texts(contribution_chart([ShareBar("x" * 40, 1.0, "")]))
    assert (escape_mathtext("plain"), escape_mathtext("_a"), escape_mathtext("$a")) == (
        "plain",
        "\u2009_a",
        "\\$a",
    )


def test_bars_have_their_remarks():
    found = texts(
        contribution_chart(
            [ShareBar("ann", 0.75, "75 %, 3 updates"), ShareBar("2 others", 0.0, "none", True)]
        )
    )
    assert {"ann", "75 %, 3 updates", "2 others", "none", "% of all"} <= set(found)


@pytest.mark.parametrize("wide", [True, False])
def test_the_histogram_names_its_rounds(wide):
    found = texts(staleness_histogram([(0.0, 0.5, 30), (0.5, 1.0, 0), (64.0, float("inf"), 1200)], wide=wide))
    assert {"0–0.5", "0.5–1", "≥ 64", "30", "1,200", "staleness (rounds)"} <= set(found)


@pytest.mark.parametrize("wide", [True, False])
def test_traffic_is_in_bytes_per_second_beside_the_reservation(wide):
    points = [(5.0, 2e6), (7200.0, 3e6)]
    found = texts(
        traffic_chart(
            points, [(5.0, 1e6)], [ReservedRate(0, 7200, 4e6)], [HubDowntime(10, 20)], 7200, wide=wide
        )
    )
    assert {"in", "out", "reserved", "wall time (min)", "2 MB/s", "4 MB/s"} <= set(found)
    assert "reserved" not in texts(traffic_chart(points, [], [], [], 7200, wide=wide))


def test_a_line_has_a_gap_where_the_hub_was_away():
    points = [(0.0, 1.0), (10.0, 2.0), (40.0, 3.0), (50.0, 4.0)]
    at, values = _broken(
        points, [HubDowntime(-9, -5), HubDowntime(12, 30), HubDowntime(41, 45), HubDowntime(60, 70)], 10.0
    )
    assert at == [0, 1, 3, 4, 4.5, 5]
    assert [value if value == value else None for value in values] == [1, 2, None, 3, None, 4]


def test_times_have_a_unit_that_fits():
    assert [time_unit(each)[0] for each in (1, 179, 181, 3 * 3600, 4 * 86400)] == [
        "s",
        "s",
        "min",
        "h",
        "days",
    ]
