"""Outer optimizers: how the shared parameters θ change with the mean pseudo-gradient.

A pseudo-gradient is the change of the parameters by local training, negated: Δ = θ − w. Its mean over ranks, g, is used
as a gradient of θ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Averaging", "Nesterov", "OuterOptimizer", "SlowMomentum"]


class OuterOptimizer(ABC):
    """An outer optimizer; all ranks run it on the same numbers, so its state is the same on all."""

    @property
    def has_momentum(self) -> bool:
        """Whether it needs a momentum buffer."""
        return False

    @abstractmethod
    def update(
        self, theta: Tensor, gradient: Tensor, momentum: Tensor | None, inner_lr: float | Tensor
    ) -> None:
        """Change `theta` (and `momentum`) in place.

        Args:
            theta: shared parameters, 1-D.
            gradient: the mean pseudo-gradient; may be overwritten.
            momentum: the momentum buffer, initially zero; None without momentum.
            inner_lr: learning rate of the local optimizer; on an accelerator a scalar there.
        """


@dataclass(frozen=True)
class Averaging(OuterOptimizer):
    """θ ← θ − g, the mean of the ranks' parameters (local SGD, arXiv 1805.09767)."""

    def update(
        self, theta: Tensor, gradient: Tensor, momentum: Tensor | None, inner_lr: float | Tensor
    ) -> None:
        theta.sub_(gradient)


@dataclass(frozen=True)
class Nesterov(OuterOptimizer):
    """m ← μ·m + g; θ ← θ − ε·(g + μ·m): DiLoCo's (arXiv 2311.08105, Algorithm 1), as torch's SGD with nesterov.

    Attributes:
        lr: ε, above 0.
        momentum: μ, from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check("outer", self.lr, self.momentum)

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    def update(
        self, theta: Tensor, gradient: Tensor, momentum: Tensor | None, inner_lr: float | Tensor
    ) -> None:
        if momentum is not None:
            momentum.mul_(self.momentum).add_(gradient)
            gradient.add_(momentum, alpha=self.momentum)
        theta.sub_(gradient, alpha=self.lr)


@dataclass(frozen=True)
class SlowMomentum(OuterOptimizer):
    """u ← β·u + g/γ; θ ← θ − α·γ·u, with γ the inner learning rate: SlowMo (arXiv 1910.00643, Algorithm 1).

    Attributes:
        lr: α, above 0.
        momentum: β, from 0 to below 1.
    """

    lr: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        _check("slow", self.lr, self.momentum)

    @property
    def has_momentum(self) -> bool:
        return True

    def update(
        self, theta: Tensor, gradient: Tensor, momentum: Tensor | None, inner_lr: float | Tensor
    ) -> None:
        assert momentum is not None, "it has momentum"
        if not isinstance(inner_lr, float | int):
            self._update_on_device(theta, gradient, momentum, inner_lr)
            return
        if inner_lr == 0:
            theta.sub_(gradient)  # the limit for a vanishing rate: nothing was learnt, nothing is kept
            return
        momentum.mul_(self.momentum).add_(gradient, alpha=1 / inner_lr)
        theta.sub_(momentum, alpha=self.lr * inner_lr)

    def _update_on_device(self, theta: Tensor, gradient: Tensor, momentum: Tensor, inner_lr: Tensor) -> None:
        """Do the same, without the host reading γ."""
        moves = inner_lr != 0
        rate = inner_lr.masked_fill(~moves, 1.0)
        kept, still = momentum.clone(), theta - gradient
        momentum.mul_(self.momentum).addcmul_(gradient, (1 / rate).to(theta.dtype))
        theta.addcmul_(momentum, (-self.lr * rate).to(theta.dtype))
        momentum.copy_(momentum.where(moves, kept))
        theta.copy_(theta.where(moves, still))


def _check(prefix: str, lr: object, momentum: object) -> None:
    if not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 < lr < float("inf"):
        raise UsageError(f"{prefix}_lr={lr!r}", remedy="give a number above 0, such as 0.7")
    if not isinstance(momentum, int | float) or isinstance(momentum, bool) or not 0 <= momentum < 1:
        raise UsageError(
            f"{prefix}_momentum={momentum!r}", remedy="give a number from 0 to below 1, such as 0.9"
        )
