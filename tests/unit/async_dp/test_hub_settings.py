"""Screening, staleness, policies, populations and tuning: decisions over plain numbers."""

import math

import pytest

from paceline.async_dp.hub.hub_settings import (
    HubRules,
    HubShard,
    MergeRules,
    PopulationRules,
    ScreeningRules,
)
from paceline.async_dp.hub.membership import StalenessHistogram
from paceline.async_dp.hub.population import JoinDecision, Population, ReplaceDecision
from paceline.async_dp.hub.staleness_policy import StalenessPolicy
from paceline.async_dp.hub.update_screening import UpdateScreen
from paceline.async_dp.protocol.hub_messages import UpdateHeader
from paceline.async_dp.worker.auto_settings import auto_fragments, choose_settings
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.errors import UsageError


def check(screen: UpdateScreen, norm: float, *, worker: int = 1, now: float = 0.0, **changes) -> str:
    header = UpdateHeader(
        base=0,
        samples=1.0,
        steps=changes.get("steps", 1),
        score=changes.get("score"),
        before=changes.get("before"),
    )
    return screen.check(worker, 0, norm, header, now)


def test_an_update_that_is_not_finite_is_refused() -> None:
    screen = UpdateScreen()
    assert check(screen, math.nan).startswith("not finite")
    assert check(screen, math.inf).startswith("not finite")
    assert check(screen, 1.0, score=math.nan, before=1.0).startswith("not finite")


def test_an_exploding_update_is_refused_once_the_usual_size_is_known() -> None:
    screen = UpdateScreen()
    assert check(screen, 500.0) == ""
    screen = UpdateScreen()
    for _ in range(8):
        assert check(screen, 1.0) == ""
    assert check(screen, 11.0).startswith("exploding: 11.0 times")
    assert check(screen, 9.0) == ""


def test_norms_are_compared_per_square_root_of_steps() -> None:
    screen = UpdateScreen()
    for _ in range(8):
        check(screen, 1.0, steps=1)
    assert check(screen, 50.0, steps=100) == ""


def test_refused_updates_do_not_change_the_usual_norm() -> None:
    screen = UpdateScreen(ScreeningRules(strikes=10))
    for _ in range(8):
        check(screen, 1.0)
    assert all(check(screen, 100.0, worker=number).startswith("exploding") for number in range(50))


def test_tiny_updates_of_one_worker_do_not_make_ordinary_ones_explode() -> None:
    screen = UpdateScreen()
    assert check(screen, 1.0, worker=2) == ""
    for _ in range(50):
        assert check(screen, 1e-6) == ""
    assert check(screen, 2.0, worker=2) == ""
    assert check(screen, 2.0, worker=3, score=1.0, before=2.0) == "", "its score speaks for it"
    assert check(screen, 2.0, worker=4).startswith("exploding")


def test_an_update_that_makes_the_score_worse_is_refused() -> None:
    screen = UpdateScreen()
    assert check(screen, 1.0, score=2.04, before=2.0) == ""
    assert check(screen, 1.0, score=2.06, before=2.0).startswith("worse: score 2.0600")
    assert check(UpdateScreen(ScreeningRules(max_score_increase=None)), 1.0, score=9.0, before=2.0) == ""


def test_three_refusals_lead_to_quarantine_and_the_next_one_lasts_twice_as_long() -> None:
    screen = UpdateScreen(ScreeningRules(quarantine_seconds=10))
    for _ in range(3):
        check(screen, math.nan, now=0.0)
    assert screen.quarantine_left(1, 4.0) == 6.0
    assert check(screen, 1.0, now=4.0).startswith("in quarantine: for 6 s")
    assert check(screen, 1.0, now=4.0, worker=2) == ""
    assert check(screen, 1.0, now=11.0) == ""
    for _ in range(3):
        check(screen, math.nan, now=20.0)
    assert screen.quarantine_left(1, 20.0) == 20.0


def test_old_strikes_are_forgotten() -> None:
    screen = UpdateScreen()
    for number in range(40):
        check(screen, math.nan if number % 5 == 0 else 1.0)
    assert screen.quarantine_left(1, 0.0) == 0.0


def test_policies_for_stale_updates() -> None:
    assert StalenessPolicy().weight(1e9) == 1.0
    assert StalenessPolicy("down-weight").weight(3.0) == 0.5
    assert StalenessPolicy("down-weight", power=1.0).weight(3.0) == 0.25
    assert StalenessPolicy("drop", bound=4).weight(4.0) == 1.0
    assert StalenessPolicy("drop", bound=4).weight(4.1) == 0.0


