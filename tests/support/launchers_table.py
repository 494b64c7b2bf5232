"""Table of launchers: the results of the tests marked ``@pytest.mark.launcher(name, what)``, a cell each.

It is built from the reports of the session, so that it does not depend on the number of pytest processes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from typing import Any

from bench_harness.markdown import table
from paceline._core.files import write_json

__all__ = ["cells", "show", "write"]

_WORSE_LAST = ("skipped", "yes", "failed")
_OUTCOMES = {"passed": "yes", "failed": "failed", "error": "failed", "skipped": "skipped"}
Cells = dict[str, dict[str, str]]


def cells(stats: Mapping[str, Iterable[Any]]) -> Cells:
    """Return the result of each cell: ``yes``, ``failed`` or ``skipped``, the worst of several tests.

    A skipped test does not change the result of one that passed.
    """
    made: Cells = {}
    for outcome, word in _OUTCOMES.items():
        for report in stats.get(outcome, ()):
            for key, value in getattr(report, "user_properties", ()):
                if key == "launcher" and (report.when == "call" or word != "yes"):
                    name, what = value
                    row = made.setdefault(name, {})
                    row[what] = max(row.get(what, word), word, key=_WORSE_LAST.index)
    return made


def show(made: Cells) -> str:
    """Return the table as Markdown: a row for each launcher."""
    columns = sorted({what for row in made.values() for what in row})
    rows = [[name, *(row.get(what, "not tried") for what in columns)] for name, row in sorted(made.items())]
    return table(["", *columns], rows, words=1 + len(columns))


def write(made: Cells, path: Path) -> None:
    """Write the sorted table, and the versions of the launchers."""
    cells = {name: dict(sorted(row.items())) for name, row in sorted(made.items())}
    write_json(path, {"kind": "launchers", "cells": cells, "versions": _versions()})


def _versions() -> dict[str, str]:
    packages = {"torchrun": "torch", "Ray": "ray", "MPI": "mpich"}
    found: dict[str, str] = {}
    for name, package in packages.items():
        try:
            found[name] = f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    slurm = which("slurmctld", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if slurm is not None:
        found["Slurm"] = subprocess.run([slurm, "-V"], capture_output=True, text=True).stdout.strip()
    return found
