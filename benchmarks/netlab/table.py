"""Write what `measure.py` found into the table of README.md.

    python benchmarks/netlab/table.py

Reads ``2x2-1Gbit.json`` beside this file. No figure there is typed by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from figures import ARENA, BEST, GLOO, ORDINARY, Result

from bench_harness.markdown import fill, table
from paceline._core.format import format_count


def figures(result: Result) -> str:
    """Return the table: a row per size."""
    titles = ["gloo, ms", "paceline, ordinary, ms", "paceline, arena, ms", "gloo ÷ ordinary", "gloo ÷ arena"]
    passed = ["gloo sends", "paceline sends"]
    rows = []
    for row in result.rows:
        times = [f"{1e3 * row.times.seconds[name]:.4g}" for name in (BEST, ORDINARY, ARENA)]
        ratios = [str(row.times.ratio(BEST, name)) for name in (ORDINARY, ARENA)]
        buffers = [f"{row.buffers(name):.3f}" for name in (GLOO, ARENA)]
        rows.append([f"{format_count(row.times.nbytes)}B", *times, *ratios, *buffers])
    ranks = result.hosts * result.ranks_per_host
    least = [f"{2 * (count - 1) / count:g}" for count in (ranks, result.hosts)]
    rows.append(["expected", *[""] * 5, *least])
    return table(["bytes", *titles, *passed], rows)


def main(
    folder: Annotated[Path, typer.Argument(help="Where the result and README.md lie.")] = Path(
        __file__
    ).parent,
) -> None:
    """Fill the table of a folder's README.md."""
    readme = folder / "README.md"
    block = figures(Result.load(folder / "2x2-1Gbit.json"))
    readme.write_text(fill(readme.read_text(encoding="utf-8"), "figures", block), encoding="utf-8")
    print(readme)


if __name__ == "__main__":
    typer.run(main)
