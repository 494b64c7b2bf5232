"""Fill the table in README.md from the results beside it: ``python benchmarks/exchange/table.py``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from bench_harness.markdown import fill, table
from paceline._core.format import format_count

HERE = Path(__file__).parent
WHERE = {"ranks": "one machine", "hosts": "two hosts, 200 Mbit/s"}  # by the last word of a result's name
COLUMNS = [
    "exchange",
    "ranks on",
    "ranks",
    "bytes a rank",
    "round, ms",
    "with work, ms",
    "work, ms",
    "overlap",
]


def cells(path: Path) -> list[str]:
    """Return the row of one result: medians over ranks."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = result["rows"]

    def middle(name: str) -> float:
        return median(row[name] for row in rows)

    return [
        result["settings"]["shape"],
        WHERE[path.stem.rpartition("-")[2]],
        str(len(rows)),
        f"{format_count(rows[0]['nbytes'])}B",
        *(f"{1e3 * middle(name):.0f}" for name in ("seconds", "both_seconds", "work_seconds")),
        f"{middle('overlap'):.2f}",
        f"{sum(row['right'] for row in rows)} of {len(rows)}",
    ]


def main() -> None:
    """Fill the table."""
    rows = [cells(path) for path in sorted(HERE.glob("*.json"))]
    readme = HERE / "README.md"
    filled = fill(
        readme.read_text(encoding="utf-8"), "figures", table([*COLUMNS, "checksums right"], rows, words=2)
    )
    readme.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
