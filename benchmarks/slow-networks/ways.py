"""The ways in which `loss.py` and `tradeoff.py` have ranks synchronise (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["DDP", "OURS", "Way"]


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        name: what it is called in tables.
        kind: torch's DDP; gradients every step, by Paceline; parameters every so many steps, averaged, or by DiLoCo.
        lr: largest learning rate: the best that was found for this way. steps: in all, which the schedule ends with.
        gradients: compression of gradients. options: of `LocalSGD` or `DiLoCo`.
        bucket_mib: of gradients.
    """

    name: str
    kind: Literal["ddp", "gradients", "local", "diloco"]
    lr: float
    steps: int = 600
    gradients: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    bucket_mib: float = 5.0


DDP = Way("torch DDP", "ddp", lr=1e-3)
OURS = Way(
    "LocalSGD, every 4 steps, int4",
    "local",
    lr=2e-3,
    steps=800,
    options={"every": 4, "delay": 2, "compression": "int4"},
)
