"""Predicted and measured times of textbook collectives: ``python benchmarks/textbook/textbook.py table``."""

from __future__ import annotations

from statistics import median

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.tools.bench.schedule_benchmark import ScheduleCase

IN_DOCS = [
    ["broadcast", "one-by-one"],
    ["broadcast", "tree"],
    ["broadcast", "scatter-all-gather"],
    ["broadcast", "chain, 64 segments"],
    ["reduce", "tree"],
    ["all-reduce", "tree"],
    ["all-reduce", "ring"],
]

bench = Benchmark(__file__, docs=["collectives.md"])


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of all cases for README.md, and of some for docs/collectives.md."""
    rows = []
    for op in ("broadcast", "reduce", "all-reduce"):
        for row in bench.read(op)["rows"]:
            case = ScheduleCase(**{name: row[name] for name in ScheduleCase.__dataclass_fields__})
            priced, seconds = row["priced_s"], row["seconds"]
            measured, spread = median(seconds), f"{min(seconds):.2f} to {max(seconds):.2f}"
            figures = [f"{priced:.2f}", f"{measured:.2f}", spread, f"{measured / priced:.2f}"]
            rows.append([op, case.label, *figures])
    chosen = sorted((row for row in rows if row[:2] in IN_DOCS), key=lambda row: IN_DOCS.index(row[:2]))
    titles = ["operation", "algorithm", "priced, s", "measured, s", "runs", "ratio"]
    return {"figures": table(titles, rows, words=2), "textbook": table(titles, chosen, words=2)}


if __name__ == "__main__":
    bench.main()
