"""Compute and network rates C and W, from a profile with their errors or from the table."""

from __future__ import annotations

import pytest

from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import CollectiveCost, Rate, Source
from paceline.errors import UsageError
from paceline.tools.plan.communication_roofline import (
    RateEstimate,
    catalog_link_rate,
    catalog_matmul_rate,
    intensity,
    measured_link_rate,
    measured_matmul_rate,
)

SOURCE = Source("paceline bench fit x.json", "2026-01-02T03:04:05+00:00")
BETA = 1 / 25e6


def profile(wobble=0.0):
    points = [
        MeasuredPoint(n, p, 1e-4 * 2 * (p - 1) + BETA * n * 2 * (p - 1) / p * (1 + wobble * (i % 2)))
        for i, n in enumerate(4**k for k in range(6, 14))
        for p in (2, 4, 8)
    ]
    cost = CollectiveCost("gloo", "star", fit_points(points, "all-reduce"), SOURCE)
    rate = Rate(
        kind="matmul",
        device="cpu",
        dtype="float32",
        threads=2,
        value=1e11,
        low=0.9e11,
        high=1.05e11,
        shape="1024",
        source=SOURCE,
    )
    return Profile(collectives=(cost,), rates=(rate,))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_gives_the_link_rate_for_any_number_of_ranks(ranks):
    found = measured_link_rate(profile(), "gloo", ranks=ranks)
    assert found.value == pytest.approx(25e6, rel=1e-3)
    assert found.measured


def test_held_out_errors_are_the_error_bars():
    found = measured_link_rate(profile(wobble=0.2), "gloo", ranks=4)
    error = profile(wobble=0.2).collectives[0].fit.error_at(4)
    assert found.high / found.value == found.value / found.low == pytest.approx(1 + error.p90)
    assert found.high > 1.02 * found.value


def test_unmeasured_numbers_of_ranks_are_noted():
    assert "measured with 2, 4, 8" in measured_link_rate(profile(), "gloo", ranks=16).source
    assert "measured with" not in measured_link_rate(profile(), "gloo", ranks=4).source


def test_the_matrix_rate_is_the_median_between_slowest_and_fastest():
    found = measured_matmul_rate(profile(), "fp32")
    assert (found.value, found.low, found.high) == (1e11, 0.9e11, 1.05e11)


def test_the_intensity_is_bounded_by_the_worst_of_both_rates():
    found = intensity(RateEstimate(100.0, 80.0, 120.0, "c", True), RateEstimate(10.0, 8.0, 12.5, "w", True))
    assert (found.value, found.low, found.high) == (10.0, 80 / 12.5, 120 / 8)
    assert found.measured


def test_a_device_without_bf16_is_counted_in_fp16():
    assert catalog_matmul_rate("t4").value == 65e12
    assert "dense fp16" in catalog_matmul_rate("t4").source


def test_catalog_rates_have_no_error_and_name_their_source():
    found = intensity(catalog_matmul_rate("h100"), catalog_link_rate("nvlink4"))
    assert found.low == found.value == found.high
    assert not found.measured
    assert "data sheet" in found.source


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: measured_link_rate(Profile(), "gloo"), "no all-reduce on gloo"),
        (lambda: measured_link_rate(profile(), "gloo", ranks=1), "1 ranks"),
        (lambda: measured_matmul_rate(Profile()), "no matmul bfloat16"),
        (lambda: catalog_matmul_rate("v100", "bf16"), "no unit for bf16"),
        (
            lambda: intensity(catalog_matmul_rate("t4", "fp16"), RateEstimate(0.0, 0.0, 0.0, "", False)),
            "C or W is 0",
        ),
    ],
)
def test_missing_rates_are_reported(ask, message):
    with pytest.raises(UsageError, match=message):
        ask()
