"""Fit published times of NCCL's all-reduce on every second size, and predict the others.

    python benchmarks/nccl-tables/fit.py

Reads ``tables.json`` and writes ``result.json`` and ``fit.png`` beside it, and the tables of README.md and
``docs/profile.md``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from tables import OP, Table, load

from bench_harness.markdown import fill, table
from paceline.cost_model.collective_fit import CheckedPrediction, CollectiveFit, PredictionError
from paceline.cost_model.fit_measurements import fit_points, held_out_sizes
from paceline.tools.report.charts.collective_charts import FitSeries, fit_chart

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "profile.md"
LEAST_NBYTES = {"32×B200": 256 * 1024}
"""Below, latency over 32 ranks varies by a factor of six from one size to the next."""


def chosen() -> list[Table]:
    """Return the tables that are fitted, without sizes that no line can follow."""
    return [each.at_least(LEAST_NBYTES.get(name, 0)) for name, each in load().items()]


def row(
    name: str, fit: CollectiveFit, best: list[CheckedPrediction], line: list[CheckedPrediction]
) -> dict[str, Any]:
    """Return what is said of one table: the fit's errors, and those of α + β·n in one piece."""
    accuracy, plain = PredictionError.of(best), PredictionError.of(line)
    assert accuracy is not None
    assert plain is not None
    segments = [asdict(each) for each in fit.segments]
    return {
        "name": name,
        "held_out": asdict(accuracy),
        "held_out_one_line": asdict(plain),
        "segments_of_all_sizes": segments,
        "held_out_sizes": [asdict(each) for each in best],
    }


def short_block(rows: list[dict[str, Any]]) -> str:
    """Return the table for docs/profile.md: mean errors only."""
    cells = [
        [each["name"], *(f"{100 * each[key]['mean']:.1f} %" for key in ("held_out_one_line", "held_out"))]
        for each in rows
    ]
    return table(["GPUs", "one line α + βn", "ranges of sizes"], cells)


def block(rows: list[dict[str, Any]]) -> str:
    """Return the table for README.md."""
    titles = ["held-out sizes", "mean error", "median", "largest", "one line α + βn: mean", "largest"]
    cells = []
    for each in rows:
        found, line = each["held_out"], each["held_out_one_line"]
        shares = [found["mean"], found["median"], found["maximum"], line["mean"], line["maximum"]]
        cells.append([each["name"], str(found["points"]), *(f"{100 * share:.1f} %" for share in shares)])
    return table(["GPUs", *titles], cells)


def main(folder: Annotated[Path, typer.Argument(help="Where to write; README.md is there.")] = HERE) -> None:
    """Fit, predict, write and draw."""
    rows, series = [], []
    for each in chosen():
        fit = fit_points(each.points, OP)
        best = held_out_sizes(each.points, OP)
        rows.append(row(each.name, fit, best, held_out_sizes(each.points, OP, max_segments=1)))
        series.append(FitSeries(each.name, fit, each.points, best))
    result = {
        "kind": "nccl-tables",
        "schema": 1,
        "command": "python benchmarks/nccl-tables/fit.py",
        "rows": rows,
    }
    (folder / "result.json").write_text(
        json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    for path, name, text in (
        (folder / "README.md", "figures", block(rows)),
        (DOCS, "nccl", short_block(rows)),
    ):
        path.write_text(fill(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    title = "NCCL all-reduce, published times and their fit; hollow: predicted from every other size"
    print(fit_chart(series, title).save(folder / "fit.png"))
    print(block(rows))


if __name__ == "__main__":
    typer.run(main)
