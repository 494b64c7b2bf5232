"""Dealings of all kinds for property tests, and what they mean, listed one by one."""

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
def dealings(draw, least=0):
    """Draw a dealing of `least` to a few hundred samples."""
    samples = draw(st.integers(least, 300))
    return BlockDispatch(samples, draw(shares()), draw(st.integers(1, 40)), draw(SCHEMES), draw(SEEDS))


def rows_of_rank(dealing: BlockDispatch) -> list[list[int]]:
    """Return where the samples of each rank stand, from nothing but the owner of every block."""
    rows: list[list[int]] = [[] for _ in range(dealing.ranks)]
    for block in range(dealing.blocks):
        first = block * dealing.block
        rows[dealing.owner(block)] += range(first, min(first + dealing.block, dealing.samples))
    return rows


def chi_squared(found: Sequence[int] | np.ndarray, expected: float) -> float:
    """Return how many standard deviations the χ² of `found` is above what chance gives."""
    counts = np.asarray(found, dtype=float).ravel()
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))
