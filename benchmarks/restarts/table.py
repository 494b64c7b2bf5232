"""Fill the tables in README.md and docs/restarts.md from the result: ``python benchmarks/restarts/table.py``."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from bench_harness.markdown import fill, table

HERE = Path(__file__).parent
SCENES = {
    "rank killed": "one host: a rank is killed",
    "rank killed, peer deaf": "the same, and the other heeds no SIGTERM",
    "host killed": "three hosts: one is lost",
    "host back": "it comes back",
}


def figures() -> str:
    """Return the table: a row per scene and launcher."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in json.loads((HERE / "restarts.json").read_text(encoding="utf-8"))["rows"]:
        rows[row["scene"], row["launcher"]].append(row)
    shown = [
        [SCENES[scene], launcher, *_cells(rows[scene, launcher])]
        for scene in SCENES
        for launcher in dict.fromkeys(name for _, name in rows)
        if (scene, launcher) in rows
    ]
    return table(["", "launcher", "ranks started, s", "first step, s", "all, s"], shown, words=2)


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    came = [row for row in rows if row["stepped"] is not None]
    if not came:
        return ["", "never", f"gave up after {median(row['waited'] for row in rows):.0f}"]
    every = ", ".join("never" if row["stepped"] is None else f"{row['stepped']:.1f}" for row in rows)
    return [*(f"{median(row[name] for row in came):.1f}" for name in ("began", "stepped")), every]


def main() -> None:
    """Fill the tables."""
    for path in (HERE / "README.md", HERE.parent.parent / "docs" / "restarts.md"):
        path.write_text(fill(path.read_text(encoding="utf-8"), "figures", figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
