"""Fits of collectives: parameters, algorithm, held-out errors, and where they are not valid."""

from __future__ import annotations

import math
import random

import pytest

from paceline.collectives.closed_form_cost import closed_form
from paceline.cost_model.collective_prediction import CheckedPrediction, PredictionError
from paceline.cost_model.cost_forms import (
    MESSAGES_FORM,
    OPS,
    PLAIN_FORM,
    CostForm,
    candidate_forms,
    forms_by_name,
    terms_of,
)
from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points, held_out_ranks, held_out_sizes
from paceline.errors import UsageError

SIZES = [4**k for k in range(5, 14)]


def measured(op="all-reduce", algorithm="ring", ranks=(2, 4, 6), *, noise=0.0, shared=False, seed=0):
    drawn = random.Random(seed)
    points = []
    for p in ranks:
        terms = closed_form(op, algorithm, p)
        for n in SIZES:
            seconds = terms.seconds(n, 2e-5, 1e-9) * (p if shared else 1)
            points.append(MeasuredPoint(n, p, seconds * drawn.uniform(1 - noise, 1 + noise)))
    return points


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("op", "algorithm"),
    [
        (op, form.algorithm)
        for op in OPS
        for form in candidate_forms(op)
        if not form.shared and op != "send-recv"
    ],
)
def test_planted_parameters_and_an_equal_cost_are_recovered(op, algorithm):
    ranks = (2, 3, 5, 8)
    fit = fit_points(measured(op, algorithm, ranks, noise=0.01), op)
    assert fit.identified
    for p in ranks:
        found, planted = terms_of(op, fit.form, p), closed_form(op, algorithm, p)
        assert (found.messages, found.sent) == (planted.messages, planted.sent)
    (segment,) = fit.segments
    assert segment.alpha == pytest.approx(2e-5, rel=0.03)
    assert segment.beta == pytest.approx(1e-9, rel=0.03)
    assert fit.sizes_error is not None
    assert fit.ranks_error is not None
    assert max(fit.sizes_error.maximum, fit.ranks_error.maximum) < 0.04


def test_ranks_that_share_a_machine_are_distinguished_from_ranks_with_separate_links():
    fit = fit_points(measured(shared=True, noise=0.05), "all-reduce")
    assert str(fit.form) == "ring, shared"
    assert fit.seconds(10**6, 8) == pytest.approx(
        8 * closed_form("all-reduce", "ring", 8).seconds(10**6, 2e-5, 1e-9), rel=0.1
    )


def crowded(nbytes, ranks):
    """Times of ranks on two cores: no form's, as a third rank has to wait for a core."""
    return closed_form("all-reduce", "ring", ranks).seconds(nbytes, 2e-5, 1e-9) * (1 if ranks == 2 else 3)


def test_numbers_of_ranks_that_no_form_joins_get_segments_of_their_own():
    points = [MeasuredPoint(n, p, crowded(n, p)) for n in SIZES for p in (2, 3, 4)]
    fit = fit_points(points, "all-reduce")
    assert [each.ranks for each in fit.segments_of_ranks] == [2, 3, 4]
    for p in (2, 3, 4):
        assert fit.predict(10**5, p).seconds == pytest.approx(crowded(10**5, p))
    assert fit.sizes_error is not None
    assert fit.sizes_error.maximum < 1e-9
    common = fit_points(points, "all-reduce", per_ranks=False)
    assert common.segments_of_ranks == ()
    assert common.sizes_error is not None
    assert common.sizes_error.median > 0.1
    assert fit.seconds(10**5, 8) == common.seconds(10**5, 8)
    assert fit.half_bandwidth_size(2) == pytest.approx(2e-5 * 2 / 1e-9)


def test_a_form_that_joins_all_ranks_needs_no_segments_of_their_own():
    drawn = random.Random(0)
    points = [
        MeasuredPoint(
            n, p, closed_form("all-reduce", "ring", p).seconds(n, 2e-5, 1e-9) * drawn.uniform(0.9, 1.1)
        )
        for n in SIZES[::2]
        for p in range(2, 12)
    ]
    assert fit_points(points, "all-reduce").segments_of_ranks == ()


def test_each_number_of_ranks_is_checked_at_its_measured_sizes_only():
    points = [MeasuredPoint(n, 2, crowded(n, 2)) for n in SIZES] + [
        MeasuredPoint(n, 4, crowded(n, 4)) for n in SIZES[2:5]
    ]
    fit = fit_points(points, "all-reduce")
    assert [each.ranks for each in fit.segments_of_ranks] == [2, 4]
    fit.predict(SIZES[-1], 2)
    with pytest.raises(UsageError, match="sizes from 16 KiB to 256 KiB were"):
        fit.predict(SIZES[-1], 4)


