"""Fixtures: the warm ranks of tests/ranks; the option --full, which runs all of torch's suite."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import record

from rank_pool import RankProcesses


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

    def variables(size: int) -> list[dict[str, str]]:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        local = {"LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
        return [shared | local | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]

    return variables
