"""The manual's first page, followed: every command of it, in order, in a fresh clone, with the time it took.

    python benchmarks/first-steps/first_steps.py run
    python benchmarks/first-steps/first_steps.py table

Clones the last commit into a temporary folder and runs there each line of docs/README.md's "First steps" that
begins with `$`, as it stands; the first one installs everything. Ends at the first command that fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import seconds_of
from paceline._core.format import format_seconds
from paceline.tools.cli.shared_options import JsonOption

bench = Benchmark(__file__)


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Follow the page."""
    path = bench.output(json_file, "first-steps")
    steps = []
    with tempfile.TemporaryDirectory(prefix="paceline-first-") as folder:
        clone = Path(folder, "paceline")
        subprocess.run(["git", "clone", "--quiet", str(bench.folder.parents[1]), str(clone)], check=True)
        env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        env["PATH"] = f"{clone / '.venv' / 'bin'}{os.pathsep}{env['PATH']}"

        def call(command: str) -> None:
            if status := subprocess.run(command, shell=True, cwd=clone, env=env).returncode:
                sys.exit(f"{command!r} ended with exit code {status}")

        page = Path(clone, "docs/README.md").read_text(encoding="utf-8")
        section = page.partition("## First steps\n")[2].partition("\n## ")[0]
        for command in re.findall(r"^\$ (.+)$", section, re.MULTILINE):
            print(f"$ {command}", flush=True)
            steps.append({"command": command, "seconds": seconds_of(lambda command=command: call(command))})
    bench.write(path, "first-steps", {}, steps=steps)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md."""
    steps = bench.read("first-steps")["steps"]
    rows = [[f"`{step['command']}`", format_seconds(step["seconds"])] for step in steps]
    total = format_seconds(sum(step["seconds"] for step in steps))
    return {"steps": table(["command", "took"], [*rows, ["all of it", total]])}


if __name__ == "__main__":
    bench.main()
