"""What a hub refuses: workers that do not fit, updates that make no sense or come too late, strangers."""

import math

import pytest
import torch

from hub_conversation import NUMEL, ONES, RUN, Talk, kinds, net
from paceline.async_dp.hub.hub_rules import HubRules, ScreeningRules, StalenessPolicy
from paceline.async_dp.protocol.parameter_layout import ParameterLayout


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"layout": ParameterLayout.of(net(5))}, r"parameter 'weight' has shape \[5, 4\], expected \[3, 4\]"),
        ({"run": "other"}, "this hub serves run 'a run', the worker requests run 'other'"),
        ({"version": 99}, "protocol version 99"),
    ],
)
def test_a_mismatched_worker_is_refused_with_the_reason(told: dict, why: str) -> None:
    import re

    talk = Talk()
    talk.begin(1)
    (answer,) = talk.hello(2, **told)
    assert answer.kind == "refusal"
    assert re.search(why, answer.meta["why"])
    assert kinds(talk.update(2, 0, ONES)) == ["who"]


def test_a_worker_may_join_without_naming_a_run() -> None:
    talk = Talk()
    (answer, _) = talk.hello(1, run="")
    assert (answer.kind, answer.meta["run"]) == ("welcome", RUN)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"base": 3}, "implausible"),
        ({"base": -1}, "implausible"),
        ({"base": "x"}, "implausible"),
        ({"samples": -1.0}, "implausible"),
        ({"samples": math.nan}, "implausible"),
        ({"steps": 0}, "implausible"),
        ({"score": 9.0, "before": 1.0}, "worse"),
    ],
)
def test_an_implausible_update_is_refused_and_changes_nothing(told: dict, why: str) -> None:
    talk = Talk()
    talk.begin(1)
    (answer,) = talk.update(1, 0, ONES, **told)
    assert answer.meta["why"].startswith(why)
    assert torch.equal(talk.theta, torch.zeros(NUMEL))
    assert talk.hub.updates == 0
    (again,) = talk.update(1, 0, ONES, **told)
    assert again.meta["why"].startswith(why), "the same answer, if the first one was lost"


def test_an_update_of_nan_is_refused_and_its_worker_quarantined_after_three() -> None:
    talk = Talk(HubRules(screen=ScreeningRules(quarantine_seconds=30)))
    talk.begin(1, 2)
    for round in range(3):
        (answer,) = talk.update(1, round, torch.full((NUMEL,), math.nan))
        assert answer.meta["why"].startswith("not finite")
    assert answer.meta["quarantine"] == 30.0
    (answer,) = talk.update(1, 3, ONES)
    assert answer.meta["why"].startswith("in quarantine")
    (answer,) = talk.update(2, 0, ONES)
    assert answer.meta["why"] == ""
    talk.now = 31.0
    (answer,) = talk.update(1, 4, ONES)
    assert answer.meta["why"] == ""


def test_a_stale_update_is_dropped_or_down_weighted() -> None:
    for rules, moved in (
        (HubRules(staleness=StalenessPolicy("drop", bound=2)), 0.0),
        (HubRules(staleness=StalenessPolicy("down-weight", power=1.0)), 1 / 4),
    ):
        talk = Talk(rules)
        talk.begin(1)
        for round in range(3):
            talk.update(1, round, torch.zeros(NUMEL), base=round)
        (answer,) = talk.update(1, 3, ONES, base=0)
        assert answer.meta["why"] == ("stale: 3.0 rounds old" if not moved else "")
        torch.testing.assert_close(talk.theta, -moved * ONES)


def test_a_worker_that_is_ahead_waits_until_the_slowest_has_caught_up() -> None:
    talk = Talk(HubRules(staleness=StalenessPolicy("wait", bound=2)))
    talk.begin(1, 2)
    assert kinds(talk.say("fetch", 1)) == kinds(talk.say("fetch", 2)) == ["centre"]
    answers: list[str] = []
    for round in range(8):
        talk.update(1, round, ONES, base=talk.hub.updates)
        answers += kinds(talk.say("fetch", 1))
    assert len(answers) < 8
    talk.update(2, 0, ONES, base=0)
    told = talk.say("fetch", 2)
    assert {each.target for each in told if each.kind == "centre"} == {1, 2}


def test_a_silent_worker_does_not_block_those_that_wait() -> None:
    talk = Talk(HubRules(staleness=StalenessPolicy("wait", bound=1), silent_after=10))
    talk.begin(1, 2)
    for worker in (1, 2):
        talk.say("fetch", worker)
    answers = []
    for round in range(8):
        talk.now += 1.5
        talk.update(1, round, ONES, base=talk.hub.updates)
        answers += [kinds(talk.say("fetch", 1))]
    assert [] in answers
    assert answers[-1] == ["centre"]


def test_foreign_envelopes_are_counted_and_ignored() -> None:
    talk = Talk()
    talk.begin(1)
    assert talk.say("strange", 1) == []
    assert talk.update(1, 0, ONES, run="other") == []
    assert talk.hub.refused["foreign"] == 2
    assert talk.hub.updates == 0


def test_a_packet_of_the_wrong_size_is_never_merged() -> None:
    talk = Talk()
    talk.begin(1)
    talk.say("update", 1, bytes(7), round=0, dtype="fp32", base=0, samples=1.0, steps=1)
    talk.say("update", 1, bytes(1 << 16), round=1, dtype="fp32", base=0, samples=1.0, steps=1)
    talk.say("update", 1, bytes(60), round=2, dtype="topk", base=0, samples=1.0, steps=1)
    assert talk.hub.updates == 0
    assert torch.equal(talk.theta, torch.zeros(NUMEL))


def test_thousands_of_hellos_do_not_grow_the_membership_table_beyond_its_limit() -> None:
    talk = Talk()
    talk.begin(1)
    talk.update(1, 0, ONES)
    for worker in range(2, 6000):
        talk.hello(worker)
    assert len(list(talk.hub.members)) <= 4096
    member = talk.hub.members.get(1)
    assert member is not None
    assert member.rounds
