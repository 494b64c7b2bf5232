"""Fill the table in README.md and docs/failures.md from failover.json: ``python benchmarks/failover/table.py``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from bench_harness.markdown import fill, table

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "failures.md"


def failover() -> str:
    """Return the table of times by fault."""
    rows = []
    for name, runs in json.loads((HERE / "failover.json").read_text(encoding="utf-8"))["rows"].items():
        named = [seconds for run in runs for seconds in run["named after"]]
        rightly = [right for run in runs for right in run["rightly"]]
        after = [run["first step after"] for run in runs]
        rows.append(
            [
                name,
                f"{sum(rightly)} of {2 * len(runs)}",
                f"{median(named):.1f} (at most {max(named):.1f})",
                f"{median(after):.1f} (at most {max(after):.1f})",
                ", ".join(sorted({str(run["ranks after"]) for run in runs})),
                "all" if all(run["every sample once"] for run in runs) else "no",
                f"{max(run['largest difference of a weight'] for run in runs):.0e}",
            ]
        )
    columns = ["one host", "named", "named, s", "goes on, s", "on hosts", "samples once", "difference"]
    return table(columns, rows)


if __name__ == "__main__":
    for path in (HERE / "README.md", DOCS):
        if path.exists():
            path.write_text(fill(path.read_text(encoding="utf-8"), "failover", failover()), encoding="utf-8")
