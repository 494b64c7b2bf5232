"""Ten tasks of the README's recipes, each done in a fresh clone: clicks, what there is to type, and the time it took.

    python benchmarks/first-steps/recipes.py run
    python benchmarks/first-steps/recipes.py table

Clones the last commit into a temporary folder and installs there with `make .venv/.dev`. For every task it counts the
links from README.md to the recipe, writes the page's files into an empty folder, and runs commands that the page
prints, as they stand. Ends at the first command that fails, or that is not on the page.
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

TASKS = {
    "four-gpus": ["paceline doctor", "paceline run --nproc-per-node 4 train.py"],
    "two-pcs": [
        "paceline plan network --parameters 25M --world-size 2 --link 1Gbit/s --step 0.4s",
        "paceline lab --nnodes 2 --link 1Gbit/s train.py int8",
    ],
    "torchrun-script": ["torchrun --nproc-per-node 2 train.py"],
    "complete-loop": [
        "paceline run --nproc-per-node 2 --max-restarts 3 train.py",
        "paceline report runs/complete",
    ],
    "hugging-face": [
        "paceline run --nproc-per-node 2 train.py",
        "paceline run --nproc-per-node 2 train.py --resume",
    ],
    "lightning": ["torchrun --nproc-per-node 2 train.py"],
    "notebook": ["jupyter execute notebook.ipynb"],
    "uneven-data": ["paceline run --nproc-per-node 3 train.py"],
    "other-hardware": [
        'PACELINE_FAULTS="fail_at(rank=1, step=70)" paceline run --nproc-per-node 4 --max-restarts 0 train.py',
        "paceline run --nproc-per-node 2 train.py",
    ],
    "oneccl": ["torchrun --nproc-per-node 4 train.py"],
}
"""Commands of each recipe; those that fail on purpose inject a fault. A notebook is run as Jupyter would."""

_FILE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

bench = Benchmark(__file__)


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Do the ten tasks."""
    path = bench.output(json_file, "recipes")
    with tempfile.TemporaryDirectory(prefix="paceline-recipes-") as folder:
        clone = Path(folder, "paceline")
        subprocess.run(["git", "clone", "--quiet", str(bench.folder.parents[1]), str(clone)], check=True)
        env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        env["PATH"] = f"{clone / '.venv' / 'bin'}{os.pathsep}{env['PATH']}"
        install = seconds_of(lambda: subprocess.run(["make", ".venv/.dev"], cwd=clone, env=env, check=True))
        tasks = [do(clone, name, Path(folder, name), env) for name in TASKS]
    bench.write(path, "recipes", {}, install_seconds=install, tasks=tasks)


def do(clone: Path, name: str, folder: Path, env: dict[str, str]) -> dict[str, object]:
    """Do a task in an empty folder; return what it took."""
    page = next((clone / "docs" / "recipes").glob(f"{name}.*"))
    text, folder = page.read_text(encoding="utf-8"), folder / "mine"
    folder.mkdir(parents=True)
    for title, code in _FILE.findall(text):
        (folder / title).write_text(code, encoding="utf-8")
    if page.suffix == ".ipynb":
        (folder / page.name).write_text(text, encoding="utf-8")
    seconds = 0.0
    for command in TASKS[name]:
        if page.suffix == ".md" and command not in text:
            sys.exit(f"{command!r} is not on {page.name}")
        print(f"{name} $ {command}", flush=True)
        seconds += seconds_of(lambda command=command: call(command, folder, env))
    return {
        "task": text.partition("\n")[0].removeprefix("# ") if page.suffix == ".md" else "A notebook",
        "page": page.name,
        "clicks": clicks_to(clone, page),
        "characters": sum(map(len, TASKS[name])),
        "seconds": seconds,
    }


def call(command: str, folder: Path, env: dict[str, str]) -> None:
    """Run a command, and exit if it fails without an injected fault."""
    status = subprocess.run(command, shell=True, cwd=folder, env=env).returncode
    if (status != 0) != ("PACELINE_FAULTS" in command):
        sys.exit(f"{command!r} ended with exit code {status}")


def clicks_to(clone: Path, page: Path) -> int:
    """Return the number of links to follow from README.md to a page: 1 or 2, or exit."""
    front = clone / "README.md"
    if page in links_of(front):
        return 1
    if any(page in links_of(each) for each in links_of(front) if each.suffix == ".md" and each.is_file()):
        return 2
    sys.exit(f"{page.name} is more than two clicks from README.md")


def links_of(page: Path) -> set[Path]:
    """Return the files of the repository that a page links to."""
    targets = re.findall(r"\]\(([^()\s#:]+)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets}


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md."""
    result = bench.read("recipes")
    rows = [
        [f"[{each['task']}](../../docs/recipes/{each['page']})"]
        + [str(each["clicks"]), str(each["characters"]), format_seconds(each["seconds"])]
        for each in result["tasks"]
    ]
    rows.append(["installing, once", "", "", format_seconds(result["install_seconds"])])
    return {"recipes": table(["task", "clicks from the README", "characters of commands", "they took"], rows)}


if __name__ == "__main__":
    bench.main()
