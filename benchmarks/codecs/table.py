"""Fill the table in README.md from the result: ``python benchmarks/codecs/table.py``."""

from __future__ import annotations

import json
from pathlib import Path

from bench_harness.markdown import fill, table

HERE = Path(__file__).parent


def speed() -> str:
    """Return the table of all codecs: GB of float32 a second, and how much longer the plain formulation takes."""
    rows: dict[str, list[str]] = {}
    for row in json.loads((HERE / "speed.json").read_text(encoding="utf-8"))["rows"]:
        cells = rows.setdefault(row["name"], [row["name"], f"{row['ratio']:.2f}"])
        plain = row["times_ours"]["plain"]
        cells += [f"{row['gb_per_s']['ours']:.1f}", f"{plain['median']:.1f}"]
    columns = ["codec", "times smaller"]
    for work in ("compress", "decompress", "add"):
        columns += [f"{work}, GB/s", "plain ÷ ours"]
    return table(columns, list(rows.values()))


def copying() -> str:
    """Return a sentence about copying, in the same turns."""
    rows = json.loads((HERE / "speed.json").read_text(encoding="utf-8"))["rows"]
    rates = [row["gb_per_s"]["copy"] for row in rows]
    return f"Copying the numbers, in the same turns: {min(rates):.1f} to {max(rates):.1f} GB/s."


def chunks() -> str:
    """Return the table of int8 in chunks of other sizes."""
    result = json.loads((HERE / "speed.json").read_text(encoding="utf-8"))
    rates = result["chunks"]["gb_per_s"]
    sizes = [
        f"**{1 << int(log2):,}**" if 1 << int(log2) == result["settings"]["chunk"] else f"{1 << int(log2):,}"
        for log2 in rates
    ]
    return table(
        ["numbers in a chunk", *sizes],
        [["int8, compress, GB/s", *(f"{rate:.1f}" for rate in rates.values())]],
    )


def main() -> None:
    """Fill the places."""
    file = HERE / "README.md"
    text = fill(file.read_text(encoding="utf-8"), "speed", speed())
    text = fill(text, "copying", copying())
    file.write_text(fill(text, "chunks", chunks()), encoding="utf-8")


if __name__ == "__main__":
    main()
