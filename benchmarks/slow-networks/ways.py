"""The ways in which `loss.py` and `tradeoff.py` have ranks synchronise (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["DDP", "OURS", "TRADEOFF", "Way"]


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        name: what it is called in tables.
        kind: torch's DDP; gradients every step, by Paceline; parameters every so many steps, averaged, or by DiLoCo.
        lr: largest learning rate: the best that was found for this way. steps: in all, which the schedule ends with.
        gradients: compression of gradients, a name or settings of `paceline.Compression`.
        options: of `LocalSGD` or `DiLoCo`.
        bucket_mib: of gradients.
    """

    name: str
    kind: Literal["ddp", "gradients", "local", "diloco"]
    lr: float
    steps: int = 600
    gradients: str | dict[str, Any] | None = None
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


def _gradients(name: str, how: str | dict[str, Any]) -> Way:
    return Way(f"gradients every step, {name}", "gradients", lr=1e-3, gradients=how)


def _averaged(every: int, name: str = "int4", **options: Any) -> Way:
    late = f", {options['delay']} late" if "delay" in options else ""
    options = {"every": every, "compression": "int4", **options}
    return Way(f"averaged every {every}{late}, {name}", "local", lr=2e-3, options=options)


def _diloco(every: int, **options: Any) -> Way:
    momentum = f", momentum {options['outer_momentum']}" if "outer_momentum" in options else ""
    return Way(
        f"DiLoCo every {every}{momentum}, int4", "diloco", lr=1e-3, options={"every": every, **options}
    )


TRADEOFF = [
    DDP,
    _gradients("bf16", "bf16"),
    _gradients("int8", "int8"),
    _gradients("int4", "int4"),
    _gradients("PowerSGD rank 16", {"name": "powersgd", "rank": 16}),
    _gradients("PowerSGD rank 4", "powersgd"),
    _gradients("largest 10 %", {"name": "topk", "keep": 0.1}),
    _gradients("largest 1 %", {"name": "topk", "keep": 0.01}),
    _averaged(2),
    _averaged(4),
    _averaged(4, delay=2),
    _averaged(8),
    _averaged(20),
    _averaged(20, "largest 1 %", compression={"name": "topk", "keep": 0.01}),
    _diloco(10),
    _diloco(20),
    _diloco(20, outer_momentum=0.5),
]
"""All at an equal number of steps, each at the best of a few learning rates for its kind."""
