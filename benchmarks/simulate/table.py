"""Write what `measure.py` found into the tables of README.md, and show it.

    python benchmarks/simulate/table.py

Reads ``steps-200Mbit.json`` beside this file. No figure there is typed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from bench_harness.markdown import fill, table
from paceline.tools.console_table import print_wide

TITLES = [
    *("strategy", "ranks", "measured, s", "simulated, s", "off", "off, hosts as 2 are"),
    *("computing, s", "slows it", "slows exchanges"),
]


def cells(result: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows: one for each strategy and number of ranks."""
    return [
        [
            row["strategy"],
            str(row["ranks"]),
            f"{row['measured']:.3g}",
            f"{row['simulated']:.3g}",
            f"{100 * row['error']:+.1f} %",
            f"{100 * row['from_two']:+.1f} %",
            f"{row['computing']:.3g}",
            f"{row['computing_slows']:.2f}",
            f"{row['calls_slow']:.2f}",
        ]
        for row in sorted(result["rows"], key=lambda row: (row["strategy"], row["ranks"]))
    ]


def clock(result: dict[str, Any]) -> str:
    """Return the sentence on how long the simulator takes."""
    took = result["clock"]
    return (
        f"{took['nodes']:,} nodes of 8 ranks, with uneven machines, varying steps, failures and the best interval by "
        f"simulation, take {took['seconds']:.1f} s; a sweep of {took['sweep']} numbers up to 8,192 takes "
        f"{took['sweep_seconds']:.1f} s."
    )


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    shown = Table(box=None, pad_edge=False)
    for at, name in enumerate(TITLES):
        shown.add_column(name, justify="right" if at else "left", no_wrap=True)
    for row in cells(result):
        shown.add_row(*row)
    print_wide(shown)
    print(clock(result))


def main(
    folder: Annotated[Path, typer.Argument(help="Where the result and README.md lie.")] = Path(
        __file__
    ).parent,
) -> None:
    """Fill the tables of a folder's README.md."""
    result = json.loads((folder / "steps-200Mbit.json").read_text(encoding="utf-8"))
    readme = folder / "README.md"
    text = fill(readme.read_text(encoding="utf-8"), "figures", table(TITLES, cells(result)))
    readme.write_text(fill(text, "clock", clock(result)), encoding="utf-8")
    print(readme)


if __name__ == "__main__":
    typer.run(main)
