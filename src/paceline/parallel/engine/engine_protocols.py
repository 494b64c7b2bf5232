"""Protocols through which the engine uses tuning and sharding, which import the engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["InFlight", "PlanController", "ReshardableOptimizer"]


class InFlight(Protocol):
    """A launched reduction.

    Attributes:
        ended: when it completed, in seconds of ``time.perf_counter()``; None while pending or if not known.
    """

    ended: float | None

    def poll(self) -> None:
        """Set `ended` if the backend reports completion."""
        ...

    def wait(self) -> None:
        """Block until the result is in place."""
        ...


class ReshardableOptimizer(Protocol):
    """An optimizer whose state can move between layouts; `ShardedOptimizer` implements it."""

    @property
    def can_shard(self) -> bool:
        """Whether it can update parts of parameters."""
        ...

    @property
    def movable(self) -> bool:
        """Whether its state can move now."""
        ...

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `optimizer` is this one or the inner one that it updates with."""
        ...

    def gather_state(self) -> dict[str, list[dict[str, Any]]]:
        """Return the whole state of every parameter; all ranks call this."""
        ...

    def resume_state(self, state: dict[str, list[dict[str, Any]]]) -> None:
        """Continue from a gathered state in the engine's present layout."""
        ...


class PlanController(Protocol):
    """Changes the plan of an engine between steps; `Tuner` implements it."""

    def attach(self, optimizer: ReshardableOptimizer) -> None:
        """Register an optimizer that updates the engine's parameters."""
        ...

    def optimizer_stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that `optimizer` is about to update the engine's parameters."""
        ...

    def round_ended(self) -> None:
        """Decide on the next plan; all ranks call this after every round."""
        ...

    def apply_pending_plan(self, *, if_empty: bool = False) -> None:
        """Switch the engine to the plan decided on, `if_empty` only if there are no gradients to move.

        All ranks call this, while no gradient waits for a round.
        """
        ...
