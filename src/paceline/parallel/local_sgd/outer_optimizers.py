"""What becomes of the mean pseudo-gradient: the outer optimizer of training that synchronises every H steps.

A pseudo-gradient is what local training did to the parameters, negated: Δ = θ − w. Its mean over ranks g is taken as a
gradient of the parameters θ that all ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Averaging", "Nesterov", "OuterOptimizer", "SlowMomentum"]


class OuterOptimizer(Protocol):
    """An outer optimizer; all ranks run it on the same numbers, so its state is the same on all."""

    @property
    def remembers(self) -> bool:
        """Whether it needs a momentum buffer."""
        ...

    def update(self, theta: Tensor, gradient: Tensor, momentum: Tensor | None, inner_lr: float) -> None:
        """Change `theta` (and `momentum`) in place.

        Args:
            theta: shared parameters, 1-D. gradient: the mean pseudo-gradient; may be overwritten.
            momentum: where it `remembers`; zeros at first.
            inner_lr: learning rate of the optimizer that runs locally.
        """
        ...


@dataclass(frozen=True)
class Averaging:
    """θ ← θ − g, which is the mean of the ranks' parameters (local SGD, arXiv 1805.09767)."""

    @property
    def remembers(self) -> bool:
        """Nothing."""
        return False

    def update(self, theta: Tensor, gradient: Tensor, momentum: Tensor | None, inner_lr: float) -> None:
        """See `OuterOptimizer`."""
        theta.sub_(gradient)


@dataclass(frozen=True)
class Nesterov:
    """m ← μ·m + g; θ ← θ − ε·(g + μ·m): DiLoCo's (arXiv 2311.08105, Algorithm 1), as torch's SGD with nesterov.

    Attributes:
        lr: ε, above 0. momentum: μ, from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_rate("outer_lr", self.lr)
        _check_momentum("outer_momentum", self.momentum)

    @property
    def remembers(self) -> bool:
        """The momentum, unless it is 0."""
        return self.momentum > 0

    def update(self, theta: Tensor, gradient: Tensor, momentum: Tensor | None, inner_lr: float) -> None:
        """See `OuterOptimizer`."""
        if momentum is not None:
            momentum.mul_(self.momentum).add_(gradient)
            gradient.add_(momentum, alpha=self.momentum)
        theta.sub_(gradient, alpha=self.lr)


@dataclass(frozen=True)
class SlowMomentum:
    """u ← β·u + g/γ; θ ← θ − α·γ·u, with γ the inner learning rate: SlowMo (arXiv 1910.00643, Algorithm 1).

    Attributes:
        lr: α, above 0. momentum: β, from 0 to below 1.
    """

    lr: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        _check_rate("slow_lr", self.lr)
        _check_momentum("slow_momentum", self.momentum)

    @property
    def remembers(self) -> bool:
        """Always."""
        return True

    def update(self, theta: Tensor, gradient: Tensor, momentum: Tensor | None, inner_lr: float) -> None:
        """See `OuterOptimizer`."""
        assert momentum is not None, "it remembers"
        if inner_lr == 0:
            theta.sub_(gradient)  # the limit of a rate that vanishes: nothing was learnt, nothing is kept
            return
        momentum.mul_(self.momentum).add_(gradient, alpha=1 / inner_lr)
        theta.sub_(momentum, alpha=self.lr * inner_lr)


def _check_rate(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise UsageError(f"{name}={value!r}", remedy="give a number above 0, such as 0.7")


def _check_momentum(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise UsageError(f"{name}={value!r}", remedy="give a number from 0 to below 1, such as 0.9")
