"""Measurements on the hosts of a lab: the lab with a folder and a progress bar, results of processes, waiting."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from paceline.testing.netlab import Lab, LabJob
from paceline.tools.bench.progress_bar import ProgressBar

__all__ = ["RESULT", "host_number", "open_lab", "read_json", "results", "wait_for"]

T = TypeVar("T")

RESULT = "result "
"""Begins the line of output that holds what a process returned (`Benchmark.process`)."""


@contextmanager
def open_lab(
    hosts: int, rate: str | None = None, *, title: str, turns: int
) -> Iterator[tuple[Lab, Path, Callable[[], None]]]:
    """Yield a lab, an empty folder that its hosts share, and the function that counts a turn in a progress bar."""
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        Lab(hosts, rate) as lab,
        ProgressBar(title, turns) as tick,
    ):
        yield lab, Path(folder), tick


def results(job: LabJob, timeout: float | None = None) -> list[Any]:
    """Wait for a job of `Benchmark.command`, and return what its function returned, by host; None is left out.

    Raises:
        HostFailed: it failed on a host, or time was up.
    """
    lines = [line for each in job.wait(timeout) for line in each.stdout.splitlines()]
    return [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]


def wait_for(
    condition: Callable[[], T | None], jobs: Sequence[LabJob], *, timeout: float = 120.0, poll: float = 0.01
) -> T:
    """Return what `condition` returns once that is true.

    Args:
        condition: called every `poll` seconds.
        jobs: whose output the error shows.

    Raises:
        TimeoutError: it was not true within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            output = "\n".join(line for job in jobs for _, line in job.lines())
            raise TimeoutError(f"not ready within {timeout:g} s; output of the hosts:\n{output}")
        time.sleep(poll)
    return found


def host_number() -> int:
    """Return the number of the lab host that this process runs on."""
    return int(socket.gethostname().removeprefix("host"))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
