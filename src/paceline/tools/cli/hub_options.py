"""Options that say how a hub takes updates in: of ``paceline hub``, and of ``paceline simulate async``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub_rules import HubOptimizer

__all__ = [
    "BoundOption",
    "DownOption",
    "MarginOption",
    "OuterLrOption",
    "OuterMomentumOption",
    "OuterOption",
    "OuterWarmupOption",
    "PopulationOption",
    "StalenessOption",
    "UnstableOption",
    "outer_of",
]

OuterOption = Annotated[
    str, typer.Option(help="What becomes of updates: averaging, delayed-nesterov, nesterov.")
]
OuterLrOption = Annotated[
    float | None, typer.Option(help="Of the outer optimizer: 1 for averaging, else 0.7.")
]
OuterMomentumOption = Annotated[float, typer.Option(help="Of the outer optimizer.")]
OuterWarmupOption = Annotated[int, typer.Option(help="Rounds that are only averaged before momentum starts.")]
UnstableOption = Annotated[
    bool, typer.Option("--unstable", help="Allow Nesterov at every arrival, which diverges.")
]
StalenessOption = Annotated[
    str, typer.Option(help="What becomes of old updates: accept, down-weight, drop, wait.")
]
BoundOption = Annotated[float, typer.Option(help="Rounds beyond which an update is too old.")]
DownOption = Annotated[
    str, typer.Option(help="How the centre is packed for workers: bf16, fp16, fp32, int8.")
]
PopulationOption = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Train apart for so many steps; the best are adopted.")
]
MarginOption = Annotated[
    float, typer.Option(help="Of a population: share behind the best at which the worst is replaced.")
]


def outer_of(name: str, lr: float | None, momentum: float, warmup: int, unstable: bool) -> HubOptimizer:
    """Return the outer optimizer that the options ask for.

    Raises:
        UsageError: there is none of that name, or a number is out of range.
    """
    from paceline.async_dp.hub.hub_rules import HubOptimizer

    usual = 1.0 if name == "averaging" else 0.7
    return HubOptimizer(name, usual if lr is None else lr, momentum, warmup, unstable)  # type: ignore[arg-type]
