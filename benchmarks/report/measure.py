"""Runs whose report has something to say: a rank that is slow, a slow network, and the same with the advice followed.

    python benchmarks/report/measure.py
    python benchmarks/report/measure.py pages      # of the runs that are there already

Each run is one command (`RUNS`); hosts are played by `paceline.testing.netlab` (as root, on Linux). Their folders
are left beside this file without checkpoints, with screenshots of their pages, wide and as on a phone (needs
Chromium and playwright).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from paceline.tools.report.run.run_page import write_run_report

HERE = Path(__file__).parent
TRAIN = ["paceline", "train", "--size", "mini", "--batch-size", "8", "--steps", "40", "--eval-every", "0"]
LAB = ["paceline", "lab", "--hosts", "2", "--rate", "100Mbit/s"]
FASTER = [*LAB[:-1], "200Mbit/s"]
RUNS = {
    "straggler": (
        ["paceline", "train", "--ranks", "2", "--steps", "60", "--size", "tiny", "--batch-size", "8"],
        {"PACELINE_FAULTS": "slow(rank=1, seconds=0.05)"},
    ),
    "slow-network": ([*LAB, *TRAIN, "--sync", "bucketed"], {}),
    "slow-network-int8": ([*LAB, *TRAIN, "--sync", "bucketed", "--compression", "int8"], {}),
    "buckets": ([*FASTER, *TRAIN, "--sync", "bucketed", "--bucket-mib", "2"], {}),
}
KEPT = ("run.json", "settings.json", "steps.jsonl", "trace")
SCREENS = {"desk": {"width": 1100, "height": 900}, "phone": {"width": 390, "height": 844}}


def main(*, train: bool) -> None:
    """Run all, or write the pages of the runs that are there; look at the pages, and keep what they are made of."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no Chromium on the PATH: apt-get install chromium")
    for name, (command, faults) in RUNS.items():
        if train:
            shutil.rmtree(HERE / name, ignore_errors=True)
            command = [sys.executable, "-m", *command, "--out", name]
            subprocess.run(command, cwd=HERE, env=os.environ | faults, check=True)
        else:
            write_run_report(HERE / name)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in RUNS:
            for screen, size in SCREENS.items():
                page = browser.new_page(viewport=size)  # pyright: ignore[reportArgumentType]
                page.goto((HERE / name / "report.html").as_uri())
                if name != "buckets":
                    page.screenshot(path=HERE / f"{name}-{screen}.png")
                elif screen == "desk":
                    page.locator("#buckets rect.flying").nth(2).hover()
                    page.locator("#buckets").screenshot(path=HERE / "buckets.png")
                page.close()
        browser.close()
    for name in RUNS:
        for path in (HERE / name).iterdir():
            if path.name not in KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main(train="pages" not in sys.argv[1:])
