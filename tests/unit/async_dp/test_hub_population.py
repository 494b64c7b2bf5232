"""A population at a hub: the best is adopted, also where it dies meanwhile."""

import math

import torch

from hub_conversation import NUMEL, Talk, kinds
from paceline.async_dp.hub.hub_rules import HubRules, PopulationRules


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
    from hub_conversation import PACKING

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


def test_if_the_best_dies_before_it_sends_parameters_another_decision_follows() -> None:
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
