"""Forecasts of dispatched data as text (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import get_args

from paceline.data.sampling.uneven_policies import UnevenPolicy
from paceline.tools.plan.uneven_batch_outcomes import BatchBalance, PolicyOutcome

__all__ = [
    "describe_bias",
    "describe_loop",
    "describe_outcome",
    "describe_safe_sizes",
    "format_ranges",
    "percent",
    "summarise_counts",
]

BIAS = (
    "Dropped and repeated samples are not spread evenly over the data, but are some ranks'. If the data are dispatched "
    "anew every epoch, they differ from epoch to epoch; if every rank keeps its data, the same samples are never seen. "
    "An epoch's mean gradient is then off by at most the weight moved × the distance between two ranks' gradients."
)


def summarise_counts(numbers: Sequence[int], kinds: int = 4, most: int = 10) -> str:
    """Return one number per rank, in short: runs of equal ones, few one by one, of many the kinds or the range.

    Example:
        >>> summarise_counts([7144, 7144, 7144, 7142]), summarise_counts([3, 1, 2])
        ('7144 ×3, 7142', '3, 1, 2')
    """
    runs = [(number, len(list(group))) for number, group in groupby(numbers)]
    if len(runs) > kinds and len(numbers) <= most:
        return " ".join(map(str, numbers))
    if len(runs) > kinds:
        runs = sorted(Counter(numbers).items(), reverse=True)
    if len(runs) > kinds:
        return f"{min(numbers)} to {max(numbers)}"
    return ", ".join(f"{number} ×{ranks}" if ranks > 1 else f"{number}" for number, ranks in runs)


def format_ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Return ascending numbers as ranges, many of them shortened.

    Example:
        >>> format_ranges([1, 2, 3, 5, 8, 9])
        '1–3, 5, 8–9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{first}–{last}" if last > first else f"{first}" for first, last in runs]
    if len(parts) > most:
        parts[most - 1 : -1] = ["…"]
    return ", ".join(parts)


def percent(part: float) -> str:
    """Return a fraction in per cent, three significant digits.

    Example:
        >>> percent(0.1234), percent(0.00016), percent(0), percent(1.5)
        ('12.3%', '0.016%', '0%', '150%')
    """
    return f"{100 * part:.3g}%" if abs(part) < 10 else f"{100 * part:.0f}%"


def describe_loop(balance: BatchBalance) -> str:
    """Return the outcome of ranks that each loop over their own batches: the steps, or the deadlock."""
    steps = min(balance.batches)
    if not balance.deadlock:
        return f"all make {steps} step{'s' * (steps != 1)}"
    after: dict[int, list[int]] = {}
    for rank, own in sorted(balance.starving, key=lambda each: (each[1], each[0])):
        after.setdefault(own, []).append(rank)
    parts = [f"{_ranks(ranks)} after {own}" for own, ranks in after.items()]
    if len(parts) > 3:
        parts[2:] = [f"{len(balance.starving) - sum(map(len, list(after.values())[:2]))} more later"]
    return f"deadlock in step {steps + 1}; out of data: {', '.join(parts)}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {format_ranges(ranks, most=3)}" + f" ({len(ranks)})" * (len(ranks) > 8)


def describe_outcome(outcome: PolicyOutcome) -> str:
    """Return as a table cell whether an epoch uses every sample once."""
    if outcome.deadlock:
        return "no: it hangs"
    if outcome.refused:
        return "refused"
    return "yes" if outcome.exact else "no"


def describe_bias(found: Sequence[tuple[str, PolicyOutcome]], samples: int) -> list[str]:
    """Return the effect of dropped or repeated samples on the gradient; empty if no policy drops or repeats any.

    Args:
        found: outcomes, each with its label, such as ``"block 2, batch 64"``.
        samples: of all ranks.
    """
    worst_cases = []
    for policy in get_args(UnevenPolicy):
        amount, place, worst = max(
            ((each.dropped + each.repeated, place, each) for place, each in found if each.policy == policy),
            key=itemgetter(0),
        )
        if amount:
            worst_cases.append(
                f"{policy} {'never uses' if worst.dropped else 'uses again'} up to {amount} of {samples} "
                f"samples ({percent(amount / samples)}), and moves {percent(worst.moved)} of the gradient's "
                f"weight between ranks ({place})"
            )
    return [f"In the worst case {'; '.join(worst_cases)}.", BIAS] if worst_cases else []


def describe_safe_sizes(sizes: Sequence[int], tried: int, near: int | None = None) -> str:
    """Return the safe sizes, and those nearest to another size.

    Args:
        sizes: ascending.
        tried: all sizes up to it were checked.
        near: if it is not safe, the nearest safe sizes are added.
    """
    if not sizes:
        return f"none of {tried}"
    text = f"{format_ranges(sizes)} ({sum(size <= tried for size in sizes)} of {tried})"
    if near is None or near in set(sizes):
        return text
    below = [size for size in sizes if size < near][-1:]
    above = [size for size in sizes if size > near][:1]
    return f"{text}; nearest to {near}: {' and '.join(map(str, below + above))}"
