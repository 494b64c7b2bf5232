"""Exact patterns and sums: correct results pass, a single wrong element fails."""

from __future__ import annotations

import pytest
import torch

from paceline.tools.bench.collectives.exact_buffers import all_equal, holds_pattern, holds_sum, write_pattern

NUMEL = 3_000_001  # several blocks and a rest


def written(rank):
    buffer = torch.empty(NUMEL)
    write_pattern(buffer, rank)
    return buffer


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_the_sum_over_ranks_is_exact(ranks):
    total = torch.zeros(NUMEL)
    for rank in range(ranks):
        assert holds_pattern(written(rank), rank)
        total += written(rank)
    assert holds_sum(total, ranks)
    total[-1] += 1
    assert not holds_sum(total, ranks)


def test_numbers_of_another_rank_and_misplaced_ones_are_detected():
    assert not holds_pattern(written(1), 0)
    for distance in (1, 1024, 262_144, 1 << 20):
        assert not holds_pattern(written(0).roll(distance), 0)


def test_all_elements_equal_a_value():
    buffer = torch.full((1000,), 2.0**40)
    assert all_equal(buffer, 2.0**40)
    buffer[500] = float("nan")
    assert not all_equal(buffer, 2.0**40)
