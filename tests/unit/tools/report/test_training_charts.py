"""Training charts: file formats, texts, and the error without matplotlib."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

import pytest

from drawn_chart import svg_of
from paceline.errors import UsageError
from paceline.tools.report.charts import training_charts
from paceline.tools.report.charts.chart_style import ChartLine
from paceline.tools.report.charts.training_charts import (
    StackedBar,
    breakdown_chart,
    bucket_size_chart,
    time_and_ratio_chart,
)

PARTS = {"forward": 9.0, "backward": 17.0, "exposed": 5.0, "optimizer": 4.0}
KINDS = {
    "breakdown": lambda: breakdown_chart(
        {"tiny": [StackedBar("naive", PARTS, "1.20 × DDP")], "mini": [StackedBar("flat", PARTS)]}
    ),
    "buckets": lambda: bucket_size_chart({"tiny": [ChartLine("bucketed", [(0.25, 30.0), (25, 28.0)])]}),
    "sizes": lambda: time_and_ratio_chart(
        [
            ChartLine("ours", [(4e3, 6e-5), (1e9, 0.3)]),
            ChartLine("a copy", [(4e3, 1e-6), (1e9, 0.2)], faint=True),
        ],
        [ChartLine("ours", [(4e3, 4.0), (1e9, 3.0)])],
        title="all-reduce",
        ratio="times faster than theirs",
    ),
}


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_every_chart_is_written_as_png_and_svg(kind, tmp_path):
    chart = KINDS[kind]()
    png = chart.save(tmp_path / "charts" / "chart.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width = int.from_bytes(png[16:20], "big")
    assert width == 2000
    assert "<svg" in chart.save(tmp_path / "charts" / "chart.svg").read_text()


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"chart\.pdf"):
        KINDS["breakdown"]().save(tmp_path / "chart.pdf")


def test_a_breakdown_names_phases_bars_totals_and_the_unit():
    labels = texts(svg_of(KINDS["breakdown"]()))
    for text in (
        "forward",
        "exposed communication",
        "naive",
        "35 ms  1.20 × DDP",
        "milliseconds of one step",
    ):
        assert text in labels
    assert "data" not in labels  # no bar has any


def test_bucket_sizes_are_the_ticks():
    labels = texts(svg_of(KINDS["buckets"]()))
    assert {"0.25", "25", "bucket size (MiB)", "bucketed"} <= set(labels)


def test_sizes_and_times_have_their_units():
    labels = texts(svg_of(KINDS["sizes"]()))
    assert {"100 kB", "1 GB", "100 µs", "100 ms", "2×", "times faster than theirs", "a copy"} <= set(labels)
    assert labels.count("ours") == 2  # named in both panels


def test_drawing_twice_gives_the_same_text():
    assert svg_of(KINDS["breakdown"]()) == svg_of(KINDS["breakdown"]())


def test_drawing_leaves_matplotlibs_settings_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    svg_of(KINDS["breakdown"]())
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (KINDS["breakdown"], training_charts.require_matplotlib):
        with pytest.raises(UsageError, match=r"(?s)matplotlib.*pip install 'paceline\[report\]'"):
            draw()
