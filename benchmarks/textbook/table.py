"""Write what was priced and measured into the table of README.md.

python benchmarks/textbook/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import typer

from paceline.bench.schedules.case import Case
from paceline.report.markdown import fill, table

HERE = Path(__file__).parent


def main() -> None:
    """Fill the table."""
    rows = []
    for op in ("broadcast", "reduce", "all-reduce"):
        for row in json.loads((HERE / f"{op}.json").read_text(encoding="utf-8"))["rows"]:
            case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
            priced, measured = row["priced_s"], median(row["seconds"])
            spread = f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}"
            rows.append(
                [op, case.label, f"{priced:.2f}", f"{measured:.2f}", spread, f"{measured / priced:.2f}"]
            )
    block = table(["operation", "algorithm", "priced, s", "measured, s", "runs", "ratio"], rows, words=2)
    readme = HERE / "README.md"
    readme.write_text(fill(readme.read_text(encoding="utf-8"), "figures", block), encoding="utf-8")
    print(readme)


if __name__ == "__main__":
    typer.run(main)
