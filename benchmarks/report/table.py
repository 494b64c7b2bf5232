"""Write what the runs on a slow network came to into README.md.

    python benchmarks/report/table.py

Reads the folders that `measure.py` left. No figure there is typed by hand.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from bench_harness.markdown import fill, table
from paceline._core.format import format_bytes, format_seconds
from paceline.tools.report.run.bottleneck import find_bottleneck
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.run_summary import summarise_run

HERE = Path(__file__).parent
RUNS = ("slow-network", "slow-network-int8")
HEAD = ["run", "a step", "exposed", "handed over a step", "held-out loss after 40 steps", "the page says"]


def row(name: str) -> list[str]:
    """Return the cells of a run."""
    run = read_run(HERE / name)
    summary = summarise_run(run)
    seconds = fmean(rank.total for rank in summary.ranks)
    said = find_bottleneck(summary, run.facts).sentences[0]
    return [
        f"`{name}`",
        format_seconds(seconds),
        f"{100 * (summary.exposed_share or 0.0):.0f} %",
        format_bytes(summary.nbytes or 0.0),
        f"{summary.val_loss_last:.3f}",
        said.replace("\u00a0", " "),
    ]


def main() -> None:
    """Fill the table."""
    readme = HERE / "README.md"
    text = fill(readme.read_text(encoding="utf-8"), "runs", table(HEAD, [row(name) for name in RUNS]))
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
