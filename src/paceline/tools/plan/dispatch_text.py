"""What a forecast of dispatched data says, in words. Pure functions over numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import get_args

from paceline.data.sampling.uneven_policies import UnevenPolicy
from paceline.tools.plan.balance_report import BatchBalance, PolicyOutcome

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
    "What is dropped or repeated is no even part of the data, but some ranks'. Dealt anew every epoch it is another "
    "part each time; where every rank keeps its own data, the same samples are never seen. On average, an epoch's "
    "gradient is then off by at most the weight moved × how far the gradients of two ranks' data are apart."
)


def summarise_counts(numbers: Sequence[int], kinds: int = 4, most: int = 10) -> str:
    """Return one number a rank, in rank order: equal ones together, few one by one; of many the kinds or the range.

    Example:
        >>> in_short([7144, 7144, 7144, 7142]), in_short([3, 1, 2, 6, 5]), in_short(range(100, 200))
        ('7144 ×3, 7142', '3 1 2 6 5', '100 to 199')
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
    """Return ascending numbers as ranges, the first ones and the last of many.

    Example:
        >>> ranges([1, 2, 3, 5, 8, 9])
        '1–3, 5, 8–9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [f"{first}–{last}" if last > first else f"{first}" for first, last in runs]
    if len(told) > most:
        told[most - 1 : -1] = ["…"]
    return ", ".join(told)


def percent(part: float) -> str:
    """Return a fraction in per cent, with as many digits as tell it from none.

    Example:
        >>> percent(0.1234), percent(0.00016), percent(0), percent(1.5)
        ('12.3%', '0.016%', '0%', '150%')
    """
    return f"{100 * part:.3g}%" if abs(part) < 10 else f"{100 * part:.0f}%"


def describe_loop(balance: BatchBalance) -> str:
    """Return what happens to ranks that just loop over their own batches."""
    steps = min(balance.batches)
    if not balance.deadlock:
        return f"all make {steps} step{'s' * (steps != 1)}"
    after: dict[int, list[int]] = {}
    for rank, own in sorted(balance.starving, key=lambda each: (each[1], each[0])):
        after.setdefault(own, []).append(rank)
    told = [f"{_ranks(ranks)} after {own}" for own, ranks in after.items()]
    if len(told) > 3:
        told[2:] = [f"{len(balance.starving) - sum(map(len, list(after.values())[:2]))} more later"]
    return f"deadlock in step {steps + 1}; out of data: {', '.join(told)}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {format_ranges(ranks, most=3)}" + f" ({len(ranks)})" * (len(ranks) > 8)


def describe_outcome(outcome: PolicyOutcome) -> str:
    """Return whether an epoch uses every sample once."""
    if outcome.deadlock:
        return "no: it hangs"
    if outcome.refused:
        return "refused"
    return "yes" if outcome.exact else "no"


def describe_bias(found: Sequence[tuple[str, PolicyOutcome]], samples: int) -> list[str]:
    """Return what dropping or repeating samples does to the gradient; nothing where no policy does.

    Args:
        found: outcomes, each with its place, such as ``"block 2, batch 64"``.
        samples: of all ranks.
    """
    told = []
    for policy in get_args(UnevenPolicy):
        amount, place, worst = max(
            ((each.dropped + each.repeated, place, each) for place, each in found if each.policy == policy),
            key=itemgetter(0),
        )
        if amount:
            told.append(
                f"{policy} {'never uses' if worst.dropped else 'uses again'} up to {amount} of {samples} "
                f"samples ({percent(amount / samples)}), and moves {percent(worst.moved)} of the gradient's "
                f"weight between ranks ({place})"
            )
    return [f"In the worst case {'; '.join(told)}.", BIAS] if told else []


def describe_safe_sizes(sizes: Sequence[int], tried: int, near: int | None = None) -> str:
    """Return which sizes are safe, and the nearest ones to another.

    Args:
        sizes: ascending.
        tried: up to which size all were looked at.
        near: if it is not safe itself, the nearest safe sizes are told.
    """
    if not sizes:
        return f"none of {tried}"
    told = f"{format_ranges(sizes)} ({sum(size <= tried for size in sizes)} of {tried})"
    if near is None or near in set(sizes):
        return told
    below = [size for size in sizes if size < near][-1:]
    above = [size for size in sizes if size > near][:1]
    return f"{told}; nearest to {near}: {' and '.join(map(str, below + above))}"
