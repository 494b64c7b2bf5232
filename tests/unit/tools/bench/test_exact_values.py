"""Checks of sums: they hold for what is right, and see one wrong place."""

from __future__ import annotations

import pytest
import torch

from paceline.tools.bench.collectives.exact_buffers import all_equal, is_sum, is_written, write

NUMEL = 3_000_001  # several blocks and a rest


def written(rank):
    buffer = torch.empty(NUMEL)
    write(buffer, rank)
    return buffer


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_the_sum_over_ranks_is_exact(ranks):
    total = torch.zeros(NUMEL)
    for rank in range(ranks):
        assert is_written(written(rank), rank)
        total += written(rank)
    assert is_sum(total, ranks)
    total[-1] += 1
    assert not is_sum(total, ranks)


def test_another_ranks_numbers_and_misplaced_ones_are_seen():
    assert not is_written(written(1), 0)
    for distance in (1, 1024, 262_144, 1 << 20):
        assert not is_written(written(0).roll(distance), 0)


def test_one_value_everywhere():
    buffer = torch.full((1000,), 2.0**40)
    assert all_equal(buffer, 2.0**40)
    buffer[500] = float("nan")
    assert not all_equal(buffer, 2.0**40)
