"""Model states in closed form, and as traced."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.tools.plan.memory.memory_prediction import predict_memory, states_of
from paceline.tools.plan.memory.training_subject import TrainingSetting, resolve_subject

OF_GRADIENTS = ("gradients", "buckets")


def test_the_worked_case_of_220_g_parameters():
    whole = states_of(4 * 219_848_638_464, "bucketed", 64)
    assert whole.nbytes == 16 * 219_848_638_464  # 3518 GB
    assert states_of(4 * 219_848_638_464, "full-shard", 44).nbytes == pytest.approx(79.9e9, rel=0.01)


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 2), ("sgd-momentum", 1), ("sgd", 0)])
def test_the_optimizer_decides(optimizer, numbers):
    assert states_of(100, "sharded", 4, optimizer).optimizer_nbytes == numbers * 25


@pytest.mark.parametrize("wrong", [("zero", "adamw"), ("sharded", "lion")])
def test_unknown_names_are_refused(wrong):
    with pytest.raises(UsageError):
        states_of(100, wrong[0], 2, wrong[1])


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "sgd"])
@pytest.mark.parametrize("strategy", ["flat", "sharded", "full-shard"])
def test_traced_states_equal_the_formula(strategy, optimizer):
    found = predict_memory(
        resolve_subject("tiny"),
        TrainingSetting(strategy=strategy, ranks=8, batch=1, context=16, optimizer=optimizer),
    )
    states = states_of(found.parameter_nbytes, strategy, 8, optimizer)
    tick = next(mark.tick for mark in found.timeline.marks if (mark.step, mark.phase) == (1, "optimizer"))
    alive = found.timeline.alive_at(tick - 1)  # the last backward has ended
    held = {
        name: sum(block.nbytes for block in alive if block.category == name)
        for name in ("parameters", "optimizer state", *OF_GRADIENTS)
    }
    assert held["parameters"] == pytest.approx(states.parameter_nbytes, rel=0.02)
    assert sum(held[name] for name in OF_GRADIENTS) == pytest.approx(states.gradient_nbytes, rel=0.03)
    assert held["optimizer state"] == pytest.approx(states.optimizer_nbytes, rel=0.02, abs=1000)
