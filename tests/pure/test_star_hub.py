"""The hub: what it takes in, what it refuses, what it answers, and what outlives it."""

import math
from pathlib import Path

import pytest
import torch
from star_talk import LAYOUT, NUMEL, RUN, Talk, kinds, net

from paceline.star.keeping.journal import Journal
from paceline.star.layout import Layout
from paceline.star.merge import Outer
from paceline.star.population import PopulationRules
from paceline.star.rules import HubRules, Shard
from paceline.star.screen import ScreenRules
from paceline.star.stale import Staleness

ONES = torch.ones(NUMEL)


def test_the_first_worker_gives_the_parameters_that_all_share() -> None:
    talk = Talk()
    assert kinds(talk.hello(1)) == ["welcome", "ask"]
    assert kinds(talk.hello(2)) == ["welcome"]
    start = torch.arange(NUMEL, dtype=torch.float32)
    from star_talk import PACKING

    told = talk.say("parameters", 1, bytes(PACKING.pack(start)), dtype="fp32")
    assert sorted((each.kind, each.target) for each in told) == [("together", 1), ("together", 2)]
    assert torch.equal(talk.theta, start)
    assert talk.hub.phase == "together"


def test_if_the_first_worker_falls_silent_another_is_asked() -> None:
    talk = Talk()
    talk.hello(1)
    talk.now = 100.0
    talk.hub.settle(talk.now)
    assert kinds(talk.hello(2)) == ["welcome", "ask"]


def test_parameters_that_are_not_finite_are_no_beginning() -> None:
    talk = Talk()
    talk.begin(1, numbers=torch.full((NUMEL,), math.nan))
    assert talk.hub.phase == "empty"
    assert kinds(talk.hello(2)) == ["welcome", "ask"]


def test_an_update_moves_the_centre_and_is_acknowledged() -> None:
    talk = Talk()
    talk.begin(1, 2)
    (answer,) = talk.update(1, 0, ONES)
    assert (answer.kind, answer.target, answer.round, answer.meta["why"]) == ("ack", 1, 0, "")
    torch.testing.assert_close(talk.theta, -ONES / 2)
    assert (talk.hub.updates, talk.hub.tally.samples) == (1, 1.0)


def test_a_fetch_is_answered_with_the_centre_and_its_revision() -> None:
    talk = Talk()
    talk.begin(1)
    talk.update(1, 0, ONES)
    (answer,) = talk.say("fetch", 1)
    assert (answer.kind, answer.round, answer.dtype) == ("centre", 1, "bf16")
    into = torch.empty(NUMEL)
    from paceline.star.packing import Packing

    Packing(LAYOUT.fragments[0], "bf16").unpack(answer.payload, into)
    assert torch.equal(into, -ONES)


def test_a_worker_counts_by_its_part_of_the_samples_of_a_second() -> None:
    talk = Talk()
    talk.begin(1, 2, 3)
    moved = []
    for round in range(2):
        for worker, rate in ((1, 30.0), (2, 10.0), (3, 20.0)):
            before = talk.theta.clone()
            talk.update(worker, round, ONES, base=talk.hub.updates, rate=rate)
            moved.append(float((before - talk.theta)[0]))
    assert moved[:2] == pytest.approx([1 / 3, 1 / 3]), "until all are known, all count alike"
    assert moved[2:] == pytest.approx([1 / 3, 1 / 2, 1 / 6, 1 / 3])
    talk.say("bye", 1)
    before = talk.theta.clone()
    talk.update(3, 2, ONES, base=talk.hub.updates, rate=20.0)
    assert float((before - talk.theta)[0]) == pytest.approx(2 / 3)


def test_an_update_of_many_steps_after_a_long_absence_does_not_count_more() -> None:
    talk = Talk()
    talk.begin(1, 2)
    for round in range(5):
        for worker in (1, 2):
            talk.update(worker, round, ONES, base=talk.hub.updates, rate=10.0, samples=10.0, steps=10)
    before = talk.theta.clone()
    talk.update(2, 9, ONES, base=1, rate=10.0, samples=4000.0, steps=4000)
    torch.testing.assert_close(before - talk.theta, ONES / 2)


def test_a_worker_alone_counts_fully_however_many_samples_an_update_has() -> None:
    talk = Talk()
    talk.begin(1)
    for round, samples in enumerate((100.0, 50.0, 3.0, 700.0)):
        talk.update(1, round, ONES, base=round, samples=samples)
    torch.testing.assert_close(talk.theta, -4 * ONES)


