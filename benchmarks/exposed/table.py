"""Write what was found into the tables of README.md.

    python benchmarks/exposed/table.py

Reads ``exposed.json`` and ``exposed-epyc.json`` beside this file. No figure there is typed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from bench_harness.markdown import fill, table
from bench_harness.turns import ratio_of
from paceline._core.files import write_text

HERE = Path(__file__).parent
HEAD = [
    "model",
    "ranks",
    "links",
    "backend",
    "strategy",
    "step, ms",
    "without synchronisation, ms",
    "difference, ms",
    "exposed as reported, ms",
    "reported ÷ difference",
    "recorded ÷ not recorded",
]


def row(case: dict[str, Any]) -> list[str]:
    """Return the cells of a case; quiet steps are left out, as in the report."""
    seconds, quiet = case["seconds"], case["quiet_rounds"]
    usual = [turn for turn, is_quiet in enumerate(quiet) if not is_quiet]
    recorded, bare, synced = (
        [seconds[kind][turn] for turn in usual] for kind in ("recorded", "bare", "synced")
    )
    cost = fmean(recorded) - fmean(bare)
    ratio = ratio_of(recorded, synced)
    bucket = f", {case['bucket_mib']:g} MiB" if case["bucket_mib"] else ""
    milliseconds = (fmean(recorded), fmean(bare), cost, case["exposed_seconds"])
    return [
        case["model"],
        str(case["ranks"]),
        case["rate"] or "one host",
        case["backend"],
        case["strategy"] + bucket,
        *(f"{1e3 * each:.1f}" for each in milliseconds),
        f"{case['exposed_seconds'] / cost:.3f}",
        f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
    ]


def main() -> None:
    """Fill a table for each result."""
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name in ("exposed", "exposed-epyc"):
        cases = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))["cases"]
        text = fill(text, name, table(HEAD, [row(case) for case in cases], words=5))
    write_text(readme, text)


if __name__ == "__main__":
    main()
