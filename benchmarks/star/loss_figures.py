"""What `loss.py` wrote, and what is derived from it (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Seed", "alone_share", "loss_at", "reached", "read"]


@dataclass(frozen=True)
class Seed:
    """One seed: the loss that DDP ends with, and when each way has reached it.

    Attributes:
        seed: which. target: DDP's last held-out loss. ddp, local: seconds of lock-step ways; local may never get there.
        star: seconds of the star; None: never. last: the star's last loss ÷ the target.
        steps: local ones of all workers of the star until its schedule's end.
    """

    seed: int
    target: float
    ddp: float
    local: float | None
    star: float | None
    last: float
    steps: int


def reached(curve: Sequence[Mapping[str, float]], target: float, column: str) -> float | None:
    """Return `column` of the first point whose loss is at most `target`."""
    return next((point[column] for point in curve if point["loss"] <= target), None)


def loss_at(curve: Sequence[Mapping[str, float]], seconds: float) -> float:
    """Return the loss of the point that is nearest to a time."""
    return min(curve, key=lambda point: abs(point["seconds"] - seconds))["loss"]


def read(result: Mapping[str, Any], curves: Mapping[str, Any]) -> list[Seed]:
    """Return a row for each seed.

    Args:
        result: of `loss.py`. curves: of `benchmarks/slow-networks/loss.py`: what lock-step ways learn in a step.
    """
    ddp_step, local_step = median(result["ddp"]["seconds"]), median(result["local"]["seconds"])
    rows = []
    for run in result["star"]:
        seed, curve = run["seed"], run["curve"]
        ddp, ours = curves["ddp"]["curves"][seed], curves["ours"]["curves"][seed]
        target = ddp[-1]["loss"]
        step = reached(ours, target, "step")
        rows.append(
            Seed(
                seed,
                target,
                ddp[-1]["step"] * ddp_step,
                None if step is None else step * local_step,
                reached(curve, target, "seconds"),
                curve[-1]["loss"] / target,
                sum(worker["steps"] for worker in run["workers"]),
            )
        )
    return rows


def alone_share(turns: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each worker its steps a second beside the star ÷ alone, the median over turns."""
    shares: list[list[float]] = []
    for turn in turns:
        for star, alone in zip(turn["star"], turn["alone"], strict=True):
            if len(shares) <= star["rank"]:
                shares.append([])
            shares[star["rank"]].append(
                (star["steps"] / star["seconds"]) / (alone["steps"] / alone["seconds"])
            )
    return [median(each) for each in shares]
