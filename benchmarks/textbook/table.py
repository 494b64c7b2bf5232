"""Write what was priced and measured into the tables of README.md and docs/collectives.md.

python benchmarks/textbook/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import typer

from bench_harness.markdown import fill, table
from paceline.tools.bench.schedule_benchmark import ScheduleCase

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "collectives.md"
TOLD = [  # in the documentation
    ("broadcast", "one-by-one"),
    ("broadcast", "tree"),
    ("broadcast", "scatter-all-gather"),
    ("broadcast", "chain, 64 segments"),
    ("reduce", "tree"),
    ("all-reduce", "tree"),
    ("all-reduce", "ring"),
]
TITLES = ["operation", "algorithm", "priced, s", "measured, s", "runs", "ratio"]


def main() -> None:
    """Fill both tables."""
    rows = []
    for op in ("broadcast", "reduce", "all-reduce"):
        for row in json.loads((HERE / f"{op}.json").read_text(encoding="utf-8"))["rows"]:
            case = ScheduleCase(**{name: row[name] for name in ScheduleCase.__dataclass_fields__})
            priced, measured = row["priced_s"], median(row["seconds"])
            spread = f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}"
            rows.append(
                [op, case.label, f"{priced:.2f}", f"{measured:.2f}", spread, f"{measured / priced:.2f}"]
            )
    told = sorted(
        (row for row in rows if (row[0], row[1]) in TOLD), key=lambda row: TOLD.index((row[0], row[1]))
    )
    for path, name, chosen in ((HERE / "README.md", "figures", rows), (DOCS, "textbook", told)):
        block = table(TITLES, chosen, words=2)
        path.write_text(fill(path.read_text(encoding="utf-8"), name, block), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    typer.run(main)
