"""Data of a page's curves: bounded, with extremes kept, and means that smoothing can use."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest

from paceline.tools.report.page.curve_chart import MAX_POINTS, Curve, CurveChart


def data_of(*curves, **options):
    chart = CurveChart(title="t", caption="c", unit="u", curves=curves, **options)
    return json.loads(chart.json())


def numbers(text, kind="<f4"):
    return np.frombuffer(base64.b64decode(text), kind)


def test_a_short_curve_is_kept_exactly_with_gaps():
    (line,) = data_of(Curve(name="a", points=[(1, 0.5), (2, math.nan), (30_000_001, 0.25)]))["lines"]
    assert numbers(line["x"], "<f8").tolist() == [1, 2, 30_000_001]
    assert numbers(line["y"])[[0, 2]].tolist() == [0.5, 0.25]
    assert math.isnan(numbers(line["y"])[1])
    assert "low" not in line


@pytest.mark.parametrize("count", [MAX_POINTS, MAX_POINTS + 1, 100_000, 1_234_567])
def test_a_long_curve_is_bounded_and_keeps_its_extremes_and_its_mean(count):
    values = np.random.default_rng(0).normal(size=count)
    values[count // 3], values[count // 2] = 99.0, -77.0
    points = list(zip(range(count), values.tolist(), strict=True))
    (line,) = data_of(Curve(name="a", points=points))["lines"]
    x, y = numbers(line["x"], "<f8"), numbers(line["y"])
    assert len(x) == len(y) <= MAX_POINTS
    assert len(json.dumps(line)) < 80_000
    if count > MAX_POINTS:
        assert numbers(line["high"]).max() == 99.0
        assert numbers(line["low"]).min() == -77.0
        whole = len(values) // line["size"]
        segments = values[: whole * line["size"]].reshape(whole, -1)
        np.testing.assert_allclose(y[:whole], segments.mean(1), rtol=1e-4, atol=1e-5)


def test_a_segment_without_finite_values_is_a_gap():
    points = [(at, math.nan if at < 100 else 1.0) for at in range(10 * MAX_POINTS)]
    (line,) = data_of(Curve(name="a", points=points))["lines"]
    assert np.isnan(numbers(line["y"])[:10]).all()
    assert numbers(line["y"])[10] == 1.0


def test_wall_time_is_an_axis_if_every_curve_has_it():
    timed = Curve(name="a", points=[(1, 1.0), (2, 2.0)], seconds=[0.5, 1.5])
    untimed = Curve(name="b", points=[(1, 1.0), (2, 2.0)])
    assert data_of(timed)["axes"] == ["step", "time"]
    assert numbers(data_of(timed)["lines"][0]["t"]).tolist() == [0.5, 1.5]
    assert data_of(timed, untimed)["axes"] == ["step"]
    assert data_of(untimed, x="time")["axes"] == ["time"]


def test_names_cannot_close_the_script():
    chart = CurveChart(title="t", caption="c", unit="u", curves=[Curve(name="</script>", points=[(1, 1.0)])])
    assert "</script>" not in chart.json()
    assert json.loads(chart.json())["lines"][0]["name"] == "</script>"
