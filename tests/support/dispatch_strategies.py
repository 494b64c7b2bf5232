"""Hypothesis strategies for `BlockDispatch`, and its positions listed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
from hypothesis import strategies as st

from paceline.data.sampling.block_dispatch import BlockDispatch, DispatchScheme
from paceline.data.sampling.rank_shares import RankShares

SCHEMES = st.sampled_from(get_args(DispatchScheme))
SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def shares(draw):
    """Draw the shares of up to 9 ranks, some of them 0."""
    parts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))
    return RankShares(tuple(parts)) if any(parts) else RankShares.equal(len(parts))


@st.composite
def dispatches(draw, least=0):
    """Draw an assignment of `least` to a few hundred samples."""
    samples = draw(st.integers(least, 300))
    return BlockDispatch(samples, draw(shares()), draw(st.integers(1, 40)), draw(SCHEMES), draw(SEEDS))


def positions_of_rank(dispatch: BlockDispatch) -> list[list[int]]:
    """Return the positions of each rank's samples, from the rank of every block."""
    positions: list[list[int]] = [[] for _ in range(dispatch.ranks)]
    for block in range(dispatch.blocks):
        first = block * dispatch.block
        positions[dispatch.owner(block)] += range(first, min(first + dispatch.block, dispatch.samples))
    return positions


def chi_squared(found: Sequence[int] | np.ndarray, expected: float) -> float:
    """Return how many standard deviations the χ² of `found` is above its expectation."""
    counts = np.asarray(found, dtype=float).ravel()
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))
