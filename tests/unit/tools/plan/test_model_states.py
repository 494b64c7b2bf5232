"""Model states in closed form, and as traced."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.errors import UsageError
from paceline.tools.plan.memory.memory_prediction import predict_memory, states_of
from paceline.tools.plan.memory.training_subject import (
    BuiltSubject,
    TrainingSetting,
    TrainingSubject,
    resolve_subject,
)

OF_GRADIENTS = ("gradients", "buckets")


def test_the_worked_case_of_220_g_parameters():
    whole = states_of(4 * 219_848_638_464, "bucketed", 64)
    assert whole.nbytes == 16 * 219_848_638_464  # 3518 GB
    assert states_of(4 * 219_848_638_464, "full-shard", 44).nbytes == pytest.approx(79.9e9, rel=0.01)


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 2), ("sgd-momentum", 1), ("sgd", 0)])
def test_the_optimizer_decides(optimizer, numbers):
    assert states_of(100, "sharded", 4, optimizer).optimizer_nbytes == numbers * 25


def test_muon_keeps_one_number_per_element_of_a_matrix():
    assert states_of(100, "sharded", 4, "muon", matrix_nbytes=80).optimizer_nbytes == (80 + 2 * 20) / 4


def test_masters_and_the_state_beside_them_are_sharded():
    states = states_of(100, "sharded", 4, master_nbytes=200)
    assert (states.parameter_nbytes, states.gradient_nbytes) == (100, 100)
    assert states.optimizer_nbytes == 3 * 200 / 4


@pytest.mark.parametrize("wrong", [("zero", "adamw"), ("sharded", "lion")])
def test_unknown_names_are_refused(wrong):
    with pytest.raises(UsageError):
        states_of(100, wrong[0], 2, wrong[1])


def held_after_backward(found):
    """Return the bytes of each model state when the last backward has ended."""
    tick = next(mark.tick for mark in found.timeline.marks if (mark.step, mark.phase) == (1, "optimizer"))
    alive = found.timeline.alive_at(tick - 1)
    return {
        name: sum(block.nbytes for block in alive if block.category == name)
        for name in ("parameters", "optimizer state", *OF_GRADIENTS)
    }


@pytest.mark.sweep
@pytest.mark.parametrize("masters", ["off", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "sgd", "muon"])
@pytest.mark.parametrize("strategy", ["flat", "sharded", "full-shard"])
def test_traced_states_equal_the_formula(strategy, optimizer, masters):
    setting = TrainingSetting(
        strategy=strategy,
        ranks=8 if optimizer != "muon" else 4,  # so that every rank owns as many matrices
        context=16,
        optimizer=optimizer,
        dtype="fp32" if masters == "off" else "bf16",
        master_weights=masters,
    )
    found = predict_memory(resolve_subject("tiny"), setting)
    states = states_of(
        found.parameter_nbytes,
        strategy,
        setting.ranks,
        optimizer,
        matrix_nbytes=4 * 12 * 128**2 * found.parameter_nbytes // found.parameters,
        master_nbytes=0 if masters == "off" else 4 * found.parameters,
    )
    held = held_after_backward(found)
    assert held["parameters"] == pytest.approx(states.parameter_nbytes, rel=0.02)
    assert sum(held[name] for name in OF_GRADIENTS) == pytest.approx(states.gradient_nbytes, rel=0.03)
    assert held["optimizer state"] == pytest.approx(states.optimizer_nbytes, rel=0.02, abs=1000)


def test_more_ranks_than_matrices_can_fill_are_warned_of(caplog):
    def warnings_of(ranks):
        caplog.clear()
        predict_memory(
            resolve_subject("mini"),
            TrainingSetting(strategy="sharded", ranks=ranks, context=16, optimizer="muon"),
        )
        return caplog.messages

    assert not warnings_of(4)
    (warning,) = warnings_of(64)
    assert "64 ranks own 16 whole parameters" in warning
    assert "64 MiB, of which 52 MiB are padding" in warning


SIZES = (160, 64, 144, 36, 85)  # the matrices are dealt 10240 + 3060 to rank 0, 9216 + 5184 to rank 1


def linears(setting):
    layers = [torch.nn.Linear(*size, bias=False) for size in pairwise(SIZES)]
    return BuiltSubject(
        torch.nn.Sequential(*layers),
        lambda: torch.randn(setting.batch, SIZES[0]),
        lambda model, x: model(x).sum(),
    )


class RowwiseLars(torch.optim.Optimizer):
    """Divides each matrix's momentum by its norm, so its state is that of an elementwise optimizer."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momentum.mul_(0.9).add_(param.grad)
            param.sub_(momentum / momentum.norm(), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("optimizer", ["muon", f"{__name__}:RowwiseLars"])
def test_the_rank_that_owns_the_most_is_predicted(optimizer):
    setting = TrainingSetting(strategy="sharded", ranks=2, optimizer=optimizer)
    held = held_after_backward(predict_memory(TrainingSubject("linears", linears), setting))
    assert held["optimizer state"] == 4 * (9216 + 5184)


def experts(setting):
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 32, 16))

        def forward(self, x):
            return torch.einsum("bi,eji->bj", x, self.weight.transpose(1, 2))

    return BuiltSubject(Experts(), lambda: torch.randn(2, 32), lambda model, x: model(x).sum())


@pytest.mark.parametrize("strategy", ["alone", "bucketed"])
def test_muon_updates_each_expert_as_a_matrix(strategy):
    setting = TrainingSetting(strategy=strategy, ranks=1 if strategy == "alone" else 2, optimizer="muon")
    held = held_after_backward(predict_memory(TrainingSubject("experts", experts), setting))
    assert held["optimizer state"] == 4 * 3 * 32 * 16
