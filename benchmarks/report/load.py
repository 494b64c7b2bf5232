"""Size and load time of the page of a long run.

python benchmarks/report/load.py [STEPS]        (default 100,000; needs Chromium and playwright)
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from paceline.tools.report.run.run_page import write_run_report

SCREENS = {"desk": {"width": 1100, "height": 900}, "phone": {"width": 390, "height": 844}}
PHASES = [["data", 0], ["forward", 1000], ["backward", 43000], ["exchange", 124000], ["optimizer", 136000]]


def write_long_run(folder: Path, steps: int) -> None:
    """Write the record of a run of so many steps on two ranks."""
    (folder / "trace").mkdir()
    (folder / "run.json").write_text("{}")
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            numbers = {"loss": 1.5 + 4 / step**0.5, "tokens_per_second": 27000.0, "lr": 1e-3}
            file.write(json.dumps({"step": step, "step_seconds": 0.147, **numbers}) + "\n")
    call = ["reduce", 0, 26_248_000, 26_248_000, 124000, 124000, 124000, 136000, 136000]
    for rank in range(2):
        with (folder / "trace" / f"rank{rank}.jsonl").open("w") as file:
            for step in range(steps):
                place = {"name": "step", "start": 1.8e9 + 0.147 * step, "seconds": 0.147, "rank": rank}
                what = {"phases": PHASES, "waits": [[0, 124000, 136000]], "tasks": [], "calls": [call]}
                file.write(json.dumps({**place, "step": step, **what}) + "\n")


def load_seconds(page_file: Path, screen: str, times: int = 7) -> float:
    """Return the median time from opening a page until its charts are drawn, in a real browser."""
    from playwright.sync_api import sync_playwright

    seconds = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(times):
            page = browser.new_page(viewport=SCREENS[screen])
            page.goto(page_file.as_uri())
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            seconds.append(page.evaluate("performance.now()") / 1e3)
            page.close()
        browser.close()
    return median(seconds)


def main() -> None:
    """Write the run and its page, and print sizes and times."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        write_long_run(Path(folder), steps)
        since = time.process_time()
        page = write_run_report(Path(folder)).resolve()
        print(
            f"written in {time.process_time() - since:.1f} s of processor time, {page.stat().st_size:,} bytes"
        )
        for screen in SCREENS:
            print(f"{screen}: loaded and drawn in {load_seconds(page, screen):.2f} s (median)")


if __name__ == "__main__":
    main()
