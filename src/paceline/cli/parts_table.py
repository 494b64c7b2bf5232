"""The tables of ``paceline bench parts``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.units import MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.plan.step_entries import Contention, ExchangeCost, ModelStep

__all__ = ["FOOTER", "beside_table", "model_line", "price_table"]

FOOTER = (
    "Medians; the slowest rank counts. In a row: what one more exchange takes while others are under way. Error: the\n"
    "median of sizes that were held out, predicted from the others. × slower: computing and exchanges side by side."
)
_SIZES = (1024, MIB, 25 * MIB)


def model_line(step: ModelStep) -> str:
    """Return what a model's computing takes, in words."""
    parts = (("forward", step.forward), ("backward", step.backward), ("into buckets", step.buffered))
    told = ", ".join(
        f"{name} {format_seconds(seconds)}" for name, seconds in (*parts, ("update", step.optimizer))
    )
    return (
        f"{step.model}, {step.batch} samples a rank ({step.shape}), {len(step.parameters)} parameters of "
        f"{format_bytes(step.nbytes)}, {step.ranks} ranks: {told}"
    )


def price_table(costs: Sequence[ExchangeCost], step: ModelStep) -> Table:
    """Return what exchanges cost at a few sizes within what was measured, and the error of the fits."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("exchange", "by", "on", ""):
        table.add_column(name, no_wrap=True)
    sizes = [size for size in _SIZES if size < step.nbytes] + [step.nbytes]
    for title in (*map(format_bytes, sizes), "error"):
        table.add_column(title, justify="right", no_wrap=True)
    for cost in costs:
        times = [format_seconds(cost.fit.seconds(size, step.ranks)) for size in sizes]
        error = cost.fit.sizes_error
        told = "" if error is None else f"{100 * error.median:.1f} %"
        how = "in a row" if cost.queued else "alone"
        table.add_row(cost.fit.op, cost.caller, f"{cost.backend}, {cost.network}", how, *times, told)
    return table


def beside_table(costs: Sequence[Contention]) -> Table:
    """Return what computing and exchanges do to each other."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("beside computing", "by", "on"):
        table.add_column(name, no_wrap=True)
    for title in ("a launch", "computing × slower", "exchanges × slower"):
        table.add_column(title, justify="right", no_wrap=True)
    for cost in costs:
        values = (
            format_seconds(cost.launch_seconds),
            f"{cost.computing_slows:.2f}",
            f"{cost.calls_slow:.2f}",
        )
        table.add_row(cost.op, cost.caller, f"{cost.backend}, {cost.network}", *values)
    return table
