"""What the centre becomes when an update arrives: outer optimizers that are stable one arrival at a time.

An update is a pseudo-gradient Δ = what its worker began from − what it came to. N workers send them one by one, each
counts 1/N, times its samples beside the mean, times a weight for its staleness.

    Averaging          θ ← θ − ε·w·Δ                            no momentum, hence nothing that N arrivals amplify
    DelayedNesterov    θ ← θ − ε·w·Δ, and at every N-th arrival, with g the sum of the last N w·Δ:
                       m ← μ·m + g,  θ ← θ − ε·μ·m              N arrivals make one Nesterov step on their mean
    Nesterov           m ← μ·m + w·Δ,  θ ← θ − ε·(w·Δ + μ·m)    at every arrival: the momentum decays N times too fast
                                                                to be that of a mean, and too slowly to be harmless

[Note: Nesterov per arrival] With ε = 0.7, μ = 0.9 and weights that don't shrink with N, this diverges: N stale updates
of about the same direction are each amplified by 1/(1 − μ) (arXiv 2401.09135 §4; `paceline simulate async` shows it).
It is there to be compared with, and has to be asked for twice.

Sources: Delayed Nesterov: Liu et al., arXiv 2401.09135, Algorithm 3 with c = 0; averaging: local SGD, arXiv 1805.09767.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.async_dp.float_rows import FloatRow, add_scaled, as_tensor, fastest_form
from paceline.errors import UsageError, unknown

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OUTER_OPTIMIZERS", "HubOptimizer", "MergedFragment"]

OUTER_OPTIMIZERS = ("averaging", "delayed-nesterov", "nesterov")

_STABLE = 0.1
"""Largest ε of Nesterov per arrival that is let through unasked."""


@dataclass(frozen=True)
class HubOptimizer:
    """How the hub takes in updates.

    Attributes:
        name: one of `OUTER_OPTIMIZERS`. lr: ε, above 0. momentum: μ, from 0 to below 1; averaging has none.
        warmup: rounds (N arrivals each) in which updates are only averaged, before the outer optimizer begins: what
            workers learnt on their own before they first sent is much, and no direction to go on in.
        unstable: Nesterov per arrival is really meant, see [Note: Nesterov per arrival].

    Raises:
        UsageError: a value is out of range; Nesterov per arrival without `unstable`.
    """

    name: Literal["averaging", "delayed-nesterov", "nesterov"] = "averaging"
    lr: float = 1.0
    momentum: float = 0.9
    warmup: int = 1
    unstable: bool = False

    def __post_init__(self) -> None:
        if self.name not in OUTER_OPTIMIZERS:
            raise unknown("outer optimizer", self.name, OUTER_OPTIMIZERS)
        if not isinstance(self.lr, int | float) or not 0 < self.lr < float("inf"):
            raise UsageError(f"outer lr={self.lr!r}", remedy="give a number above 0, such as 1")
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise UsageError(
                f"outer momentum={self.momentum!r}", remedy="give a number from 0 to below 1, such as 0.9"
            )
        if type(self.warmup) is not int or self.warmup < 0:
            raise UsageError(
                f"outer warmup={self.warmup!r}", remedy="give a whole number of rounds, 0 or more"
            )
        if self.name == "nesterov" and self.lr * self.momentum > _STABLE and not self.unstable:
            raise UsageError(
                f"Nesterov momentum {self.momentum:g} at every arrival with lr {self.lr:g} diverges",
                remedy="use delayed-nesterov, or averaging; to see it diverge ask for it (--unstable, unstable=True)",
            )

    @property
    def remembers(self) -> bool:
        """Whether it has a momentum."""
        return self.name != "averaging" and self.momentum > 0


@dataclass
class MergedFragment:
    """One fragment of what all workers share.

    Attributes:
        theta: its numbers, 1-D float32. trained: so many of them are parameters; those behind are averaged only.
        outer: how updates are taken in.
        momentum, gathered: of the outer optimizer; None where it has none.
        count: arrivals since the momentum was last used.
        revision: updates taken in so far.
    """

    theta: Tensor
    trained: int
    outer: HubOptimizer
    momentum: Tensor | None = None
    gathered: Tensor | None = None
    count: int = 0
    revision: int = field(default=0)

    def __post_init__(self) -> None:
        self._own, self._rest = fastest_form(self.theta[: self.trained]), self.theta[self.trained :]
        self._averaged = len(self._rest)
        if self.outer.remembers and self.momentum is None:
            self.momentum = self.theta[: self.trained].new_zeros(self.trained)
        if self.outer.remembers and self.outer.name == "delayed-nesterov" and self.gathered is None:
            self.gathered = self.theta[: self.trained].new_zeros(self.trained)

    def take(self, delta: FloatRow, weight: float, workers: int) -> None:
        """Take in an update.

        Args:
            delta: like `theta`. weight: how much it counts, 1/N if it is an ordinary one. workers: N.
        """
        outer, gradient = self.outer, delta
        if self._averaged:
            gradient = delta[: self.trained]
            add_scaled(self._rest, -weight, delta[self.trained :])
        warm = self.revision >= outer.warmup * workers
        add_scaled(self._own, -(outer.lr if warm else 1.0) * weight, gradient)
        self.revision += 1
        if self.momentum is None or not warm:
            return
        if self.gathered is None:
            self.momentum.mul_(outer.momentum).add_(as_tensor(gradient), alpha=weight)
        else:
            add_scaled(self.gathered, weight, gradient)
            self.count += 1
            if self.count < workers:
                return
            self.momentum.mul_(outer.momentum).add_(self.gathered)
            self.gathered.zero_()
            self.count = 0
        add_scaled(self._own, -outer.lr * outer.momentum, self.momentum)

    def tensors(self) -> dict[str, Tensor]:
        """Return its state, by name."""
        named = {"theta": self.theta, "momentum": self.momentum, "gathered": self.gathered}
        return {name: each for name, each in named.items() if each is not None}
