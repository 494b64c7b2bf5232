"""torchrun on every host of a lab: the command line of each, and what it says when a rank fails (pure)."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.lab.program import is_python
from paceline.lab.star import address_of

__all__ = ["is_failure_report", "torchrun_command", "without_report"]

_LOOK_SECONDS = (
    0.05  # how often torchrun looks whether a rank has failed: who failed first shall be seen first
)
_REPORT = re.compile(r"E\d{4} .*torch/distributed/elastic/.*\] failed \(exitcode: ")


def torchrun_command(
    program: Sequence[str], *, node: int, nodes: int, ranks_per_host: int, master: int, port: int
) -> list[str]:
    """Return the command that runs `program` as the ranks of one host.

    Args:
        program: a Python script (its name ends with .py), ``-m`` and a module, or any command; then its arguments.
        node: number of this host among those that take part.
        nodes: how many take part.
        ranks_per_host: processes on each.
        master: the host of rank 0.
        port: a free one there.

    Raises:
        UsageError: fewer than one rank.
    """
    if ranks_per_host < 1:
        raise UsageError(
            f"ranks_per_host={ranks_per_host}: at least 1", remedy="give how many processes a host runs"
        )
    options = {
        "--nnodes": nodes,
        "--node-rank": node,
        "--nproc-per-node": ranks_per_host,
        "--master-addr": address_of(master),
        "--master-port": port,
        "--monitor-interval": _LOOK_SECONDS,
    }
    told = [f"{name}={value}" for name, value in options.items()]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *told,
        *([] if is_python(program) else ["--no-python"]),
        *program,
    ]


def is_failure_report(line: str) -> bool:
    """Return whether torchrun says with this line that a rank failed; forty lines of its own follow."""
    return _REPORT.match(line) is not None


def without_report(text: str) -> str:
    """Return what ranks wrote, without what torchrun adds when one fails but the line that says so."""
    lines = text.splitlines()
    end = next((number + 1 for number, line in enumerate(lines) if is_failure_report(line)), len(lines))
    return "\n".join(lines[:end])
