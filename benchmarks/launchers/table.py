"""Fill the tables in README.md and docs/launchers.md: ``python benchmarks/launchers/table.py``."""

from __future__ import annotations

import json
from pathlib import Path

from bench_harness.markdown import fill, table

HERE = Path(__file__).parent
ROWS = ("torchrun", "Slurm", "Ray", "MPI")
COLUMNS = ("finishes", "killed and resumed")


def outcomes() -> str:
    """Return the table: a row per launcher."""
    result = json.loads((HERE / "launchers.json").read_text(encoding="utf-8"))
    rows = [
        [
            name,
            result["versions"].get(name, ""),
            *(result["cells"].get(name, {}).get(what, "") for what in COLUMNS),
        ]
        for name in ROWS
    ]
    return table(["", "version", *COLUMNS], rows, words=4)


def main() -> None:
    """Fill the tables."""
    for path in (HERE / "README.md", HERE.parent.parent / "docs" / "launchers.md"):
        path.write_text(fill(path.read_text(encoding="utf-8"), "launchers", outcomes()), encoding="utf-8")


if __name__ == "__main__":
    main()
