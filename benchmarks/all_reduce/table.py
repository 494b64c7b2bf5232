"""Write what `measure.py` found into the tables of README.md.

    python benchmarks/all_reduce/table.py

Reads ``2-ranks.json`` and ``4-ranks.json`` beside this file. No figure there is typed by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from figures import ARENA, BEST, COPY, COPY_ALONE, MPICH, ORDINARY, PASS, Result, Tried

from bench_harness.markdown import fill, table
from paceline._core.format import format_size

MB = 1_000_000
WANTED = [  # ranks, bytes, own, other, bound
    (2, 100 * MB, BEST, ARENA, "≥ 4"),
    (2, 100 * MB, BEST, ORDINARY, "≥ 1.8"),
    (2, 100 * MB, MPICH, ARENA, "≥ 2.5"),
    (2, 100 * MB, ARENA, COPY, "≤ 1.1"),
    (2, 100 * MB, ARENA, COPY_ALONE, "≤ 1.1"),
    (2, 100 * MB, ARENA, PASS, ""),
    (2, 100 * MB, MPICH, PASS, ""),
    (2, 4_000, BEST, ORDINARY, "≥ 4"),
    (2, 4_000, BEST, ARENA, "≥ 4"),
    (4, 100 * MB, BEST, ARENA, "≥ 2.5"),
    (4, 100 * MB, BEST, ORDINARY, ""),
]
COLUMNS = {
    BEST: "gloo",
    MPICH: "MPICH",
    ORDINARY: "paceline, ordinary",
    ARENA: "paceline, arena",
    COPY: "copy_, all ranks",
    COPY_ALONE: "copy_, one rank",
    PASS: "mul_, all ranks",
}


def figures(results: dict[int, Result]) -> str:
    """Return the table of ratios."""
    rows = []
    for ranks, nbytes, own, other, bound in WANTED:
        ratio = results[ranks].at(nbytes).ratio(own, other)
        title = f"{_short(own)} ÷ {_short(other)}"
        rows.append([str(ranks), format_size(nbytes), title, str(ratio), bound])
    return table(["ranks", "bytes", "", "median (95 % interval)", "wanted"], rows, words=3)


def times(result: Result) -> str:
    """Return the table of times at all sizes, and of ratios."""
    ratios = [(BEST, ORDINARY), (BEST, ARENA), (MPICH, ARENA), (ARENA, COPY)]
    titles = [f"{_short(own)} ÷ {_short(other)}" for own, other in ratios]
    rows = []
    for row in result.rows:
        seconds = [_milliseconds(row.seconds[name]) for name in COLUMNS]
        cells = [f"{row.ratio(own, other).median:.2f}" for own, other in ratios]
        rows.append([format_size(row.nbytes), *seconds, *cells])
    return table(["bytes", *COLUMNS.values(), *titles], rows)


def settings(results: dict[int, Tried]) -> str:
    """Return the table of MPICH's settings that were tried."""
    rows = []
    for ranks, tried in results.items():
        for each in tried:
            cells = [_milliseconds(seconds) for seconds in each["seconds"].values()]
            rows.append([str(ranks), each["name"], *cells, f"{each['score']:.2f}"])
    sizes = [format_size(int(nbytes)) for nbytes in next(iter(results.values()))[0]["seconds"]]
    return table(["ranks", "setting", *sizes, "× the best"], rows, words=2)


def _short(name: str) -> str:
    return {
        BEST: "gloo",
        ORDINARY: "ordinary",
        ARENA: "arena",
        COPY: "copy_",
        COPY_ALONE: "copy_, one rank alone",
        PASS: "mul_",
    }.get(name, name)


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.4f}" if value < 0.1 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def main(
    folder: Annotated[Path, typer.Argument(help="Where the results and README.md lie.")] = Path(
        __file__
    ).parent,
) -> None:
    """Fill the tables of a folder's README.md."""
    results = {ranks: Result.load(folder / f"{ranks}-ranks.json") for ranks in (2, 4)}
    readme = folder / "README.md"
    text = fill(readme.read_text(encoding="utf-8"), "figures", figures(results))
    for ranks, result in results.items():
        text = fill(text, f"{ranks} ranks", times(result))
    text = fill(text, "settings", settings({ranks: result.tried for ranks, result in results.items()}))
    readme.write_text(text, encoding="utf-8")
    print(readme)


if __name__ == "__main__":
    typer.run(main)
