"""Numbers of bench collectives by hand: sizes, bandwidth factors, aggregation over ranks and iterations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.tools.bench.collectives.bus_bandwidth import OPERATIONS, algbw, busbw, find_operation
from paceline.tools.bench.collectives.collectives_rows import (
    CollectiveRow,
    TimeSummary,
    summarise_times,
)

TIMES = TimeSummary(
    iterations=2, median_s=0.5, p95_s=0.9, min_s=0.1, max_s=1.0, slowest_rank=3, slowest_share=0.5
)
ROW = CollectiveRow(
    backend="gloo", op="all-reduce", ranks=4, nbytes=1000, dtype="float32", times=TIMES, correct=True
)


@pytest.mark.parametrize(
    ("op", "factor_of_ranks"),
    [  # nccl-tests: src/all_reduce.cu, reduce_scatter.cu, all_gather.cu, broadcast.cu, alltoall.cu, sendrecv.cu
        ("all-reduce", {2: 1.0, 4: 1.5, 6: 10 / 6}),
        ("reduce-scatter", {2: 0.5, 4: 0.75, 6: 5 / 6}),
        ("all-gather", {2: 0.5, 4: 0.75, 6: 5 / 6}),
        ("broadcast", {2: 1.0, 4: 1.0, 6: 1.0}),
        ("all-to-all", {2: 0.5, 4: 0.75, 6: 5 / 6}),
        ("send-recv", {2: 1.0, 4: 1.0, 6: 1.0}),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(op, factor_of_ranks):
    for ranks, factor in factor_of_ranks.items():
        assert busbw(op, ranks, 3_000_000, 0.5) == pytest.approx(6e6 * factor)
    assert algbw(3_000_000, 0.5) == 6e6


def test_every_operation_has_a_factor_case():
    assert set(OPERATIONS) == {
        *("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "send-recv")
    }


def test_an_unknown_operation_gets_the_nearest_suggested():
    with pytest.raises(UsageError, match=r"(?s)'allreduce'.*did you mean 'all-reduce'"):
        find_operation("allreduce")


@pytest.mark.parametrize(
    ("op", "given", "ranks", "itemsize", "rounded"),
    [
        ("all-reduce", 1_000_000, 6, 4, 1_000_000),
        ("all-reduce", 1_000_003, 6, 4, 1_000_000),
        ("all-to-all", 1_000_000, 6, 4, 999_984),
        ("reduce-scatter", 5, 3, 8, 24),  # one element a part at least
        ("broadcast", 1, 3, 8, 8),
    ],
)
def test_sizes_are_whole_elements_and_equal_parts(op, given, ranks, itemsize, rounded):
    assert find_operation(op).round(given, ranks, itemsize) == rounded


def test_the_slowest_rank_is_the_time_of_an_iteration():
    found = summarise_times([[1.0, 2.0, 1.5], [9.0, 3.0, 2.0], [1.0, 5.0, 4.0], [1.0, 7.0, 2.0]])
    assert (found.iterations, found.min_s, found.max_s) == (4, 2.0, 9.0)
    assert found.median_s == 6.0  # of 2, 9, 5, 7
    assert found.p95_s == pytest.approx(8.7)  # 7 and 9 are the third and fourth: 0.95 · 3 = 2.85
    assert (found.slowest_rank, found.slowest_share) == (1, 0.75)


def test_of_ranks_that_were_last_equally_often_the_first_counts():
    assert summarise_times([[1.0, 2.0], [2.0, 1.0]]).slowest_rank == 0
    assert summarise_times([[3.0, 3.0]]).slowest_rank == 0


def test_bandwidth_is_no_mean_of_rates():
    noisy = summarise_times([[0.001], [0.001], [0.004], [0.004], [0.004]])
    row = replace(ROW, ranks=2, nbytes=4_000_000, times=noisy)
    assert row.algbw == pytest.approx(1e9)  # the mean of S/t would be 2.2e9


def test_statistics_of_one_iteration_and_of_three():
    assert summarise_times([[7.0]]).p95_s == 7.0
    found = summarise_times([[3.0], [1.0], [2.0]])
    assert (found.min_s, found.median_s, found.max_s) == (1.0, 2.0, 3.0)


def test_a_row_has_all_columns_and_survives_json():
    record = ROW.to_json()
    assert {
        *("backend", "op", "ranks", "nbytes", "dtype", "iterations", "median_s", "p95_s", "min_s", "max_s"),
        *("slowest_rank", "algbw", "busbw", "correct"),
    } <= set(record)
    assert (record["algbw"], record["busbw"]) == (2000.0, 3000.0)
    assert CollectiveRow.from_json(record, "here") == ROW
