"""Forecasts of an epoch over dispatched data, as numbers."""

from __future__ import annotations

import json

import pytest

from paceline.data.sampling.rank_shares import RankShares
from paceline.errors import UsageError
from paceline.tools.plan.dispatch_forecast import DispatchRequest, forecast_dispatch
from paceline.tools.plan.uneven_batch_outcomes import BatchBalance


def test_every_block_size_with_every_batch_size():
    found = forecast_dispatch(
        DispatchRequest(
            samples=50_000, shares=RankShares.equal(7), blocks=(2, 1000), batch_sizes=(64, 4096), draws=3
        )
    )
    assert [(each.block, each.batch_size) for each in found] == [(2, 64), (2, 4096), (1000, 64), (1000, 4096)]
    for each in found:
        assert (each.block in each.safe_blocks) == (not each.balance.deadlock)
        assert (each.batch_size in each.safe_batch_sizes) == (not each.balance.deadlock)
        assert each.blocks_tried == 50_000 // 7
        assert each.batch_sizes_tried == 4096


def test_requested_sizes_of_any_magnitude_are_checked():
    (found,) = forecast_dispatch(
        DispatchRequest(
            samples=10**6, shares=RankShares.equal(2), blocks=(500_000,), batch_sizes=(10_000,), draws=1
        )
    )
    assert found.blocks_tried == 10_000
    assert found.batch_sizes_tried == 4096
    assert 500_000 in found.safe_blocks
    assert 10_000 in found.safe_batch_sizes


def test_a_huge_batch_size_does_not_have_all_smaller_ones_looked_at():
    options = DispatchRequest(samples=10**6, shares=RankShares.equal(2), batch_sizes=(64, 10**15), draws=0)
    small, huge = forecast_dispatch(options)
    assert small.safe_batch_sizes == huge.safe_batch_sizes
    assert huge.safe_batch_sizes[-1] == 10**15
    assert len(huge.safe_batch_sizes) <= 4097


def test_imbalance_of_each_scheme():
    (found,) = forecast_dispatch(
        DispatchRequest(samples=50_000, shares=RankShares.equal(7), scheme="random", blocks=(1000,), draws=50)
    )
    counts = found.balance.dispatch.counts
    assert found.imbalance.dealt == pytest.approx(max(counts) / (50_000 / 7) - 1)
    assert found.imbalance.in_turns == pytest.approx(0.12)
    assert found.imbalance.bound_in_turns == pytest.approx(0.14)
    assert found.imbalance.random.draws == 50
    assert found.imbalance.random.drawn == pytest.approx(found.imbalance.random.expected, rel=0.2)


def test_fewer_draws_are_made_for_many_ranks_by_default():
    assert DispatchRequest(samples=100, shares=RankShares.equal(7)).draws_per_block == 400
    assert DispatchRequest(samples=10**6, shares=RankShares.equal(4000)).draws_per_block == 50
    assert DispatchRequest(samples=10**6, shares=RankShares.equal(4000), draws=400).draws_per_block == 400


def test_as_json():
    options = DispatchRequest(
        samples=1000,
        shares=RankShares((5, 5, 2, 8)),
        scheme="shares",
        blocks=(10,),
        batch_sizes=(16,),
        draws=0,
    )
    (found,) = forecast_dispatch(options)
    entry = json.loads(json.dumps(found.to_json(), allow_nan=False))
    balance = BatchBalance(options.dispatch(10), 16)
    assert entry["counts"] == [250, 250, 100, 400]
    assert entry["batches_floor"] == [15, 15, 6, 25]
    assert entry["batches_ceil"] == [16, 16, 7, 25]
    assert entry["starving"] == [{"rank": rank, "after_step": steps} for rank, steps in balance.starving]
    assert entry["deadlock"] is True
    assert list(entry["policies"]) == ["none", "join", "rebalance", "truncate", "pad", "drop", "error"]
    assert entry["policies"]["join"] == {
        "steps": 25,
        "used": 1000,
        "dropped": 0,
        "repeated": 0,
        "empty": 9 + 9 + 18,
        "moved": 0,
        "deadlock": False,
        "refused": "",
        "exact": True,
    }
    assert entry["policies"]["error"]["steps"] is None
    assert entry["imbalance"]["random"]["drawn"] is None
    assert options.to_json()["shares"] == [0.25, 0.25, 0.1, 0.4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "there is nothing to dispatch"),
        ({"samples": -3}, "-3 samples"),
        ({"blocks": (1, 1001)}, "a block of 1001 samples is larger than the data"),
        ({"blocks": (0,)}, "block=0"),
        ({"batch_sizes": (64, 0)}, "batch_size=0"),
        ({"scheme": "rnadom"}, "did you mean 'random'"),
        ({"draws": -1}, "draws=-1"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        DispatchRequest(**{"samples": 1000, "shares": RankShares.equal(3)} | arguments)