def test_a_repeated_update_counts_once_and_is_acknowledged_again() -> None:
    talk = Talk()
    talk.begin(1)
    talk.update(1, 0, ONES)
    before = talk.theta.clone()
    (answer,) = talk.update(1, 0, ONES)
    assert (answer.kind, answer.meta["why"]) == ("ack", "")
    assert torch.equal(talk.theta, before)
    assert talk.hub.refused["repeated"] == 1


def test_the_same_envelope_twice_is_dropped() -> None:
    talk = Talk()
    talk.begin(1)
    from star_talk import PACKING

    from paceline.star.words import Message

    packet = bytes(PACKING.pack(ONES))
    meta = {"samples": 1.0, "steps": 1, "base": 0}
    (envelope,) = talk.envelopes(Message("update", 1, 0, 0, 0, meta, packet, "fp32"))
    assert kinds(talk.give(envelope, envelope)) == ["ack"]
    assert (talk.hub.updates, talk.hub.refused["repeated"]) == (1, 1)


def test_an_earlier_round_is_not_taken_in_after_a_later_one() -> None:
    talk = Talk()
    talk.begin(1)
    talk.update(1, 5, ONES)
    before = talk.theta.clone()
    talk.update(1, 4, ONES)
    assert torch.equal(talk.theta, before)


def test_who_is_not_in_session_is_told_so_and_changes_nothing() -> None:
    talk = Talk()
    talk.begin(1)
    before = talk.theta.clone()
    assert kinds(talk.update(7, 0, ONES)) == ["who"]
    talk.sessions[1] = 999
    assert kinds(talk.update(1, 0, ONES)) == ["who"]
    assert torch.equal(talk.theta, before)
    assert talk.hub.refused["not in session"] == 2


def test_an_old_hello_does_not_begin_a_session_again() -> None:
    talk = Talk()
    talk.begin(1)
    old = talk.sessions[1]
    talk.hello(1)
    now = talk.sessions[1]
    assert kinds(talk.hello(1, session=old)) == []
    talk.sessions[1] = now
    assert kinds(talk.update(1, 0, ONES)) == ["ack"]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"layout": Layout.of(net(5))}, r"parameter 'weight' has shape \[5, 4\], expected \[3, 4\]"),
        ({"run": "other"}, "this hub serves run 'a run', the worker asks for run 'other'"),
        ({"version": 99}, "messages are of version 99"),
    ],
)
def test_a_worker_that_does_not_fit_is_told_why(told: dict, why: str) -> None:
    import re

    talk = Talk()
    talk.begin(1)
    (answer,) = talk.hello(2, **told)
    assert answer.kind == "refusal"
    assert re.search(why, answer.meta["why"])
    assert kinds(talk.update(2, 0, ONES)) == ["who"]


