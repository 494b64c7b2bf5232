"""Text and charts about dispatched data."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from drawn_chart import svg_of
from paceline.data.sampling.block_dispatch import BlockDispatch, dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.tools.plan.dispatch_forecast import DispatchRequest, forecast_dispatch
from paceline.tools.plan.dispatch_text import (
    describe_bias,
    describe_loop,
    describe_safe_sizes,
    format_ranges,
    percent,
    summarise_counts,
)
from paceline.tools.plan.uneven_batch_outcomes import BatchBalance, PolicyOutcome
from paceline.tools.report.charts.dispatch_charts import MAX_PANELS, epoch_end_chart, imbalance_chart


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([7144] * 3 + [7142] * 4, "7144 ×3, 7142 ×4"),
        ([8000, *[7000] * 6], "8000, 7000 ×6"),
        ([5], "5"),
        ([7054, 6904, 7180, 7274, 7280, 7222, 7086], "7054 6904 7180 7274 7280 7222 7086"),
        ([1, 2, 1, 2, 1], "1 2 1 2 1"),
        ([1, 2] * 50, "2 ×50, 1 ×50"),
        (list(range(100)), "0 to 99"),
    ],
)
def test_numbers_in_short(numbers, expected):
    assert summarise_counts(numbers) == expected


def test_ranges():
    assert format_ranges([1, 2, 3, 5, 8, 9]) == "1–3, 5, 8–9"
    assert format_ranges(range(1, 40, 2), most=4) == "1, 3, 5, …, 39"
    assert format_ranges([]) == ""


@pytest.mark.parametrize(
    ("part", "expected"), [(0, "0%"), (0.00016, "0.016%"), (0.1234, "12.3%"), (1.24, "124%"), (12.5, "1250%")]
)
def test_per_cent(part, expected):
    assert percent(part) == expected


def balance(*counts, size=10, drop_last=False):
    """Return a balance with these samples a rank: by shares, one sample a block."""
    return BatchBalance(BlockDispatch(sum(counts), RankShares(counts)), size, drop_last)


def test_a_custom_loop_over_uneven_batches():
    assert describe_loop(balance(20, 15)) == "all make 2 steps"
    assert describe_loop(balance(20, 15, drop_last=True)) == "deadlock in step 2; out of data: rank 1 after 1"
    assert describe_loop(balance(50, 30, 30, 20, 41)) == (
        "deadlock in step 3; out of data: rank 3 after 2, ranks 1–2 after 3"
    )
    assert describe_loop(balance(90, 80, 70, 60, 50)) == (
        "deadlock in step 6; out of data: rank 4 after 5, rank 3 after 6, 2 more later"
    )
    assert describe_loop(balance(5, 0)) == "deadlock in step 1; out of data: rank 1 after 0"


def test_many_starving_ranks_are_counted():
    assert describe_loop(BatchBalance(dispatch_blocks(990, 100, block=10), 10)).endswith("rank 99 after 0")
    assert "ranks 60–99 (40) after 0" in describe_loop(BatchBalance(dispatch_blocks(600, 100, block=10), 10))


FIELDS = ("dropped", "repeated", "empty", "moved")


def test_the_worst_case_of_each_policy_is_described():
    found = [
        ("here", PolicyOutcome(policy=policy, steps=10, used=100, **dict(zip(FIELDS, amounts, strict=False))))
        for policy, amounts in {
            "join": (0, 0),
            "rebalance": (0, 0),
            "truncate": (5, 0, 0, 0.02),
            "pad": (0, 7, 0, 0.03),
            "drop": (9, 0, 0, 0.04),
            "error": (0, 0),
        }.items()
    ]
    output, bias = describe_bias(
        [*found, ("there", PolicyOutcome(policy="truncate", steps=9, used=80, dropped=25, moved=0.1))], 105
    )
    assert "truncate never uses up to 25 of 105 samples (23.8%), and moves 10% of" in output
    assert "(there); pad uses again up to 7 of 105" in output
    assert "drop never uses up to 9" in output
    assert "some ranks'" in bias
    clean = [(place, PolicyOutcome(policy=each.policy, steps=10, used=105)) for place, each in found]
    assert describe_bias(clean, 105) == []


def test_safe_sizes_and_the_nearest_ones():
    assert describe_safe_sizes([1, 2, 3, 9], 10) == "1–3, 9 (4 of 10)"
    assert describe_safe_sizes([1, 2, 3, 9], 10, near=3) == "1–3, 9 (4 of 10)"
    assert describe_safe_sizes([1, 2, 3, 9], 10, near=5) == "1–3, 9 (4 of 10); nearest to 5: 3 and 9"
    assert describe_safe_sizes([9], 10, near=5) == "9 (1 of 10); nearest to 5: 9"
    assert describe_safe_sizes([], 10) == "none of 10"


# ------------------------------------------------------------------ pictures


def texts(chart):
    svg = svg_of(chart)
    return [each.text or "" for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_imbalance_by_block_size():
    options = DispatchRequest(samples=50_000, shares=RankShares.equal(7), blocks=(2, 10, 100, 1000), draws=20)
    labels = texts(imbalance_chart(forecast_dispatch(options), title="seven workers"))
    assert {"seven workers", "at random: expected", "at random: 1 in 1000 above", "in turns: never more"} <= {
        *labels
    }
    assert {"mean of 20 draws", "worst of 20 draws", "in turns, exact", "samples of a block"} <= {*labels}
    assert {"1%", "100%", "1,000"} <= {*labels}


def test_zeros_are_labelled_where_they_cannot_be_drawn():
    options = DispatchRequest(samples=49_000, shares=RankShares.equal(7), blocks=(1, 10, 900), draws=0)
    labels = texts(imbalance_chart(forecast_dispatch(options), title=""))
    assert "in turns, exact (0 for blocks of 1, 10)" in labels
    assert not any("draws" in each for each in labels)


def test_the_end_of_an_epoch_names_ranks_and_the_effect_of_policies():
    options = DispatchRequest(samples=50_000, shares=RankShares.equal(7), blocks=(2, 1000), draws=0)
    labels = texts(epoch_end_chart(forecast_dispatch(options), title="the end"))
    assert "block 2, batch 64: all ranks run 112 steps" in labels
    output = "join and pad 125 steps, truncate 110, drop 109, rebalance 112 (line)"
    assert f"block 1000, batch 64: {output}" in labels
    assert {"rank 0", "rank 6", "every rank has a batch", "step"} <= {*labels}


def test_a_policy_without_steps_is_labelled():
    options = DispatchRequest(samples=100, shares=RankShares((1, 99)), blocks=(1,), draws=0)
    labels = texts(epoch_end_chart(forecast_dispatch(options), title=""))
    assert "block 1, batch 64: join and pad 2 steps, truncate 1, drop no, rebalance 1 (line)" in labels


def test_the_most_uneven_are_drawn():
    options = DispatchRequest(
        samples=50_000, shares=RankShares.equal(7), blocks=(1, 2, 3, 4, 5, 6, 1000, 2000), draws=0
    )
    labels = [
        each
        for each in texts(epoch_end_chart(forecast_dispatch(options), title=""))
        if each.startswith("block")
    ]
    assert len(labels) == MAX_PANELS
    assert labels[-1].startswith("block 2000")


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["random", "round_robin"])
@pytest.mark.parametrize(("samples", "ranks"), [(1, 1), (3, 7), (10**6, 3000)])
def test_everything_can_be_drawn(samples, ranks, scheme, tmp_path):
    found = forecast_dispatch(
        DispatchRequest(samples=samples, shares=RankShares.equal(ranks), scheme=scheme, draws=2)
    )
    for number, chart in enumerate((imbalance_chart(found, title="x"), epoch_end_chart(found, title="x"))):
        assert chart.save(tmp_path / f"{number}.png").stat().st_size > 1000
