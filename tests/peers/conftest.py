"""Fixtures: the warm ranks of tests/ranks; the option --full, which runs all of torch's suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import record

from rank_pool import RankProcesses
from world_entry import torchrun_variables


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full; known where tests/peers is named on the command line."""
    parser.addoption("--full", action="store_true", help="run all of torch's suite, on 2, 3 and 4 ranks")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the results of a full run into the README."""
    if config.getoption("--full", default=False):
        record.write(terminalreporter.stats)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankProcesses]:
    """`pool(3)` is a pool of three warm ranks; see tests/support/rank_pool.py."""
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture
def rank_environments() -> Callable[[int], list[dict[str, str]]]:
    """Return a function: `rank_environments(2)` is the environment that torchrun gives two ranks, with a free port."""
    return torchrun_variables
