"""Fill the tables in README.md and docs/failures.md from the results: ``python benchmarks/watch/table.py``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from bench_harness.markdown import fill, table
from paceline._core.format import format_seconds

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "failures.md"


def read(name: str) -> dict[str, Any]:
    """Return the result of that name."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def naming() -> str:
    """Return the table of seconds from fault to naming."""
    rows = []
    for row in read("naming")["rows"]:
        seconds = [each for run in row["runs"] for each in run["seconds"]]
        named = [each for run in row["runs"] for each in run["named"]]
        freed = [each for run in row["runs"] for each in run["freed"]]
        kinds = Counter(kind for run in row["runs"] for kind in run["kinds"])
        rows.append(
            [
                row["fault"],
                row["backend"],
                ", ".join(map(str, kinds)),
                f"{sum(named)} of {len(named)}",
                f"{sum(freed)} of {len(freed)}",
                f"{median(seconds):.2f}",
                f"{max(seconds):.2f}",
            ]
        )
    columns = ["fault", "backend", "named as", "rightly named", "freed", "median, s", "longest, s"]
    return table(columns, rows, words=3)


def overhead() -> str:
    """Return what being watched costs, as a table of one row."""
    found = read("overhead")
    ratio, pairs = found["ratio"], found["pairs"]
    alone = [_ratio_of_pair(each["seconds"]) for each in pairs]
    row = [
        format_seconds(found["step_seconds"]["without"]),
        f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
        f"{min(alone):.3f} to {max(alone):.3f}",
        f"{found['core_share']:.2%}",
        format_seconds(found["begin_seconds"]),
    ]
    columns = [
        "a step, not watched",
        "watched ÷ not (95 % interval)",
        "in single pairs of processes",
        "of a core, the watcher",
        "noting a phase",
    ]
    return table(columns, [row], words=0)


def _ratio_of_pair(seconds: dict[str, list[float]]) -> float:
    return median(a / b for a, b in zip(seconds["with"], seconds["without"], strict=True))


def main() -> None:
    """Fill the tables."""
    for path in (HERE / "README.md", DOCS):
        text = path.read_text(encoding="utf-8")
        for name, block in (("naming", naming()), ("overhead", overhead())):
            text = fill(text, name, block)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