def test_a_worker_may_ask_for_whichever_run_there_is() -> None:
    talk = Talk()
    (answer, _) = talk.hello(1, run="")
    assert (answer.kind, answer.meta["run"]) == ("welcome", RUN)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"base": 3}, "it tells of"),
        ({"base": -1}, "it tells of"),
        ({"base": "x"}, "it tells of"),
        ({"samples": -1.0}, "it tells of"),
        ({"samples": math.nan}, "it tells of"),
        ({"steps": 0}, "it tells of"),
        ({"score": 9.0, "before": 1.0}, "worse"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused_and_changes_nothing(told: dict, why: str) -> None:
    talk = Talk()
    talk.begin(1)
    (answer,) = talk.update(1, 0, ONES, **told)
    assert answer.meta["why"].startswith(why)
    assert torch.equal(talk.theta, torch.zeros(NUMEL))
    assert talk.hub.updates == 0
    (again,) = talk.update(1, 0, ONES, **told)
    assert again.meta["why"].startswith(why), "the same answer, if the first one was lost"


def test_an_update_of_nan_is_refused_and_its_worker_quarantined_after_three() -> None:
    talk = Talk(HubRules(screen=ScreenRules(seconds=30)))
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


def test_a_stale_update_is_dropped_or_weighed_down() -> None:
    for rules, moved in (
        (HubRules(staleness=Staleness("drop", bound=2)), 0.0),
        (HubRules(staleness=Staleness("down-weight", power=1.0)), 1 / 4),
    ):
        talk = Talk(rules)
        talk.begin(1)
        for round in range(3):
            talk.update(1, round, torch.zeros(NUMEL), base=round)
        (answer,) = talk.update(1, 3, ONES, base=0)
        assert answer.meta["why"] == ("stale: 3.0 rounds old" if not moved else "")
        torch.testing.assert_close(talk.theta, -moved * ONES)


def test_who_is_ahead_waits_for_the_centre_until_the_last_has_caught_up() -> None:
    talk = Talk(HubRules(staleness=Staleness("wait", bound=2)))
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


def test_a_worker_that_is_silent_does_not_hold_up_those_that_wait() -> None:
    talk = Talk(HubRules(staleness=Staleness("wait", bound=1), silent_after=10))
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


def test_what_is_foreign_is_counted_and_ignored() -> None:
    talk = Talk()
    talk.begin(1)
    assert talk.say("strange", 1) == []
    assert talk.update(1, 0, ONES, run="other") == []
    assert talk.hub.refused["foreign"] == 2
    assert talk.hub.updates == 0


def test_a_packet_of_another_size_never_reaches_the_centre() -> None:
    talk = Talk()
    talk.begin(1)
    talk.say("update", 1, bytes(7), round=0, dtype="fp32", base=0, samples=1.0, steps=1)
    talk.say("update", 1, bytes(1 << 16), round=1, dtype="fp32", base=0, samples=1.0, steps=1)
    talk.say("update", 1, bytes(60), round=2, dtype="topk", base=0, samples=1.0, steps=1)
    assert talk.hub.updates == 0
    assert torch.equal(talk.theta, torch.zeros(NUMEL))


def test_ten_thousand_hellos_of_strangers_take_no_more_room_than_the_table_has() -> None:
    talk = Talk()
    talk.begin(1)
    talk.update(1, 0, ONES)
    for worker in range(2, 6000):
        talk.hello(worker)
    assert len(list(talk.hub.members)) <= 4096
    member = talk.hub.members.get(1)
    assert member is not None
    assert member.rounds


def test_an_heir_goes_on_to_the_bit(tmp_path: Path) -> None:
    rules = HubRules(outer=Outer("delayed-nesterov", 0.7, 0.9, warmup=0), snapshot_every=7)
    drawn = torch.Generator().manual_seed(0)
    deltas = [torch.randn(NUMEL, generator=drawn) for _ in range(24)]

    def course(folder: Path, killed: bool) -> torch.Tensor:
        with Journal.open(folder, resume=True) as journal:
            talk = Talk(rules, journal)
            talk.begin(1, 2, 3)
            for number, delta in enumerate(deltas[:17]):
                talk.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
            if not killed:
                for number, delta in enumerate(deltas[17:], 17):
                    talk.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
                return talk.theta.clone()
        with Journal.open(folder, resume=True) as journal:
            heir = Talk(rules, journal)
            assert heir.hub.updates == 17
            heir.sessions = {worker: 1000 for worker in (1, 2, 3)}
            for worker in (1, 2, 3):
                heir.hello(worker)
            (again,) = heir.update(2, 5, deltas[16], samples=1.0 + 16 % 3)
            assert again.meta["why"] == ""
            assert heir.hub.updates == 17, "round 5 of worker 2 was update 17, and is there"
            for number, delta in enumerate(deltas[17:], 17):
                heir.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
            return heir.theta.clone()

    assert torch.equal(course(tmp_path / "whole", killed=False), course(tmp_path / "killed", killed=True))


def test_nothing_is_answered_before_it_is_committed() -> None:
    talk = Talk()
    talk.begin(1)
    order: list[str] = []
    commit, append = talk.journal.commit, talk.journal.append

    def note(*given, **told):
        order.append("append")
        return append(*given, **told)

    talk.journal.append = note
    talk.journal.commit = lambda: (order.append("commit"), commit())[1]
    answers = talk.update(1, 0, ONES)
    assert order == ["append", "commit"]
    assert kinds(answers) == ["ack"]


def test_an_update_that_was_not_committed_is_gone_with_the_hub_and_taken_in_when_it_comes_again() -> None:
    talk = Talk()
    talk.begin(1)
    talk.update(1, 0, ONES)
    from star_talk import PACKING

    from paceline.star.words import Message

    packet = bytes(PACKING.pack(ONES))
    meta = {"samples": 1.0, "steps": 1, "base": 1}
    (envelope,) = talk.envelopes(Message("update", 1, 0, 1, 0, meta, packet, "fp32"))
    talk.hub.receive(envelope, talk.now)
    talk.journal.crash()
    talk.hub = talk.started()
    assert talk.hub.updates == 1
    talk.hello(1)
    talk.update(1, 1, ONES, base=1)
    assert talk.hub.updates == 2
    torch.testing.assert_close(talk.theta, -2 * ONES)


def test_a_sharded_hub_keeps_its_fragments_only() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(5)))
    layout = Layout.of(model, 5)
    talk = Talk(HubRules(shard=Shard(1, 2)))
    talk.hello(1, layout=layout)
    assert talk.hub.centres is not None
    assert sorted(talk.hub.centres.of_fragment) == [1, 3]
    (answer,) = Talk(HubRules(shard=Shard(1, 2))).hello(1)
    assert "too few for 2 hubs" in answer.meta["why"]


