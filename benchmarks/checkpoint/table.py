"""Fill the tables in README.md and docs/checkpoints.md from disk.json: ``python benchmarks/checkpoint/table.py``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from bench_harness.markdown import fill, table
from paceline._core.format import format_bytes, format_seconds

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "checkpoints.md"


def disk() -> str:
    """Return the table of times, with what they are measured against."""
    found = json.loads((HERE / "disk.json").read_text(encoding="utf-8"))
    first = found["first save"]
    rows = [
        ("training waits for a save", "saves", "stall", "torch.save", "stall / torch.save"),
        ("a save, until it is complete", "saves", "save", "dd", "save / dd"),
        ("loading, every byte checked", "loads", "load", "dd", "load / dd"),
    ]
    shown = []
    for what, turns, ours, theirs, name in rows:
        times = [format_seconds(median(turn[key] for turn in found[turns])) for key in (ours, theirs)]
        ratio = found[name]
        shown.append(
            [
                what,
                times[0],
                f"{theirs} {times[1]}",
                f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            ]
        )
    size, parameters = format_bytes(found["nbytes"]), f"{found['parameters'] / 1e6:.0f} M parameters"
    said = (
        f"{size}: a GPT of {parameters} with AdamW, one process; "
        f"medians of {len(found['saves'])} turns. The first save, which takes its memory, holds training up for "
        f"{format_seconds(first['stall'])}."
    )
    return table(["", "Paceline", "beside it", "ratio (95 % interval)"], shown) + "\n\n" + said


if __name__ == "__main__":
    for path in (HERE / "README.md", DOCS):
        path.write_text(fill(path.read_text(encoding="utf-8"), "disk", disk()), encoding="utf-8")
