"""Charts of time and bandwidth by size: names, units, and a look for each backend and number of processes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from drawn_chart import svg_of
from paceline.tools.report.charts.collective_charts import BackendSeries, bandwidth_by_size, time_by_size

SIZES = (1e6, 1e7, 1e8)
LINES = [
    BackendSeries(backend, ranks, [(size, size / rate) for size in SIZES])
    for backend, rate in (("gloo", 1e9), ("paceline", 4e9))
    for ranks in (2, 4)
]


def texts(chart):
    root = ElementTree.fromstring(svg_of(chart))
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def rates():
    return [
        BackendSeries(line.backend, line.ranks, [(size, size / time) for size, time in line.points])
        for line in LINES
    ]


def test_times_have_their_units_and_every_line_its_name():
    labels = texts(time_by_size(LINES, title="all-reduce"))
    assert {"1 MB", "100 MB", "1 ms", "10 ms", "bytes (S)", "time", "all-reduce"} <= set(labels)
    for line in LINES:
        assert labels.count(line.label) == 1


def test_bandwidth_is_in_gigabytes_per_second_and_begins_at_zero():
    labels = texts(bandwidth_by_size(rates(), title="all-reduce", bandwidth="busbw"))
    assert {"busbw (GB/s)", "0.0", "4.0", "gloo, 2 ranks", "paceline, 4 ranks"} <= set(labels)


def test_a_backend_keeps_its_colour_and_a_number_of_processes_its_dash():
    svg = svg_of(time_by_size(LINES, title=""))
    drawn = re.findall(r'fill: none; (?:stroke-dasharray: ([\d.,]+); )?[^"]*stroke: (#\w+)', svg)
    looks = [(dash, colour) for dash, colour in drawn if colour in ("#0072b2", "#d55e00")]
    assert len(set(looks)) == 4
    assert len({colour for _, colour in looks}) == 2
    assert len({dash for dash, _ in looks}) == 2


def test_one_point_is_enough(tmp_path):
    point = [BackendSeries("gloo", 2, [(1e6, 1e-3)])]
    for chart in (time_by_size(point, title=""), bandwidth_by_size(point, title="", bandwidth="algbw")):
        assert chart.save(tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