def test_a_population_replaces_the_worst_and_then_joins_the_best() -> None:
    talk = Talk(HubRules(population=PopulationRules(steps=30, margin=0.1, grace=1)))
    for worker in (1, 2, 3):
        talk.hello(worker)
    assert talk.hub.phase == "population"

    def score(worker: int, value: float, steps: int) -> list:
        return talk.say("score", worker, score=value, steps=steps, lr=0.1 * worker)

    for worker, value in ((1, 2.0), (2, 2.1), (3, 9.0)):
        assert score(worker, value, 10) == []
    score(1, 1.9, 20)
    score(2, 2.0, 20)
    told = score(3, 8.0, 20)
    assert [(each.kind, each.target) for each in told] == [("ask", 1)]
    from star_talk import PACKING

    best = torch.full((NUMEL,), 4.0)
    (adopt,) = talk.say("parameters", 1, bytes(PACKING.pack(best)), dtype="fp32")
    assert (adopt.kind, adopt.target, adopt.meta["lr"]) == ("adopt", 3, 0.1)
    score(1, 1.8, 30)
    told = score(2, 1.7, 30)
    assert [(each.kind, each.target) for each in told] == [("ask", 2)]
    best = torch.full((NUMEL,), 7.0)
    told = talk.say("parameters", 2, bytes(PACKING.pack(best)), dtype="fp32")
    assert sorted((each.kind, each.target) for each in told) == [("together", each) for each in (1, 2, 3)]
    assert torch.equal(talk.theta, best)
    decisions = [each for each in talk.journal.ledger() if each["kind"] in ("replace", "together")]
    assert [(each["kind"], each["worker"]) for each in decisions] == [("replace", 3), ("together", 2)]
    assert "behind the best" in decisions[0]["why"]
    assert "2 of 3 workers made 30 steps" in decisions[1]["why"]


def test_if_the_best_dies_before_it_gave_its_parameters_another_decision_follows() -> None:
    talk = Talk(HubRules(population=PopulationRules(steps=30, margin=math.inf), silent_after=10))
    for worker in (1, 2):
        talk.hello(worker)
        talk.say("score", worker, score=float(worker), steps=10, lr=0.1)
    talk.say("score", 1, score=1.0, steps=30, lr=0.1)
    assert kinds(talk.say("score", 2, score=2.0, steps=30, lr=0.1)) == ["ask"]
    talk.now = 8.0
    talk.say("beat", 2)
    talk.now = 15.0
    talk.say("beat", 2)
    told = talk.say("score", 2, score=2.0, steps=40, lr=0.1)
    assert [(each.kind, each.target) for each in told] == [("ask", 2)]


def test_a_score_of_the_centre_is_written_down() -> None:
    talk = Talk()
    talk.begin(1)
    talk.say("score", 1, score=1.25, revision=0)
    assert talk.hub.loss == 1.25
    assert [each["score"] for each in talk.journal.ledger() if each["kind"] == "centre"] == [1.25]


def test_who_says_goodbye_does_not_count_any_more() -> None:
    talk = Talk()
    talk.begin(1, 2)
    talk.say("bye", 2)
    assert talk.hub.members.alive == {1}
    talk.update(1, 0, ONES)
    torch.testing.assert_close(talk.theta, -ONES)
    assert "leave" in talk.kinds()
