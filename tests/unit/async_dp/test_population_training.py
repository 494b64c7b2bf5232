"""A population that trains a small GPT: a worker with a bad learning rate is replaced, and all benefit."""

import math

import pytest

from paceline.async_dp.hub.hub_settings import HubRules, PopulationRules
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import AsyncResult, simulate_async
from paceline.tools.simulate.learning_tasks import GPTTask
from paceline.tools.simulate.simulated_machines import SimulatedMachine

ROUND = 10  # steps from one score to the next


def trained(rules: PopulationRules) -> AsyncResult:
    """Four workers from different parameters, the last with a learning rate that ruins it."""
    task = GPTTask(GptSize("small", 32, 64, 1, 2, vocabulary=256, context=32), batch=4, lr=1e-2, held_out=32)
    machines = [SimulatedMachine(step_seconds=1.0, lr=lr) for lr in (None, None, None, 1.0)]
    plan = AsyncPlan(
        machines=machines,
        steps=160,
        cadence=SyncSchedule(ROUND, 1, 3),
        rules=HubRules(population=rules),
        same_init=False,
    )
    return simulate_async(plan, task)


@pytest.mark.thorough
def test_a_worker_with_a_bad_learning_rate_is_replaced_within_three_rounds_and_the_best_gains() -> None:
    population = trained(PopulationRules(steps=60, margin=0.05))
    separate = trained(PopulationRules(steps=10**6, margin=math.inf))
    replaced = [each for each in population.decisions if each["kind"] == "replace"]
    assert replaced[0]["worker"] == 4
    assert replaced[0]["t"] <= 3 * ROUND + 1.0
    assert replaced[0]["lr"] == 1e-2
    assert "behind the best" in replaced[0]["why"]
    assert [each["kind"] for each in population.decisions if each["kind"] in ("together", "begin")] == [
        "together",
        "begin",
    ]
    assert min(population.best, population.loss) < separate.best
    assert not any(each["kind"] == "replace" for each in separate.decisions)
