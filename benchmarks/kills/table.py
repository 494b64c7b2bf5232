"""Fill the table in README.md from kills.json: ``python benchmarks/kills/table.py``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from bench_harness.markdown import fill, table

HERE = Path(__file__).parent


def kills() -> str:
    """Return the table of kinds of kills, and what came of the runs."""
    found = json.loads((HERE / "kills.json").read_text(encoding="utf-8"))
    runs = found["runs"]
    rows = [[kind, str(number)] for kind, number in Counter(found["by kind"]).most_common()]
    rows.append(["**in all**", f"**{found['kills']}**"])
    same = sum(run["same weights"] for run in runs)
    once = sum(run["every sample once"] for run in runs)
    again = sum(run["started again"] for run in runs)
    said = (
        f"Of {len(runs)} runs {len(runs)} ended; {same} with the same weights, {once} with every sample used once. "
        f"{again} times the command was given again."
    )
    return table(["killed", "times"], rows) + "\n\n" + said


if __name__ == "__main__":
    page = HERE / "README.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), "kills", kills()), encoding="utf-8")
