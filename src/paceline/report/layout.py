"""Where marks of a chart go: smoothing and labels that keep apart. Pure functions over numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["running_mean", "spread"]


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return for each value the mean of it and up to `reach` values on each side.

    Near an end both sides reach as far as the shorter one, so that a slope stays where it is.
    """
    sums = [0.0, *accumulate(values)]
    reaches = [min(reach, at, len(values) - 1 - at) for at in range(len(values))]
    return [(sums[at + r + 1] - sums[at - r]) / (2 * r + 1) for at, r in enumerate(reaches)]


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Return the positions, moved as little as needed for neighbours to be `gap` apart, in the same order.

    Positions that are too close become a group around their mean; groups that touch become one.
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    groups: list[list[int]] = []
    middle: list[float] = []
    for index in order:
        groups.append([index])
        middle.append(positions[index])
        while len(groups) > 1 and middle[-1] - middle[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            last, before = groups.pop(), groups.pop()
            groups.append(before + last)
            middle[-2:] = [sum(positions[member] for member in groups[-1]) / len(groups[-1])]
    spaced = [0.0] * len(positions)
    for group, centre in zip(groups, middle, strict=True):
        for place, index in enumerate(group):
            spaced[index] = centre + gap * (place - (len(group) - 1) / 2)
    return spaced