def test_one_number_of_ranks_does_not_identify_the_algorithm_and_the_default_is_assumed():
    fit = fit_points(measured(algorithm="doubling", ranks=(4,)), "all-reduce")
    assert str(fit.form) == "ring"
    assert not fit.identified
    assert fit.error_of_form == {}
    assert fit.ranks_error is None
    assert fit.predict(10**5, 4).seconds == pytest.approx(
        closed_form("all-reduce", "doubling", 4).seconds(10**5, 2e-5, 1e-9)
    )


def test_a_known_algorithm_is_not_fitted():
    fit = fit_points(measured(ranks=(4,)), "all-reduce", forms=[CostForm("ring")])
    assert fit.identified


def test_the_plain_forms_are_too_simple_for_a_ring():
    points = measured(ranks=(2, 3, 4, 8))
    ring, plain, messages = (
        PredictionError.of(held_out_ranks(points, "all-reduce", forms=[form], max_segments=1))
        for form in (CostForm("ring"), PLAIN_FORM, MESSAGES_FORM)
    )
    assert ring is not None
    assert plain is not None
    assert messages is not None
    assert ring.maximum < 1e-9 < messages.mean < plain.mean
    assert (messages.mean, messages.maximum) == pytest.approx((0.16, 0.48), abs=0.005)
    assert plain.mean == pytest.approx(0.48, abs=0.005)


def test_held_out_sizes_are_every_second_one_and_never_the_ends():
    checked = held_out_sizes(measured(noise=0.02), "all-reduce")
    assert sorted({each.nbytes for each in checked}) == SIZES[1:-1:2]
    assert {each.ranks for each in checked} == {2, 4, 6}
    exact = held_out_sizes(measured(), "all-reduce")
    assert max(each.error for each in exact) < 1e-9


def test_held_out_points_have_no_part_in_their_prediction():
    points = measured(noise=0.02)
    worse = [
        MeasuredPoint(p.nbytes, p.ranks, p.seconds * (9 if p.nbytes in SIZES[1:-1:2] else 1)) for p in points
    ]
    for one, other in zip(
        held_out_sizes(points, "all-reduce"), held_out_sizes(worse, "all-reduce"), strict=True
    ):
        assert one.predicted == other.predicted
    worse = [MeasuredPoint(p.nbytes, p.ranks, p.seconds * (9 if p.ranks == 4 else 1)) for p in points]
    pairs = zip(held_out_ranks(points, "all-reduce"), held_out_ranks(worse, "all-reduce"), strict=True)
    assert all(one.predicted == other.predicted for one, other in pairs if one.ranks == 4)


def test_one_median_that_is_far_off_does_not_spoil_the_others():
    points = measured(noise=0.02)
    points[4] = MeasuredPoint(points[4].nbytes, points[4].ranks, 1.5 * points[4].seconds)
    fit = fit_points(points, "all-reduce")
    assert str(fit.form) == "ring"
    for n in SIZES:
        truth = closed_form("all-reduce", "ring", 4).seconds(n, 2e-5, 1e-9)
        assert fit.seconds(n, 4) == pytest.approx(truth, rel=0.12)


def test_a_prediction_carries_its_error():
    fit = fit_points(measured(noise=0.05), "all-reduce")
    accuracy = fit.sizes_error
    assert accuracy is not None
    found = fit.predict(10**6, 4)
    assert found.extrapolated is None
    assert found.error == accuracy.median
    assert found.low < found.seconds < found.high
    assert found.high / found.seconds == pytest.approx(1 + accuracy.p90)
    assert fit.ranks_error is not None
    assert fit.predict(10**6, 5).error == fit.ranks_error.median


@pytest.mark.parametrize(
    ("nbytes", "ranks", "message"),
    [
        (10**9, 4, "sizes from 1 KiB to 64 MiB were"),
        (10, 4, "sizes from 1 KiB to 64 MiB were"),
        (10**6, 8, "2, 4, 6 ranks were"),
        (10**9, 32, "64 MiB were and 2, 4, 6 ranks were"),
    ],
)
def test_unmeasured_values_are_refused_or_noted(nbytes, ranks, message):
    fit = fit_points(measured(), "all-reduce")
    with pytest.raises(UsageError, match="beyond what was measured"):
        fit.predict(nbytes, ranks)
    found = fit.predict(nbytes, ranks, extrapolate=True)
    assert message in str(found.extrapolated)
    truth = closed_form("all-reduce", "ring", ranks).seconds(nbytes, 2e-5, 1e-9)
    assert found.seconds == pytest.approx(truth)


