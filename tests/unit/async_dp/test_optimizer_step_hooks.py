"""The learning rate is scaled within a step only, even if the step raises."""

from dataclasses import dataclass

import pytest
import torch

from paceline.async_dp.optimizer_step_hooks import StepHooks


@dataclass
class Scaled:
    """An owner of hooks."""

    lr_scale: float = 0.5
    steps: int = 0

    def step_taken(self) -> None:
        self.steps += 1


def test_a_step_that_raises_leaves_the_learning_rate_to_be_restored() -> None:
    param = torch.nn.Parameter(torch.ones(()))
    optimizer, owner, used = torch.optim.SGD([param], lr=0.8), Scaled(), list[float]()
    hooks = StepHooks(optimizer, owner)

    def raising() -> float:
        used.append(optimizer.param_groups[0]["lr"])
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(raising)
    param.grad = torch.ones(())
    optimizer.step()
    assert used == [0.4, 0.4]
    assert param.item() == pytest.approx(0.6)
    assert (optimizer.param_groups[0]["lr"], owner.steps) == (0.8, 1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(raising)
    hooks.remove(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.8
