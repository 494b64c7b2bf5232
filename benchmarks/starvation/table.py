"""Fill the tables in README.md and docs/data.md from the results: ``python benchmarks/starvation/table.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench_harness.markdown import fill, table
from paceline.tools.bench.starvation.starvation_table import STARVATION_COLUMNS, row_cells, table_title

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "data.md"
WEIGHTS = ["way", "steps", "samples used", "used again", "what each rank counts, %", "bias"]


def read(name: str) -> dict[str, Any]:
    """Return the result of that name."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def starvation(name: str) -> str:
    """Return the table of what happened to ranks."""
    found = read(name)
    return f"{table_title(found['settings'])}\n\n" + table(
        STARVATION_COLUMNS, [row_cells(each) for each in found["scenes"]], words=4
    )


def weights() -> str:
    """Return the table of what each rank's data count."""
    rows = [
        [
            row["way"],
            str(row["steps"]),
            f"{row['used']:.1%}",
            f"{row['repeated']:.1%}" if row["repeated"] else "",
            " ".join(f"{100 * weight:.1f}" for weight in row["weights"]),
            f"{row['bias']:.1%}" if row["bias"] >= 5e-4 else f"{row['bias']:.0e}",
        ]
        for row in read("weights")["rows"]
    ]
    return table(WEIGHTS, rows)


def main() -> None:
    """Fill the tables."""
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name in ("2-ranks", "4-ranks", "2-ranks-paceline"):
        text = fill(text, name, starvation(name))
    readme.write_text(fill(text, "weights", weights()), encoding="utf-8")
    docs = DOCS.read_text(encoding="utf-8")
    docs = fill(fill(docs, "starvation", starvation("2-ranks")), "weights", weights())
    DOCS.write_text(docs, encoding="utf-8")


if __name__ == "__main__":
    main()
