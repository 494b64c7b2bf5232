"""What all tests share."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from launchers_table import cells, show, write


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select the whole run and keep the table of launchers."""
    parser.addoption("--all", action="store_true", help="run every test, thorough ones and whole sweeps too")
    parser.addoption("--launchers", metavar="FILE", help="write the table of launchers there, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the short run, unless `--all` or a test by name is given; start long ones first.

    Two workers then end at about the same time.
    """
    if not config.getoption("--all") and not any("::" in str(argument) for argument in config.args):
        left_out = _thorough(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: _turn(item.path))


def _thorough(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that only the whole run has.

    Those are the ones marked ``thorough``, and of each function marked ``sweep`` all cases but the first and the last.
    """
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and item not in left_out:
            cases[item.path, getattr(item, "originalname", item.name)].append(item)
    return left_out.union(*(swept[1:-1] for swept in cases.values()))


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
