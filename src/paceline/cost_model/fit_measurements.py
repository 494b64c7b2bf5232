"""From measured times to a fit: which algorithm, how many segments, and how well it predicts what it has not seen.

1. The form (`paceline.cost_model.algorithm_terms`): with two numbers of ranks or more, each is predicted from the
others by every
   form, and the one with the least error is taken; the usual algorithm unless another is better by a tenth. Two
   numbers give one ratio, which a disturbance can turn: there another must halve the error. With one number of ranks
   all forms fit alike, and the usual algorithm is assumed.
2. The segments: see [Note: segments] in `paceline.cost_model.piecewise_fit`.
3. The ranks: no form is quite right, least of all where more ranks than cores run. Numbers of ranks that were measured
   get segments of their own if these predict sizes that are left out better than the common ones do, by the median;
   for all other numbers the common ones stay.
4. The held-out errors: steps 1 to 3 once more without every second size (the first and the last stay), and without
   each number of ranks in turn; what was left out had no part in any choice.

The times are to be medians over iterations: that is where single outliers end. What remains weighs by its relative
error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.collectives.closed_form_cost import Terms
from paceline.cost_model.algorithm_terms import AlgorithmTerms, candidates, terms_of
from paceline.cost_model.collective_fit import CollectiveFit
from paceline.cost_model.piecewise_fit import MOST_SEGMENTS, FitSegment, Samples, cut, how_many, left_out
from paceline.cost_model.prediction_error import CheckedPrediction, PredictionError
from paceline.errors import UsageError

__all__ = ["MeasuredPoint", "fit_points", "held_out_ranks", "held_out_sizes"]

_LEAST_SIZES = 3
_ROUNDING = 1e-9  # relative errors that differ by less are equal, on any processor
_GAIN, _GAIN_OF_TWO = 0.9, 0.5


@dataclass(frozen=True)
class MeasuredPoint:
    """One measured time: size n in bytes as nccl-tests defines it, number of ranks, median seconds."""

    nbytes: int
    ranks: int
    seconds: float


def fit_points(
    points: Iterable[MeasuredPoint],
    op: str,
    *,
    forms: Sequence[AlgorithmTerms] | None = None,
    most_segments: int = MOST_SEGMENTS,
    own: bool = True,
) -> CollectiveFit:
    """Return the fit of one operation's times, with its held-out errors.

    Args:
        points: at three sizes or more, of two ranks or more.
        op: such as ``"all-reduce"``.
        forms: those to choose from, the usual one first; by default all candidates, and one if it is known.
        most_segments: at most so many ranges of sizes.
        own: whether a number of ranks may have segments of its own.

    Raises:
        UsageError: too few sizes, or a size, number of ranks or time that can't be.

    Example:
        >>> points = [MeasuredPoint(n, 4, 6 * 1e-5 + 1.5e-9 * n) for n in (10**4, 10**5, 10**6, 10**7)]
        >>> fit = fit_points(points, "all-reduce")
        >>> str(fit.form), round(fit.segments[0].line.alpha * 1e6, 3)
        ('ring', 10.0)
    """
    checked = _checked(points, op)
    fit = _fit(checked, op, forms, most_segments, own)
    return replace(
        fit,
        sizes_error=PredictionError.of(
            held_out_sizes(checked, op, forms=forms, most_segments=most_segments, own=own)
        ),
        ranks_error=PredictionError.of(
            held_out_ranks(checked, op, forms=forms, most_segments=most_segments, own=own)
        ),
    )


def held_out_sizes(
    points: Iterable[MeasuredPoint],
    op: str,
    *,
    forms: Sequence[AlgorithmTerms] | None = None,
    most_segments: int = MOST_SEGMENTS,
    own: bool = True,
) -> list[CheckedPrediction]:
    """Return every second size, the first and the last never, beside its prediction from the other sizes.

    Args, Raises: as for `fit_points`.
    """
    checked = _checked(points, op)
    sizes = sorted({point.nbytes for point in checked})
    held_out = set(sizes[1:-1:2])
    fit = _fit([point for point in checked if point.nbytes not in held_out], op, forms, most_segments, own)
    return [_check(fit, point) for point in checked if point.nbytes in held_out]


def held_out_ranks(
    points: Iterable[MeasuredPoint],
    op: str,
    *,
    forms: Sequence[AlgorithmTerms] | None = None,
    most_segments: int = MOST_SEGMENTS,
    own: bool = True,
) -> list[CheckedPrediction]:
    """Return every measurement beside its prediction from other numbers of ranks; empty if there is one number.

    Sizes beyond those of the other numbers are left out.

    Args, Raises: as for `fit_points`.
    """
    checked, found = _checked(points, op), []
    for ranks in sorted({point.ranks for point in checked}):
        others = [point for point in checked if point.ranks != ranks]
        if len({point.nbytes for point in others}) < 2:
            continue
        fit = _fit(others, op, forms, most_segments, own)
        found += [
            _check(fit, point)
            for point in checked
            if point.ranks == ranks and fit.low <= point.nbytes <= fit.high
        ]
    return found


def _check(fit: CollectiveFit, point: MeasuredPoint) -> CheckedPrediction:
    return CheckedPrediction(point.nbytes, point.ranks, point.seconds, fit.seconds(point.nbytes, point.ranks))


def _checked(points: Iterable[MeasuredPoint], op: str) -> list[MeasuredPoint]:
    """Return the points in ascending order of size."""
    found = sorted(points, key=lambda point: (point.nbytes, point.ranks))
    for point in found:
        if point.nbytes < 1 or point.ranks < 2 or not (math.isfinite(point.seconds) and point.seconds > 0):
            raise UsageError(
                f"{op}: {point.nbytes} bytes by {point.ranks} ranks in {point.seconds} s can't be fitted",
                remedy="give sizes of 1 byte or more, 2 ranks or more, and times above 0",
            )
    sizes = len({point.nbytes for point in found})
    if sizes < _LEAST_SIZES:
        raise UsageError(
            f"{op}: {sizes} sizes are too few to fit a line and to check it",
            remedy=f"measure {_LEAST_SIZES} sizes or more; ten make a good fit",
        )
    return found


def _fit(
    points: Sequence[MeasuredPoint], op: str, forms: Sequence[AlgorithmTerms] | None, most: int, own: bool
) -> CollectiveFit:
    """Return the fit without held-out errors."""
    forms = candidates(op) if forms is None else forms
    form, error_of_form = _choose(points, op, forms)
    samples = _samples(points, op, form)
    count = how_many(samples, most)
    ranks = tuple(sorted({point.ranks for point in points}))
    return CollectiveFit(
        op=op,
        form=form,
        told=len(forms) == 1 or bool(error_of_form),
        segments=tuple(cut(samples, count)),
        ranks=ranks,
        points=len(points),
        error_of_form={str(tried): error for tried, error in error_of_form.items()},
        own=_own(points, op, form, most, left_out(samples, count)) if own and len(ranks) > 1 else {},
    )


def _own(
    points: Sequence[MeasuredPoint], op: str, form: AlgorithmTerms, most: int, common: dict[float, float]
) -> dict[int, tuple[FitSegment, ...]]:
    """Return segments for each number of ranks alone; none if the common ones are better.

    Args:
        points, op, form, most: as for `_fit`.
        common: relative error of the common segments at each inner size, left out.
    """
    own, errors_at = {}, defaultdict(list)
    for ranks in sorted({point.ranks for point in points}):
        samples = _samples([point for point in points if point.ranks == ranks], op, form)
        if len(samples.sizes) < _LEAST_SIZES:
            return {}
        count = how_many(samples, most)
        own[ranks] = tuple(cut(samples, count))
        for size, error in left_out(samples, count).items():
            errors_at[size].append(error)
    both = [(np.mean(errors), common[size]) for size, errors in errors_at.items() if size in common]
    alone, together = (np.median(column) for column in zip(*both, strict=True))
    return own if alone < together - _ROUNDING else {}


def _samples(points: Sequence[MeasuredPoint], op: str, form: AlgorithmTerms) -> Samples:
    terms = {ranks: terms_of(op, form, ranks) for ranks in {point.ranks for point in points}}
    columns = [
        (point.nbytes, terms[point.ranks].messages, terms[point.ranks].sent, point.seconds)
        for point in points
    ]
    return Samples(*np.array(columns, dtype=np.float64).T)


def _choose(
    points: Sequence[MeasuredPoint], op: str, forms: Sequence[AlgorithmTerms]
) -> tuple[AlgorithmTerms, dict[AlgorithmTerms, float]]:
    """Return the form that predicts a number of ranks from the others best, and the error of each form.

    Of forms that cost the same on all ranks measured the first stands for all.
    """
    numbers = sorted({point.ranks for point in points})
    if len(numbers) < 2 or len(forms) == 1:
        return forms[0], {}
    first_of: dict[tuple[Terms, ...], AlgorithmTerms] = {}
    for form in forms:
        first_of.setdefault(tuple(terms_of(op, form, ranks) for ranks in numbers), form)
    error_of = {form: _error_across(points, op, form, numbers) for form in first_of.values()}
    usual, best = forms[0], min(error_of, key=error_of.__getitem__)
    gain = _GAIN_OF_TWO if len(numbers) == 2 else _GAIN
    return (best if error_of[best] < gain * error_of[usual] else usual), error_of


def _error_across(
    points: Sequence[MeasuredPoint], op: str, form: AlgorithmTerms, numbers: Sequence[int]
) -> float:
    """Return the typical relative error of a form: e to the mean of |log(predicted / measured)|, less 1.

    Over two segments at most, which is enough to tell forms apart. In logarithms half and twice are as far off.
    """
    logs = []
    for ranks in numbers:
        samples = _samples([point for point in points if point.ranks != ranks], op, form)
        fit = CollectiveFit(op, form, True, tuple(cut(samples, 2)), (), 0, {})
        logs += [
            abs(math.log(fit.seconds(point.nbytes, ranks) / point.seconds))
            for point in points
            if point.ranks == ranks and fit.low <= point.nbytes <= fit.high
        ]
    return math.expm1(sum(logs) / len(logs)) if logs else math.inf
