"""Fixtures of launcher tests: the training that they start, and its final weights without failures.

Each such test names its cell in the table of launchers: ``@pytest.mark.launcher("Slurm", "finishes")``; the table is
printed at the end of the session (`launchers_table`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from notes import STEPS, TRAINING, Notes

from paceline.launch.process.local_ranks import run_ranks
from paceline.testing.netlab import Lab, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the reports of tests carry their cell, to wherever the table is made."""
    for item in items:
        for mark in item.iter_markers("launcher"):
            item.user_properties.append(("launcher", tuple(mark.args)))


@pytest.fixture(autouse=True)
def launch_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One thread for each rank, no colours, this Python's scripts first on the PATH; temporary files here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="session")
def expected_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the final weights of two ranks without failures."""
    notes = Notes(tmp_path_factory.mktemp("undisturbed"))
    run_ranks(
        [str(TRAINING), str(notes.folder), str(STEPS), "0"], 2, env={"OMP_NUM_THREADS": "1"}, timeout=120
    )
    return notes.digest()


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    """Return the records of the ranks of a test's training, in a folder whose name needs quoting."""
    folder = tmp_path / 'it\'s a "run" 100%'
    folder.mkdir()
    return Notes(folder)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts."""
    problem = missing()
    if problem is not None:
        pytest.skip(str(problem).replace("\n", " "))
    with Lab(hosts=2) as made:
        yield made
