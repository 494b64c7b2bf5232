"""A hub leads a population to the parameters of its best worker, even if that dies meanwhile."""

import math

import torch

from hub_driver import NUMEL, HubDriver, kinds
from paceline.async_dp.hub.hub_settings import HubRules, PopulationRules


def test_a_population_replaces_the_worst_and_then_joins_the_best() -> None:
    driver = HubDriver(HubRules(population=PopulationRules(steps=30, margin=0.1, grace=1)))
    for worker in (1, 2, 3):
        driver.hello(worker)
    assert driver.hub.phase == "population"

    def score(worker: int, value: float, steps: int) -> list:
        return driver.send("score", worker, score=value, steps=steps, lr=0.1 * worker)

    for worker, value in ((1, 2.0), (2, 2.1), (3, 9.0)):
        assert score(worker, value, 10) == []
    score(1, 1.9, 20)
    score(2, 2.0, 20)
    answers = score(3, 8.0, 20)
    assert [(each.kind, each.target) for each in answers] == [("ask", 1)]
    from hub_driver import PACKING

    best = torch.full((NUMEL,), 4.0)
    (adopt,) = driver.send("parameters", 1, bytes(PACKING.pack(best)), dtype="fp32")
    assert (adopt.kind, adopt.target, adopt.meta["lr"]) == ("adopt", 3, 0.1)
    score(1, 1.8, 30)
    answers = score(2, 1.7, 30)
    assert [(each.kind, each.target) for each in answers] == [("ask", 2)]
    best = torch.full((NUMEL,), 7.0)
    answers = driver.send("parameters", 2, bytes(PACKING.pack(best)), dtype="fp32")
    assert sorted((each.kind, each.target) for each in answers) == [("together", each) for each in (1, 2, 3)]
    assert torch.equal(driver.theta, best)
    decisions = [each for each in driver.journal.ledger() if each["kind"] in ("replace", "together")]
    assert [(each["kind"], each["worker"]) for each in decisions] == [("replace", 3), ("together", 2)]
    assert "behind the best" in decisions[0]["why"]
    assert "2 of 3 workers made 30 steps" in decisions[1]["why"]


def test_if_the_best_dies_before_it_sends_parameters_another_decision_follows() -> None:
    driver = HubDriver(HubRules(population=PopulationRules(steps=30, margin=math.inf), silent_after=10))
    for worker in (1, 2):
        driver.hello(worker)
        driver.send("score", worker, score=float(worker), steps=10, lr=0.1)
    driver.send("score", 1, score=1.0, steps=30, lr=0.1)
    assert kinds(driver.send("score", 2, score=2.0, steps=30, lr=0.1)) == ["ask"]
    driver.now = 8.0
    driver.send("beat", 2)
    driver.now = 15.0
    driver.send("beat", 2)
    answers = driver.send("score", 2, score=2.0, steps=40, lr=0.1)
    assert [(each.kind, each.target) for each in answers] == [("ask", 2)]
