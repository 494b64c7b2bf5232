"""The manual's first page, followed: every command of it, in order, in a fresh clone, with the time it took.

    python benchmarks/first-steps/measure.py

Clones what is committed here into a temporary folder and runs there each line of docs/README.md's "Start in 5 minutes"
that begins with `$`, as it stands; the first one installs everything. Writes ``first-steps.json`` and the table of
README.md beside this file; ends at the first command that fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_harness.markdown import fill, table
from paceline._core.files import write_json, write_text
from paceline._core.format import format_seconds
from paceline.tools.result_files import result_head

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def commands(page: str) -> list[str]:
    """Return the commands of the first page's first section, in order."""
    section = page.partition("## Start in 5 minutes\n")[2].partition("\n## ")[0]
    return re.findall(r"^\$ (.+)$", section, re.MULTILINE)


def follow(clone: Path) -> list[dict[str, object]]:
    """Run the commands in `clone` and return each with its seconds."""
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env["PATH"] = f"{clone / '.venv' / 'bin'}{os.pathsep}{env['PATH']}"
    done: list[dict[str, object]] = []
    for command in commands((clone / "docs" / "README.md").read_text(encoding="utf-8")):
        print(f"$ {command}", flush=True)
        started = time.perf_counter()
        status = subprocess.run(command, shell=True, cwd=clone, env=env).returncode
        done.append({"command": command, "seconds": time.perf_counter() - started})
        if status:
            sys.exit(f"{command!r} ended with exit code {status}")
    return done


def main() -> None:
    """Follow the page, and write what it took."""
    with tempfile.TemporaryDirectory(prefix="paceline-first-") as folder:
        clone = Path(folder, "paceline")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        done = follow(clone)
    write_json(HERE / "first-steps.json", result_head("first-steps") | {"steps": done})
    seconds = [float(str(step["seconds"])) for step in done]
    rows = [[f"`{step['command']}`", format_seconds(took)] for step, took in zip(done, seconds, strict=True)]
    block = table(["command", "took"], [*rows, ["all of it", format_seconds(sum(seconds))]])
    readme = HERE / "README.md"
    write_text(readme, fill(readme.read_text(encoding="utf-8"), "steps", block))


if __name__ == "__main__":
    main()
