"""Advice: the best allowed strategy, scaling, bottlenecks and remedies; every figure worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import step_profile as made
from paceline.cost_model.profile import Profile
from paceline.cost_model.step_costs import pick_step_costs
from paceline.cost_model.step_strategy import StepStrategy
from paceline.cost_model.step_time import predict_steps
from paceline.errors import UsageError
from paceline.tools.plan.strategy_advice import RankBatch, advise_step
from paceline.tools.plan.strategy_advice_text import advice_sentences, scaling_rows

BATCH = RankBatch(4)


def slow(call=20.0):
    """Return a profile in which every call takes so long that communication is most of a step."""
    return made.profile(call=call)


def test_the_best_strategy_is_the_shortest_of_those_allowed():
    profile = made.profile()
    advice = advise_step(profile, [1, 2], BATCH, ["flat", "bucketed"])
    costs = pick_step_costs(profile, ranks=2)
    tried = predict_steps(
        costs,
        [StepStrategy("flat"), *(StepStrategy("bucketed", size) for size in (1, 2, 5, 10, float("inf")))],
    )
    assert advice.best.seconds == pytest.approx(min(each.seconds for each in tried))
    assert advise_step(profile, [2], BATCH, ["flat"]).best.strategy == StepStrategy("flat")


def test_one_rank_is_the_measure_of_efficiency():
    alone, pair = advise_step(made.profile(), [1, 2], BATCH).points
    assert alone.seconds == pytest.approx(0.5 + 0.9 + 0.2)
    assert (alone.strategy, alone.efficiency) == (None, 1.0)
    assert alone.samples_per_second == pytest.approx(4 / 1.6)
    assert pair.efficiency == pytest.approx(pair.samples_per_second / 2 / alone.samples_per_second)
    assert pair.least <= pair.efficiency <= pair.most


def test_computing_grows_with_the_micro_batch():
    (point,) = advise_step(made.profile(), [1, 2], RankBatch(8)).points[:1]
    assert point.seconds == pytest.approx(2 * 1.4 + 0.2)
    beyond = advise_step(made.profile(), [1, 2], RankBatch(8)).points[1].beyond
    assert "measured with 4 samples" in (beyond or "")


def test_the_time_to_fill_buckets_does_not_grow_with_the_micro_batch():
    one, eight = (advise_step(made.profile(), [2], RankBatch(size), ["flat"]).points[0] for size in (4, 32))
    assert eight.seconds - one.seconds == pytest.approx(7 * 1.4)  # forward and backward, nothing else


def test_the_nearest_batch_that_was_measured_is_taken():
    models = (made.model(batch=4), made.model(batch=32))
    points = [
        advise_step(made.profile(models=models), [1, 2], RankBatch(size)).points for size in (4, 30, 64)
    ]
    assert [round(each[0].seconds / 0.1) for each in points] == [16, 15, 30]


def test_accumulation_adds_micro_batches_that_are_not_sent():
    once, thrice = (advise_step(made.profile(), [1, 2], RankBatch(4, k)) for k in (1, 3))
    assert thrice.points[1].seconds == pytest.approx(once.points[1].seconds + 2 * 1.4)
    assert thrice.points[1].efficiency > once.points[1].efficiency
    assert thrice.shares["computing"] > once.shares["computing"]
    assert thrice.points[1].low == pytest.approx(once.points[1].low + 2 * 1.4 * 0.9)
    assert thrice.points[1].high == pytest.approx(once.points[1].high + 2 * 1.4 * 1.1)


def test_no_range_is_negative_for_any_variation_of_steps():
    wild = made.profile(models=(replace(made.model(), spread=1.5),))
    for point in advise_step(wild, [1, 2], RankBatch(4, 3)).points:
        assert 0 < point.low < point.seconds < point.high


def test_shares_add_up_and_name_the_limit():
    for profile, limit in ((made.profile(), "computing"), (slow(), "communication")):
        advice = advise_step(profile, [2], BATCH)
        assert sum(advice.shares.values()) == pytest.approx(1.0)
        assert advice.limit == limit


def test_remedies_depend_on_the_bottleneck():
    def factors(profile):
        return {each.what: each.factor for each in advise_step(profile, [2], BATCH).remedies}

    bound, free = factors(slow()), factors(made.profile())
    assert "a network twice as fast" in bound
    assert "a network twice as fast" not in free
    assert free["processors twice as fast"] > bound.get("processors twice as fast", 1.0)
    assert any(what.startswith("synchronising every") for what in bound)
    assert not any(what.startswith("synchronising every") for what in free)
    assert list(bound.values()) == sorted(bound.values(), reverse=True)


def test_a_doubled_micro_batch_gains_as_much_as_its_plan():
    once, twice = (advise_step(made.profile(), [2], RankBatch(size), ["flat"]) for size in (4, 8))
    (remedy,) = (each for each in once.remedies if each.what == "a micro-batch twice as large")
    rates = [each.points[0].samples_per_second for each in (once, twice)]
    assert remedy.factor == pytest.approx(rates[1] / rates[0])


def test_sharding_is_a_remedy_where_it_is_not_among_the_strategies():
    long_update = made.profile(models=(made.model(),))
    advice = advise_step(long_update, [2], BATCH, ["flat"])
    named = [each.what for each in advise_step(slow(1e-4), [2], BATCH, ["flat"]).remedies]
    assert advice.best.strategy == StepStrategy("flat")
    assert "sharding the optimizer" in named


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.integers(1, 8), st.floats(1e-5, 1.0))
@example(1, 1, 0.4375)  # both ends are equal but for rounding
def test_predictions_keep_their_order(micro, accumulation, call):
    advice = advise_step(made.profile(call=call), [1, 2, 4], RankBatch(micro, accumulation))
    assert [point.ranks for point in advice.points] == [1, 2, 4]
    for point in advice.points:
        assert point.low <= point.seconds <= point.high
        assert point.least <= point.efficiency <= point.most
    assert all(each.factor > 1.0 for each in advice.remedies)


def test_sentences_name_the_choice_and_the_expected_result():
    advice = advise_step(slow(), [1, 2, 4], BATCH)
    output = " ".join(advice_sentences(advice, BATCH))
    assert f"Synchronise with {advice.best.strategy.label}: a step of 4 samples per rank takes" in output
    assert "Limited by communication" in output
    assert "What would help most: synchronising every" in output
    assert "all-reduce was measured with 2 ranks" in output
    rows = scaling_rows(advice)
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert rows[0][1] == "alone"


@pytest.mark.parametrize(
    ("ranks", "batch", "strategies", "message"),
    [
        ([], BATCH, ["flat"], "ranks"),
        ([1], BATCH, ["flat"], "2 or more"),
        ([0, 2], BATCH, ["flat"], "1 or more"),
        ([2], RankBatch(0), ["flat"], "micro-batch"),
        ([2], RankBatch(1, 0), ["flat"], "accumulation"),
        ([2], BATCH, [], "strategies"),
    ],
)
def test_invalid_values_are_refused(ranks, batch, strategies, message):
    with pytest.raises(UsageError, match=message):
        advise_step(made.profile(), ranks, batch, strategies)


def test_a_profile_without_steps_is_refused():
    with pytest.raises(UsageError, match="has no training step"):
        advise_step(Profile(), [2], BATCH)
