"""Numbers of bench collectives by hand: sizes, bandwidth factors, aggregation over ranks and iterations."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.tools.bench.collectives.bus_bandwidth import OPERATIONS, algbw, busbw, operation_of
from paceline.tools.bench.collectives.collectives_rows import Row, Summary, percentile, summarize
from paceline.tools.bench.collectives.collectives_settings import parse_names, parse_ranks, parse_sizes

ROW = Row("gloo", "all-reduce", 4, 1000, "float32", Summary(2, 0.5, 0.9, 0.1, 1.0, 3, 0.5), True)


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
        operation_of("allreduce")


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
    assert operation_of(op).round(given, ranks, itemsize) == rounded


def test_the_slowest_rank_stands_for_an_iteration():
    found = summarize([[1.0, 2.0, 1.5], [9.0, 3.0, 2.0], [1.0, 5.0, 4.0], [1.0, 7.0, 2.0]])
    assert (found.iterations, found.min_s, found.max_s) == (4, 2.0, 9.0)
    assert found.median_s == 6.0  # of 2, 9, 5, 7
    assert found.p95_s == pytest.approx(8.7)  # 7 and 9 are the third and fourth: 0.95 · 3 = 2.85
    assert (found.slowest_rank, found.slowest_share) == (1, 0.75)


def test_of_ranks_that_were_last_equally_often_the_first_is_named():
    assert summarize([[1.0, 2.0], [2.0, 1.0]]).slowest_rank == 0
    assert summarize([[3.0, 3.0]]).slowest_rank == 0


def test_bandwidth_is_no_mean_of_rates():
    noisy = summarize([[0.001], [0.001], [0.004], [0.004], [0.004]])
    row = Row("gloo", "all-reduce", 2, 4_000_000, "float32", noisy, True)
    assert row.algbw == pytest.approx(1e9)  # the mean of S/t would be 2.2e9


def test_percentile_of_one_value_and_of_ends():
    assert percentile([7.0], 0.95) == 7.0
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.0, 3.0]


def test_a_row_says_what_readers_need_and_comes_back():
    record = ROW.to_json()
    assert {
        *("backend", "op", "ranks", "nbytes", "dtype", "iterations", "median_s", "p95_s", "min_s", "max_s"),
        *("slowest_rank", "algbw", "busbw", "correct"),
    } <= set(record)
    assert (record["algbw"], record["busbw"]) == (2000.0, 3000.0)
    assert Row.from_json(record) == ROW


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1MB,10MB,100MB,1024MB", (10**6, 10**7, 10**8, 1_024_000_000)),
        ("64KiB:64MiB:x2", tuple(65536 * 2**step for step in range(11))),
        ("1kB:10kB:x10", (1000, 10_000)),
        ("1kB:9kB:x10", (1000,)),
        ("1kB:2kB:+250B, 4, 1kB", (4, 1000, 1250, 1500, 1750, 2000)),
        ("100:200:x1.5", (100, 150)),
    ],
)
def test_sizes_and_sweeps(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names none"),
        ("big", "is no size"),
        ("0", "at least 1 byte"),
        ("1MB:2MB", "is no sweep"),
        ("1MB:2MB:2", "is no sweep"),
        ("2MB:1MB:x2", "begins above its end"),
        ("1MB:2MB:x1", "makes no sweep"),
        ("1MB:2MB:xx", "makes no sweep"),
        ("1:1GB:+1", "more than 200"),
        ("1B:1GB:x1.0001", "more than 200"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_sizes(text)


def test_names_and_ranks_count_once():
    assert parse_names("gloo, paceline,gloo", "--backends") == ("gloo", "paceline")
    assert parse_ranks("4,2,4") == (2, 4)
    with pytest.raises(UsageError, match="is no number of ranks"):
        parse_ranks("2,many")
