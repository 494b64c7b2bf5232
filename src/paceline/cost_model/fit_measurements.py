"""Fits measured times: chooses the algorithm and the segments, and measures how well the fit predicts unseen times.

1. Form (`paceline.cost_model.cost_forms`): with two or more numbers of ranks, every form predicts each number from the
   others, and the form with the least error wins; the default algorithm stays unless another is better by a tenth. Two
   numbers give only one ratio, which a disturbance can turn, so there another form must halve the error. With one
   number of ranks all forms fit alike, and the default algorithm is assumed.
2. Segments: see [Note: segments] in `paceline.cost_model.piecewise_fit`.
3. Ranks: no form is exact, least of all where more ranks than cores run. Numbers of ranks that were measured get their
   own segments if these predict left-out sizes better than the common ones, by the median. The common segments serve
   all other numbers.
4. Held-out errors: steps 1 to 3 again without every second size (the first and the last stay), and without each number
   of ranks in turn; what is held out takes no part in any choice.

Times are expected to be medians over iterations, which removes single outliers. The rest counts by its relative error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from paceline.collectives.closed_form_cost import Terms
from paceline.cost_model.collective_prediction import (
    CheckedPrediction,
    CollectiveFit,
    PredictionError,
    RanksSegments,
)
from paceline.cost_model.cost_forms import CostForm, candidate_forms, terms_of
from paceline.cost_model.piecewise_fit import (
    MAX_SEGMENTS,
    FitSamples,
    choose_segment_count,
    fit_segments,
    leave_one_out_errors,
    piecewise_seconds,
)
from paceline.errors import UsageError

__all__ = ["MeasuredPoint", "fit_points", "held_out_ranks", "held_out_sizes"]

_MIN_SIZES = 3
_ROUNDING = 1e-9  # relative errors that differ by less count as equal, on any processor
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
    forms: Sequence[CostForm] | None = None,
    max_segments: int = MAX_SEGMENTS,
    per_ranks: bool = True,
) -> CollectiveFit:
    """Fit the times of one operation and return the fit with its held-out errors.

    Args:
        points: at least three sizes, by two or more ranks.
        op: such as ``"all-reduce"``.
        forms: to choose from, the default one first; by default all candidates. Pass one if it is known.
        max_segments: limit of the number of ranges of sizes.
        per_ranks: whether a number of ranks may have its own segments.

    Raises:
        UsageError: there are too few sizes, or a size, number of ranks or time is invalid.

    Example:
        >>> points = [MeasuredPoint(n, 4, 6 * 1e-5 + 1.5e-9 * n) for n in (10**4, 10**5, 10**6, 10**7)]
        >>> fit = fit_points(points, "all-reduce")
        >>> str(fit.form), round(fit.segments[0].alpha * 1e6, 3)
        ('ring', 10.0)
    """
    checked = _checked(points, op)
    options: dict[str, Any] = {"forms": forms, "max_segments": max_segments, "per_ranks": per_ranks}
    return replace(
        _fit(checked, op, **options),
        sizes_error=PredictionError.of(held_out_sizes(checked, op, **options)),
        ranks_error=PredictionError.of(held_out_ranks(checked, op, **options)),
    )


def held_out_sizes(
    points: Iterable[MeasuredPoint],
    op: str,
    *,
    forms: Sequence[CostForm] | None = None,
    max_segments: int = MAX_SEGMENTS,
    per_ranks: bool = True,
) -> list[CheckedPrediction]:
    """Predict every second size, never the first or the last, from the other sizes.

    Args, Raises: as for `fit_points`.
    """
    checked = _checked(points, op)
    sizes = sorted({point.nbytes for point in checked})
    held_out = set(sizes[1:-1:2])
    rest = [point for point in checked if point.nbytes not in held_out]
    fit = _fit(rest, op, forms, max_segments, per_ranks)
    return [_check(fit, point) for point in checked if point.nbytes in held_out]


def held_out_ranks(
    points: Iterable[MeasuredPoint],
    op: str,
    *,
    forms: Sequence[CostForm] | None = None,
    max_segments: int = MAX_SEGMENTS,
    per_ranks: bool = True,
) -> list[CheckedPrediction]:
    """Predict every measurement from the other numbers of ranks; empty if there is only one number.

    Sizes beyond those of the other numbers are left out.

    Args, Raises: as for `fit_points`.
    """
    checked, predictions = _checked(points, op), []
    for ranks in sorted({point.ranks for point in checked}):
        rest = [point for point in checked if point.ranks != ranks]
        if len({point.nbytes for point in rest}) < 2:
            continue
        fit = _fit(rest, op, forms, max_segments, per_ranks)
        predictions += [
            _check(fit, point)
            for point in checked
            if point.ranks == ranks and fit.low <= point.nbytes <= fit.high
        ]
    return predictions


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
    if sizes < _MIN_SIZES:
        raise UsageError(
            f"{op}: {sizes} sizes are too few to fit a line and to check it",
            remedy=f"measure {_MIN_SIZES} sizes or more; ten make a good fit",
        )
    return found


def _fit(
    points: Sequence[MeasuredPoint],
    op: str,
    forms: Sequence[CostForm] | None,
    max_segments: int,
    per_ranks: bool,
) -> CollectiveFit:
    """Return the fit without held-out errors."""
    forms = candidate_forms(op) if forms is None else forms
    form, error_of_form = _choose_form(points, op, forms)
    samples = _samples(points, op, form)
    count = choose_segment_count(samples, max_segments)
    ranks = tuple(sorted({point.ranks for point in points}))
    separate: tuple[RanksSegments, ...] = ()
    if per_ranks and len(ranks) > 1:
        separate = _segments_of_ranks(points, op, form, max_segments, leave_one_out_errors(samples, count))
    return CollectiveFit(
        op=op,
        algorithm=str(form),
        identified=len(forms) == 1 or bool(error_of_form),
        ranks=ranks,
        points=len(points),
        segments=tuple(fit_segments(samples, count)),
        segments_of_ranks=separate,
        sizes_error=None,
        ranks_error=None,
        error_of_form={str(tried): error for tried, error in error_of_form.items()},
    )


def _segments_of_ranks(
    points: Sequence[MeasuredPoint], op: str, form: CostForm, max_segments: int, common: dict[float, float]
) -> tuple[RanksSegments, ...]:
    """Return segments of each number of ranks alone; none if the common ones predict better.

    Args:
        points: as for `_fit`.
        op: as for `_fit`.
        form: the chosen one.
        max_segments: as for `_fit`.
        common: relative error of the common segments at each inner size, left out.
    """
    separate, errors_at = [], defaultdict(list)
    for ranks in sorted({point.ranks for point in points}):
        samples = _samples([point for point in points if point.ranks == ranks], op, form)
        if len(samples.sizes) < _MIN_SIZES:
            return ()
        count = choose_segment_count(samples, max_segments)
        separate.append(RanksSegments(ranks, tuple(fit_segments(samples, count))))
        for size, error in leave_one_out_errors(samples, count).items():
            errors_at[size].append(error)
    both = [(np.mean(errors), common[size]) for size, errors in errors_at.items() if size in common]
    alone, together = (np.median(column) for column in zip(*both, strict=True))
    return tuple(separate) if alone < together - _ROUNDING else ()


def _samples(points: Sequence[MeasuredPoint], op: str, form: CostForm) -> FitSamples:
    terms = {ranks: terms_of(op, form, ranks) for ranks in {point.ranks for point in points}}
    columns = [
        (point.nbytes, terms[point.ranks].messages, terms[point.ranks].sent, point.seconds)
        for point in points
    ]
    return FitSamples(*np.array(columns, dtype=np.float64).T)


def _choose_form(
    points: Sequence[MeasuredPoint], op: str, forms: Sequence[CostForm]
) -> tuple[CostForm, dict[CostForm, float]]:
    """Return the form that best predicts a number of ranks from the others, and the error of each form.

    Of forms that cost the same for all measured ranks, the first stands for all.
    """
    numbers = sorted({point.ranks for point in points})
    if len(numbers) < 2 or len(forms) == 1:
        return forms[0], {}
    first_of: dict[tuple[Terms, ...], CostForm] = {}
    for form in forms:
        first_of.setdefault(tuple(terms_of(op, form, ranks) for ranks in numbers), form)
    error_of = {form: _error_across_ranks(points, op, form, numbers) for form in first_of.values()}
    default, best = forms[0], min(error_of, key=error_of.__getitem__)
    gain = _GAIN_OF_TWO if len(numbers) == 2 else _GAIN
    return (best if error_of[best] < gain * error_of[default] else default), error_of


def _error_across_ranks(
    points: Sequence[MeasuredPoint], op: str, form: CostForm, numbers: Sequence[int]
) -> float:
    """Return the typical relative error of a form: e to the mean of |log(predicted / measured)|, minus 1.

    Two segments at most are enough to distinguish forms. In logarithms, half and twice are equally far off.
    """
    logs = []
    for ranks in numbers:
        terms = terms_of(op, form, ranks)
        samples = _samples([point for point in points if point.ranks != ranks], op, form)
        segments = fit_segments(samples, 2)
        logs += [
            abs(
                math.log(
                    piecewise_seconds(segments, point.nbytes, terms.messages, terms.sent) / point.seconds
                )
            )
            for point in points
            if point.ranks == ranks and segments[0].low <= point.nbytes <= segments[-1].high
        ]
    return math.expm1(sum(logs) / len(logs)) if logs else math.inf
