"""The results that `loss.py` wrote, and what is derived from them (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Curve", "LossResult", "Pair"]


@dataclass(frozen=True)
class Curve:
    """Held-out loss over one training: by step, seconds, and bytes that a host has sent.

    Bytes are those of its interface, or where there is no network between ranks those that were foretold.
    """

    steps: list[int]
    seconds: list[float]
    sent: list[int]
    loss: list[float]

    @classmethod
    def from_json(cls, points: list[dict[str, Any]]) -> Curve:
        """Return a curve from the points of a training."""
        on_network = points[-1]["sent"] > points[-1]["foretold"] / 2
        columns = ("step", "seconds", "sent" if on_network else "foretold", "loss")
        return cls(*([point[name] for point in points] for name in columns))

    def reaches(self, target: float) -> int | None:
        """Return the index of the first point whose loss is at most `target`; None: there is none."""
        return next((index for index, loss in enumerate(self.loss) if loss <= target), None)


@dataclass(frozen=True)
class Pair:
    """One seed: the loss that DDP ended with, and when each way had reached it.

    Attributes:
        seed: which one. target: DDP's last held-out loss, in nats per token.
        ddp_seconds: DDP's steps at its median time per step. seconds: of the other way; None: it never got there.
        step: of the other way, when it got there.
        last: its last loss ÷ the target.
    """

    seed: int
    target: float
    ddp_seconds: float
    seconds: float | None
    step: int | None
    last: float

    @property
    def ratio(self) -> float | None:
        """DDP's time ÷ the other's."""
        return None if self.seconds is None else self.ddp_seconds / self.seconds

    def __str__(self) -> str:
        reached = "never" if self.seconds is None else f"{self.seconds:.0f} s (step {self.step})"
        ratio = "" if self.ratio is None else f", {self.ratio:.2f} times sooner"
        return (
            f"seed {self.seed}: loss {self.target:.4f} by DDP in {self.ddp_seconds:.0f} s, "
            f"by ours in {reached}{ratio}; ours ends at {self.last:.4f} of it"
        )


@dataclass(frozen=True)
class LossResult:
    """All of a result.

    Attributes:
        ddp, ours: a curve for each seed; the seconds of DDP's mean nothing (they were made on one host).
        ddp_step: seconds of a step of DDP on the network, median.
    """

    ddp: list[Curve]
    ours: list[Curve]
    ddp_step: float

    @classmethod
    def from_json(cls, result: dict[str, Any]) -> LossResult:
        """Return what `loss.py` wrote."""
        ddp, ours = (
            [Curve.from_json(points) for points in result[name]["curves"]] for name in ("ddp", "ours")
        )
        return cls(ddp, ours, median(result["ddp"]["seconds"]))

    def rows(self) -> list[Pair]:
        """Return what came out, seed by seed."""
        pairs = []
        for seed, (ddp, ours) in enumerate(zip(self.ddp, self.ours, strict=True)):
            target = ddp.loss[-1]
            at = ours.reaches(target)
            pairs.append(
                Pair(
                    seed,
                    target,
                    ddp.steps[-1] * self.ddp_step,
                    None if at is None else ours.seconds[at],
                    None if at is None else ours.steps[at],
                    ours.loss[-1] / target,
                )
            )
        return pairs
