"""``paceline plan hardware``: the devices and links that are known by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

__all__ = ["DEVICE_COLUMNS", "LINK_COLUMNS", "device_rows", "hardware", "link_rows"]

DEVICE_COLUMNS = ("device", "memory, GB", "bf16", "fp16", "tf32", "fp32, TFLOP/s", "memory, GB/s", "its link")
LINK_COLUMNS = ("link", "GB/s one way", "latency, µs")


def hardware(
    sources: Annotated[bool, typer.Option("--sources", help="Show where each row is from.")] = False,
) -> None:
    """List the devices and links that are known by name, with dense rates and links one way.

    Example: paceline plan hardware --sources
    """
    from paceline.cli.wide_table import print_wide
    from paceline.plan.hardware import DEVICES, INTERCONNECTS

    print_wide(_table(DEVICE_COLUMNS, device_rows(), [each.source for each in DEVICES.values()], sources))
    links = [f"{each.source}; latency: {each.latency_source}" for each in INTERCONNECTS.values()]
    print_wide(_table(LINK_COLUMNS, link_rows(), links, sources))


def device_rows() -> list[list[str]]:
    """Return the table of devices as text; a rate that a device has no unit for is empty."""
    from paceline.plan.hardware import DEVICES, DTYPES

    rows = []
    for each in DEVICES.values():
        rates = [getattr(each, dtype) for dtype in DTYPES]
        told = ["" if rate is None else f"{rate / 1e12:.4g}" for rate in rates]
        speed = f"{each.memory_nbytes_per_second / 1e9:.4g}"
        rows.append([each.name, f"{each.memory_nbytes / 1e9:g}", *told, speed, each.link])
    return rows


def link_rows() -> list[list[str]]:
    """Return the table of links as text."""
    from paceline.plan.hardware import INTERCONNECTS

    return [
        [each.name, f"{each.nbytes_per_second / 1e9:.4g}", f"{1e6 * each.latency_seconds:.2g}"]
        for each in INTERCONNECTS.values()
    ]


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], sources: Sequence[str], shown: bool
) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left", no_wrap=True)
    if shown:
        table.add_column("source", no_wrap=True)
    for row, source in zip(rows, sources, strict=True):
        table.add_row(*row, *([source] if shown else []))
    return table