def test_waiting_holds_back_workers_ahead_and_never_the_slowest() -> None:
    wait = StalenessPolicy("wait", bound=2)
    assert wait.holds_back(base=20, others=[3, 18], revision=20, workers=4)
    assert not wait.holds_back(base=3, others=[20, 18], revision=20, workers=4)
    assert not wait.holds_back(base=20, others=[14, 18], revision=20, workers=4)
    assert not wait.holds_back(base=20, others=[], revision=20, workers=1)
    assert not StalenessPolicy("accept").holds_back(20, [0], 1000, 2)


def test_the_histogram_counts_every_staleness_once() -> None:
    counts = StalenessHistogram()
    for value in (0.0, 0.49, 0.5, 1.9, 2.0, 100.0, 1e9):
        counts.add(value)
    assert sum(counts.counts) == 7
    assert counts.rows()[0] == (0.0, 0.5, 2)
    assert counts.rows()[-1] == (64.0, math.inf, 2)


@pytest.mark.parametrize(
    ("send", "mine", "before", "best", "offered"),
    [
        ("all", 9.0, 1.0, 1.0, True),
        ("better", 1.9, 2.0, 1.0, True),
        ("better", 2.1, 2.0, 1.0, False),
        ("better", 2.1, None, 1.0, True),
        ("best", 1.5, 2.0, 1.5, True),
        ("best", 1.6, 2.0, 1.5, False),
    ],
)
def test_selection_of_sent_updates(
    send: str, mine: float, before: float | None, best: float, offered: bool
) -> None:
    assert SelectionPolicy(send=send).sends(mine, before, best) is offered


@pytest.mark.parametrize(
    ("receive", "mine", "theirs", "best", "taken"),
    [
        ("all", 1.0, 9.0, 1.0, True),
        ("better", 2.0, 1.9, 1.0, True),
        ("better", 2.0, 2.0, 1.0, False),
        ("better", 2.0, math.nan, 1.0, False),
        ("best", 2.0, 1.5, 1.5, True),
        ("best", 2.0, 1.6, 1.5, False),
    ],
)
def test_selection_of_received_parameters(
    receive: str, mine: float, theirs: float, best: float, taken: bool
) -> None:
    assert SelectionPolicy(receive=receive).receives(mine, theirs, best) is taken


def test_selection_policies_need_a_score_and_one_fragment() -> None:
    with pytest.raises(UsageError, match="without a score"):
        SelectionPolicy(receive="better").check(has_score=False, fragments=1)
    with pytest.raises(UsageError, match="2 fragments"):
        SelectionPolicy(send="best").check(has_score=True, fragments=2)
    SelectionPolicy().check(has_score=False, fragments=3)
    with pytest.raises(UsageError, match="did you mean 'better'"):
        SelectionPolicy(send="beter")


def test_the_worst_worker_is_replaced_by_the_best() -> None:
    population, alive = Population(PopulationRules(steps=1000, margin=0.1, grace=1)), {1, 2, 3}
    for worker, score in ((1, 2.0), (2, 2.1), (3, 5.0)):
        assert population.report(worker, score, 10, 0.01 * worker, alive) is None
    assert population.report(1, 1.9, 20, 0.01, alive) is None
    assert population.report(2, 2.0, 20, 0.02, alive) is None
    decision = population.report(3, 4.9, 20, 0.3, alive)
    assert isinstance(decision, ReplaceDecision)
    assert (decision.worker, decision.by, decision.lr) == (3, 1, 0.01)
    assert "158% behind" in decision.reason
    assert population.report(3, 4.0, 30, 0.01, alive) is None, "it has its grace again"


def test_workers_within_the_margin_or_not_worst_are_not_replaced() -> None:
    population, alive = Population(PopulationRules(steps=1000, margin=0.1, grace=0)), {1, 2, 3}
    population.report(1, 2.0, 10, 0.1, alive)
    assert population.report(2, 2.15, 10, 0.1, alive) is None
    assert isinstance(population.report(3, 9.0, 10, 0.1, alive), ReplaceDecision)
    assert population.report(2, 4.0, 20, 0.1, alive) is None


