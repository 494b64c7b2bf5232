"""Fill the table in README.md and docs/drift.md from the result: ``python benchmarks/drift/table.py``."""

from __future__ import annotations

import json
from pathlib import Path

from bench_harness.markdown import fill, table

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "drift.md"


def cost() -> str:
    """Return the table of steps with and without."""
    rows = []
    for row in json.loads((HERE / "cost.json").read_text(encoding="utf-8"))["rows"]:
        for name, ms in row["step_ms"].items():
            ratio = row["ratio"].get(name)
            shown = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else ""
            rows.append([row["strategy"], name, f"{ms:.1f}", shown])
    return table(["strategy", "hooked on", "step, ms", "÷ neither (95 % interval)"], rows)


def alone() -> str:
    """Return a sentence about hashing and measuring by themselves."""
    rows = json.loads((HERE / "cost.json").read_text(encoding="utf-8"))["rows"]
    hashed, measured = (max(row[name] for row in rows) for name in ("hash_ms", "peak_ms"))
    step = min(row["step_ms"]["neither"] for row in rows)
    return (
        f"By themselves, hashing {rows[0]['compared_mb']:.0f} MB of parameters takes {hashed:.1f} ms "
        f"({hashed / step / 200:.3%} of the time, after every 200th step), and measuring as\nmany bytes of gradients "
        f"{measured:.1f} ms ({measured / step:.1%} of a step)."
    )


def main() -> None:
    """Fill the tables."""
    for file in (HERE / "README.md", DOCS):
        text = fill(file.read_text(encoding="utf-8"), "cost", cost())
        file.write_text(fill(text, "alone", alone()), encoding="utf-8")


if __name__ == "__main__":
    main()
