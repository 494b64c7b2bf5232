"""What happens before and after a step of the optimizer; the hooks keep nothing alive."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

__all__ = ["StepHookTarget", "after_step", "before_step", "put_back"]


class StepHookTarget(Protocol):
    """Who wants to know of steps.

    Attributes:
        unscaled: the learning rates of the optimizer while they are scaled, None else.
    """

    unscaled: list[float] | None

    @property
    def lr_scale(self) -> float:
        """What learning rates are multiplied by within a step."""
        ...

    def step_taken(self) -> None:
        """Count a step."""
        ...


def before_step(me: weakref.ref[StepHookTarget]) -> Any:
    """Return the hook that scales the learning rate for a step."""

    def scale(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        star = me()
        if star is None:
            return
        put_back(star, optimizer)  # where the step before raised
        if star.lr_scale != 1.0:
            star.unscaled = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * star.lr_scale

    return scale


def after_step(me: weakref.ref[StepHookTarget]) -> Any:
    """Return the hook that puts the learning rate back and counts the step."""

    def count(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        star = me()
        if star is not None:
            put_back(star, optimizer)
            star.step_taken()

    return count


def put_back(star: StepHookTarget, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer its own learning rates again, if they are scaled."""
    if star.unscaled is not None:
        for group, lr in zip(optimizer.param_groups, star.unscaled, strict=True):
            group["lr"] = lr
        star.unscaled = None
