"""``paceline plan memory --verify``: the same steps run here, what they took beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.wide_table import print_wide
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.bench.footprint.setting import Setting
    from paceline.bench.footprint.subject import Subject

__all__ = ["verified"]


def verified(subject: Subject, settings: Sequence[Setting], inputs: Sequence[str]) -> list[dict[str, Any]]:
    """Measure each setting on this machine, print predicted beside measured, return both.

    Raises:
        UsageError: this machine has not enough memory.
        RankFailed: a rank ended with an error.
    """
    import torch
    from rich.table import Table

    from paceline.bench.footprint.check import check
    from paceline.launch.local import run_ranks

    table = Table(box=None, pad_edge=False)
    table.add_column("on this machine", no_wrap=True)
    for name in ("predicted", "measured", "off by"):
        table.add_column(name, justify="right", no_wrap=True)
    found = []
    for setting in settings:
        here = setting.device == "cuda" and setting.ranks <= torch.cuda.device_count()
        local = setting if here else replace(setting, device="cpu", backend="gloo")
        checked = check(subject, local, run_ranks, inputs=inputs)
        found.append(checked.facts())
        table.add_row(
            f"{local.name}, {local.device}",
            format_bytes(checked.predicted_nbytes),
            format_bytes(checked.measured.nbytes),
            f"{100 * checked.error:+.2f} %",
        )
    print_wide(table)
    typer.echo(
        "measured: the most that torch's allocator had given out at once, on the rank that took most; on processors\n"
        "where there are not as many GPUs.\n"
    )
    return found
