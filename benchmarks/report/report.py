"""Runs whose report has a finding: a slow rank, a slow network, and the same with the advice followed.

    python benchmarks/report/report.py run             (as root: plays hosts with `paceline.testing.netlab`)
    python benchmarks/report/report.py run --pages     (only the pages of the runs that are there)
    python benchmarks/report/report.py table

Each run is one command (`RUNS`). Their folders lie beside this file without checkpoints, with screenshots of their
pages on a wide screen and on a phone (needs Chromium and playwright).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Annotated

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline._core.format import format_bytes, format_seconds
from paceline.errors import UsageError
from paceline.tools.report.compare.comparison_page import write_comparison
from paceline.tools.report.run.bottleneck import find_bottleneck
from paceline.tools.report.run.run_page import write_run_report
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.run_summary import summarise_run

TRAIN = "paceline train --model mini --micro-batch-size 8 --steps 40 --eval-every 0 --strategy bucketed"
LAB = "paceline lab --nnodes 2 --link 100Mbit/s"
RUNS = {
    "straggler": "paceline train --nproc-per-node 2 --steps 60 --model tiny --micro-batch-size 8",
    "slow-network": f"{LAB} {TRAIN}",
    "slow-network-int8": f"{LAB} {TRAIN} --compression int8",
    "buckets": f"paceline lab --nnodes 2 --link 200Mbit/s {TRAIN} --bucket-mib 2",
}
FAULTS = {"straggler": {"PACELINE_FAULTS": "slow(rank=1, seconds=0.05)"}}
COMPARED = ("slow-network", "slow-network-int8")
KEPT = ("run.json", "settings.json", "steps.jsonl", "trace")
SCREENS = {"desk": {"width": 1100, "height": 900}, "phone": {"width": 390, "height": 844}}

bench = Benchmark(__file__)


@bench.run
def run(
    pages: Annotated[bool, Option("--pages", help="Only write the pages of existing runs.")] = False,
) -> None:
    """Run all, take screenshots of their pages, and keep what the pages are made of."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise UsageError("there is no Chromium on the PATH", remedy="apt-get install chromium")
    for name, command in RUNS.items():
        if pages:
            write_run_report(bench.folder / name)
        else:
            shutil.rmtree(bench.folder / name, ignore_errors=True)
            program, env = [sys.executable, "-m", *command.split()], os.environ | FAULTS.get(name, {})
            subprocess.run([*program, "--out", name], cwd=bench.folder, env=env, check=True)
    write_comparison(*(bench.folder / name for name in COMPARED))
    take_screenshots(chromium)
    for name in RUNS:
        for path in (bench.folder / name).iterdir():
            if path.name not in KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def take_screenshots(chromium: str) -> None:
    """Write PNGs of all pages and of the comparison; of `buckets`, only the chart with the mouse on a bucket."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in RUNS:
            for screen, size in SCREENS.items():
                page = browser.new_page(viewport=size)
                page.goto(Path(bench.folder, name, "report.html").as_uri())
                if name != "buckets":
                    page.screenshot(path=bench.folder / f"{name}-{screen}.png")
                elif screen == "desk":
                    page.locator("#buckets rect.in-transfer").nth(2).hover()
                    page.locator("#buckets").screenshot(path=bench.folder / "buckets.png")
                page.close()
        for screen, size in SCREENS.items():
            page = browser.new_page(viewport=size)
            page.goto(Path(bench.folder, COMPARED[1], f"compare-{COMPARED[0]}.html").as_uri())
            page.screenshot(path=bench.folder / f"compared-{screen}.png")
            page.close()
        browser.close()


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of the runs on a slow network."""
    rows = []
    for name in ("slow-network", "slow-network-int8"):
        records = read_run(bench.folder / name)
        summary = summarise_run(records)
        rows.append(
            [
                f"`{name}`",
                format_seconds(fmean(rank.total for rank in summary.ranks)),
                f"{100 * (summary.exposed_share or 0.0):.0f} %",
                format_bytes(summary.nbytes or 0.0),
                f"{summary.val_loss_last:.3f}",
                find_bottleneck(summary, records.facts).sentences[0].replace("\u00a0", " "),
            ]
        )
    titles = [
        "run",
        "a step",
        "exposed",
        "handed over a step",
        "held-out loss after 40 steps",
        "the page says",
    ]
    return {"runs": table(titles, rows)}


if __name__ == "__main__":
    bench.main()
