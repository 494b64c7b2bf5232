"""Published times of NCCL's all-reduce, fitted on every second size, and predictions of the others.

    python benchmarks/nccl-tables/fit.py run
    python benchmarks/nccl-tables/fit.py table
    python benchmarks/nccl-tables/fit.py chart

``tables.json`` holds the figures as they were published: bus bandwidth in GB/s, or microseconds. The time is
n · 2(p − 1)/p ÷ busbw, by the definition of nccl-tests.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.cost_model.collective_prediction import PredictionError
from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points, held_out_sizes
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.report.charts.chart_style import Chart
from paceline.tools.report.charts.collective_charts import FitSeries, fit_chart

OP = "all-reduce"
LEAST_NBYTES = {"32×B200": 256 * 1024}
"""Below, latency over 32 ranks varies by a factor of six from one size to the next."""

bench = Benchmark(__file__, docs=["profile.md"])


def load() -> dict[str, list[MeasuredPoint]]:
    """Return the points of each table that are fitted, in ascending order of size."""
    tables = {}
    for published in bench.read("tables")["tables"]:
        name, ranks, unit = published["name"], published["ranks"], published["columns"][1]
        tables[name] = []
        for nbytes, value in published["rows"]:
            seconds = nbytes * 2 * (ranks - 1) / ranks / (value * 1e9)
            if unit == "microseconds":
                seconds = value * 1e-6
            if nbytes >= LEAST_NBYTES.get(name, 0):
                tables[name].append(MeasuredPoint(nbytes, ranks, seconds))
    return tables


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Fit and predict."""
    path = bench.output(json_file, "result")
    rows = []
    for name, points in load().items():
        best, line = held_out_sizes(points, OP), held_out_sizes(points, OP, max_segments=1)
        row: dict[str, Any] = {"name": name}
        for key, checked in (("held_out", best), ("held_out_one_line", line)):
            error = PredictionError.of(checked)
            assert error is not None
            row[key] = asdict(error)
        row["segments_of_all_sizes"] = [asdict(each) for each in fit_points(points, OP).segments]
        rows.append(row | {"held_out_sizes": [asdict(each) for each in best]})
    bench.write_computed(path, "nccl-tables", rows=rows)


@bench.tables
def tables() -> dict[str, str]:
    """Return the tables for README.md and for docs/profile.md, which has mean errors only."""
    cells, short = [], []
    for row in bench.read("result")["rows"]:
        best, line = row["held_out"], row["held_out_one_line"]
        shares = [best["mean"], best["median"], best["maximum"], line["mean"], line["maximum"]]
        errors = [f"{100 * share:.1f} %" for share in shares]
        cells.append([row["name"], str(best["points"]), *errors])
        short.append([row["name"], errors[3], errors[0]])
    titles = ["GPUs", "held-out sizes", "mean error", "median", "largest", "one line α + βn: mean", "largest"]
    return {
        "figures": table(titles, cells),
        "nccl": table(["GPUs", "one line α + βn", "ranges of sizes"], short),
    }


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of all tables and their fits."""
    series = [
        FitSeries(name, fit_points(points, OP), points, held_out_sizes(points, OP))
        for name, points in load().items()
    ]
    title = "NCCL all-reduce, published times and their fit; hollow: predicted from every other size"
    return {"fit.png": fit_chart(series, title)}


if __name__ == "__main__":
    bench.main()
