"""What all tests share."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from launchers_table import cells, show, write


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what keeps the table of launchers."""
    parser.addoption("--launchers", metavar="FILE", help="write the table of launchers there, as JSON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, so that two workers end at about the same time."""
    items.sort(key=lambda item: _turn(item.path))


def _turn(path: Path) -> int:
    """Return how early the tests of a file have their turn: by the folder that they are in."""
    tests = Path(__file__).parent
    folder = path.relative_to(tests).parts[0] if path.is_relative_to(tests) else ""
    return _LONG_FIRST.index(folder) if folder in _LONG_FIRST else len(_LONG_FIRST)


_LONG_FIRST = ("launch", "netlab", "ranks", "peers", "cli")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of launchers, and write it if that is asked for, where tests of launchers ran."""
    made = cells(terminalreporter.stats)
    if made:
        terminalreporter.section("launchers")
        terminalreporter.write_line(show(made))
        if config.getoption("--launchers"):
            write(made, Path(config.getoption("--launchers")))


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process, and so all that tests start.

    SIGINT is taken as usual: a shell's background job ignores it. What is kept from run to run is kept elsewhere. No
    example of a property has a time limit.
    """
    settings.register_profile("untimed", settings.default, deadline=None)
    settings.load_profile("untimed")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = tempfile.TemporaryDirectory(prefix="paceline-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CACHE_HOME"] = folder.name
