"""Fill the table in README.md from the results beside it: ``python benchmarks/exchange/table.py``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from paceline.report.markdown import fill, table
from paceline.units import format_count

HERE = Path(__file__).parent
COLUMNS = [
    "exchange",
    "ranks",
    "bytes a rank",
    "round, ms",
    "with work, ms",
    "work, ms",
    "overlap",
    "checksums",
]


def cells(result: dict[str, Any]) -> list[str]:
    """Return the row of one result: medians over ranks."""
    rows, settings = result["rows"], result["settings"]

    def middle(name: str) -> float:
        return median(row[name] for row in rows)

    right = sum(row["right"] for row in rows)
    return [
        settings["shape"],
        str(len(rows)),
        f"{format_count(rows[0]['nbytes'])}B",
        *(f"{middle(name) * 1000:.0f}" for name in ("seconds", "both_seconds", "work_seconds")),
        f"{middle('overlap'):.2f}",
        f"{right} of {len(rows)} right",
    ]


def main() -> None:
    """Fill the table."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("*-ranks.json"))]
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(
        fill(text, "figures", table(COLUMNS, [cells(each) for each in results])), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