def test_a_nan_score_is_the_worst() -> None:
    population = Population(PopulationRules(steps=1000, grace=0))
    population.report(1, 2.0, 10, 0.1, {1, 2})
    assert isinstance(population.report(2, math.nan, 10, 0.1, {1, 2}), ReplaceDecision)


def test_the_learning_rate_of_a_replaced_worker_is_perturbed_both_ways() -> None:
    population = Population(PopulationRules(steps=1000, grace=0, perturb=1.2))
    rates = set()
    for _ in range(40):
        population.report(1, 2.0, 10, 0.1, {1, 2})
        decision = population.report(2, 9.0, 10, 0.1, {1, 2})
        if isinstance(decision, ReplaceDecision):
            rates.add(round(decision.lr, 6))
    assert rates == {0.12, round(0.1 / 1.2, 6)}


def test_all_join_the_best_when_most_have_made_their_steps() -> None:
    population, alive = Population(PopulationRules(steps=100, margin=math.inf)), {1, 2, 3}
    assert population.report(1, 2.0, 100, 0.1, alive) == JoinDecision(
        1, "1 of 1 workers made 100 steps; best score 2.0000"
    )
    population = Population(PopulationRules(steps=100, margin=math.inf))
    for worker in (1, 2, 3):
        assert population.report(worker, 2.0 + worker, 50, 0.1, alive) is None
    assert population.report(1, 3.0, 100, 0.1, alive) is None
    decision = population.report(3, 2.5, 100, 0.1, alive)
    assert isinstance(decision, JoinDecision)
    assert decision.best == 3


def test_all_join_a_best_that_is_far_ahead() -> None:
    population, alive = Population(PopulationRules(steps=1000, margin=math.inf, grace=0, gap=0.2)), {1, 2}
    assert population.report(1, 1.0, 10, 0.1, alive) is None
    decision = population.report(2, 1.5, 10, 0.1, alive)
    assert isinstance(decision, JoinDecision)
    assert "50% ahead" in decision.reason


def test_workers_that_left_do_not_count() -> None:
    population = Population(PopulationRules(steps=1000, grace=0))
    population.report(1, 0.1, 10, 0.1, {1, 2})
    assert population.report(2, 2.0, 10, 0.1, {2}) is None


@pytest.mark.parametrize(
    "given", [{"steps": 0}, {"margin": 0.0}, {"grace": -1}, {"perturb": 0.5}, {"gap": 0.0}]
)
def test_invalid_population_rules_are_refused(given: dict) -> None:
    with pytest.raises(UsageError):
        PopulationRules(**given)


def test_a_population_has_one_hub() -> None:
    with pytest.raises(UsageError, match="several hubs"):
        HubRules(population=PopulationRules(), shard=HubShard(0, 2))
    with pytest.raises(UsageError, match="shard 2 of 2"):
        HubShard(2, 2)


def test_settings_follow_measured_times() -> None:
    slow, fast = choose_settings(0.1, 1.0, 2.0, "int4"), choose_settings(0.1, 0.1, 0.2, "int4")
    assert slow.every > fast.every
    assert slow.delay == 30
    assert choose_settings(10.0, 0.1, 0.2, "int4") == choose_settings(10.0, 0.2, 0.2, "int8")
    assert choose_settings(1e-9, 1e9, 1e9, "int4").every == 500
    for seconds in (0.001, 0.1, 10.0):
        for up in (0.001, 0.3, 20.0):
            found = choose_settings(seconds, up, 2 * up, "int4")
            assert 0 < found.delay < found.every


def test_fragments_depend_on_the_model_alone() -> None:
    assert auto_fragments(100, 10) == 1
    assert auto_fragments(10**9, 100) == 8
    assert auto_fragments(10**9, 3) == 3


@pytest.mark.parametrize(
    ("quorum", "workers", "needed"),
    [(0.5, 4, 2), (0.5, 5, 3), (1.0, 7, 7), (3, 8, 3), (3, 2, 2), (0.5, 0, 1), (1, 9, 1), (0.01, 9, 1)],
)
def test_a_quorum_is_a_share_or_a_number_of_live_workers(quorum: float, workers: int, needed: int) -> None:
    assert MergeRules("quorum", quorum).needed(workers) == needed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"on": "vote"}, "unknown time of merging"),
        *(({"quorum": each}, "quorum=") for each in (0, 0.0, 1.5, -1, True)),
    ],
)
def test_invalid_rules_of_merging_are_refused(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MergeRules(**given)