def test_a_number_of_ranks_between_two_that_were_measured_is_no_extrapolation():
    assert fit_points(measured(), "all-reduce").predict(10**6, 3).extrapolated is None


def test_one_rank_takes_no_time():
    assert fit_points(measured(), "all-reduce").predict(10**6, 1).seconds == 0.0


@pytest.mark.parametrize(("nbytes", "ranks"), [(0, 2), (-5, 2), (10, 0), (math.nan, 2)])
def test_no_size_or_no_ranks_are_refused(nbytes, ranks):
    with pytest.raises(UsageError, match="1 byte and 1 rank"):
        fit_points(measured(), "all-reduce").predict(nbytes, ranks, extrapolate=True)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [MeasuredPoint(8, 2, 1.0), MeasuredPoint(16, 2, 2.0)],
        [MeasuredPoint(8, 2, 1.0)] * 5,
    ],
)
def test_too_few_sizes_are_refused(points):
    with pytest.raises(UsageError, match="too few"):
        fit_points(points, "all-reduce")


@pytest.mark.parametrize(
    "bad",
    [
        MeasuredPoint(0, 2, 1.0),
        MeasuredPoint(8, 1, 1.0),
        MeasuredPoint(8, 2, 0.0),
        MeasuredPoint(8, 2, -1.0),
        MeasuredPoint(8, 2, math.nan),
    ],
)
def test_impossible_measurements_are_refused(bad):
    with pytest.raises(UsageError, match="can't be fitted"):
        fit_points([*measured(), bad], "all-reduce")


def test_an_unknown_operation_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="did you mean 'all-reduce'"):
        fit_points(measured(), "all_reduce")


def test_forms_are_found_by_how_they_are_written():
    assert forms_by_name("all-reduce")["ring, shared"] == CostForm("ring", shared=True)


def test_three_sizes_are_enough_and_are_checked_by_the_middle_one():
    fit = fit_points([MeasuredPoint(n, 2, 1e-5 + 1e-9 * n) for n in (10**3, 10**5, 10**7)], "send-recv")
    assert fit.sizes_error is not None
    assert fit.sizes_error.points == 1
    assert fit.sizes_error.maximum < 1e-9


@pytest.mark.parametrize("efficiency", [0.1, 0.5, 0.9, 0.99])
def test_the_size_for_an_efficiency_has_its_closed_form_on_one_line(efficiency):
    fit = fit_points(measured(), "all-reduce")
    terms = closed_form("all-reduce", "ring", 4)
    expected = efficiency / (1 - efficiency) * (2e-5 * terms.messages) / (1e-9 * terms.sent)
    assert fit.size_at_efficiency(efficiency, 4) == pytest.approx(expected, rel=1e-6)
    assert fit.half_bandwidth_size(4) == fit.size_at_efficiency(0.5, 4)


def test_the_size_for_an_efficiency_follows_the_segments():
    points = [
        MeasuredPoint(n, 2, 1e-5 + 4e-10 * n if n <= 2**16 else 3e-5 + 1e-10 * n)
        for n in (2**k for k in range(8, 28))
    ]
    fit = fit_points(points, "send-recv")
    size = fit.half_bandwidth_size(2)
    assert size / fit.seconds(size, 2) == pytest.approx(0.5e10, rel=1e-6)
    assert size == pytest.approx(3e5, rel=1e-6)


@pytest.mark.parametrize("efficiency", [0.0, 1.0, -1.0, math.nan])
def test_an_efficiency_outside_0_to_1_is_refused(efficiency):
    with pytest.raises(UsageError, match="efficiency"):
        fit_points(measured(), "all-reduce").size_at_efficiency(efficiency, 2)


def test_errors_are_printed_in_percent():
    checked = [CheckedPrediction(10**k, 2, 1.0, 1.0 + 0.01 * k) for k in range(1, 6)]
    accuracy = PredictionError.of(checked)
    assert accuracy is not None
    assert str(accuracy) == "3.0 % (at most 5.0 %, 5 points)"
    large = PredictionError.of(checked, least_nbytes=10**5)
    assert large is not None
    assert (large.points, large.median) == (1, pytest.approx(0.05))
    assert PredictionError.of(checked, least_nbytes=10**9) is None
