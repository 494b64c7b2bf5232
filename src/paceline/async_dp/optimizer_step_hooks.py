"""Optimizer hooks: scale the learning rate within each step, and report finished steps."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

__all__ = ["StepHooks", "StepOwner"]


class StepOwner(Protocol):
    """Counts steps and scales their learning rate."""

    @property
    def lr_scale(self) -> float: ...

    def step_taken(self) -> None: ...


class StepHooks:
    """Hooks of an optimizer; they keep neither optimizer nor owner alive."""

    def __init__(self, optimizer: torch.optim.Optimizer, owner: StepOwner) -> None:
        self._owner = weakref.ref(owner)
        self._unscaled: list[float] | None = None  # learning rates while they are scaled
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the hooks and restore the learning rates."""
        for handle in self._handles:
            handle.remove()
        self._restore(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        owner = self._owner()
        if owner is None:
            return
        self._restore(optimizer)  # the previous step may have raised
        if owner.lr_scale != 1.0:
            self._unscaled = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * owner.lr_scale

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._restore(optimizer)
            owner.step_taken()

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        if self._unscaled is not None:
            for group, lr in zip(optimizer.param_groups, self._unscaled, strict=True):
                group["lr"] = lr
            self._unscaled = None
