"""Options, markers and the environment of all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

import simulated_accelerator
from launchers_table import cells, show, write
from rank_pool import RankProcesses


@pytest.fixture(scope="module")
def browser():
    """Chromium, started anew for each file: an event loop of Playwright runs in this thread as long as it lives."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium on the PATH")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def simulated_pool() -> Iterator[RankProcesses]:
    """`simulated_pool(2)` is a pool of two ranks with device "sim"; see simulated_accelerator."""
    processes = RankProcesses(prepare=simulated_accelerator.register)
    yield processes
    processes.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select the whole run and keep the table of launchers."""
    parser.addoption("--all", action="store_true", help="run every test, thorough ones and whole sweeps too")
    parser.addoption("--launchers", metavar="FILE", help="write the table of launchers there, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the short run; `--all` and tests by name keep everything.

    Tests that take long start first, so that two workers end at about the same time.
    """
    if not config.getoption("--all") and not any("::" in str(argument) for argument in config.args):
        thorough = _thorough(items)
        config.hook.pytest_deselected(items=list(thorough))
        items[:] = [item for item in items if item not in thorough]
    items.sort(key=lambda item: _turn(item.path))


def pytest_collection_finish() -> None:
    """Exclude what collecting made from garbage collections, which would pass over ten thousand tests each time."""
    gc.collect()
    gc.freeze()


def _thorough(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that the short run leaves out.

    Those are the ones marked ``thorough``, and all cases but the first and the last of each one marked ``sweep``.
    """
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and item not in left_out:
            cases[item.path, getattr(item, "originalname", item.name)].append(item)
    return left_out.union(*(swept[1:-1] for swept in cases.values()))


def _turn(path: Path) -> int:
    """Return the position of a file's tests in the order, by their folder."""
    tests = Path(__file__).parent
    folder = path.relative_to(tests).parts[0] if path.is_relative_to(tests) else ""
    return _LONG_FIRST.index(folder) if folder in _LONG_FIRST else len(_LONG_FIRST)


_LONG_FIRST = ("launch", "netlab", "ranks", "peers", "cli")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of launchers if tests of launchers ran, and write it to the file given by `--launchers`."""
    made = cells(terminalreporter.stats)
    if made:
        terminalreporter.section("launchers")
        terminalreporter.write_line(show(made))
        if config.getoption("--launchers"):
            write(made, Path(config.getoption("--launchers")))


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process and its children.

    SIGINT interrupts as usual (a shell's background job ignores it), caches go to a temporary folder, and Hypothesis
    has no deadline per example. Processes compute in one thread: two files run at a time, most with several ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings.register_profile("untimed", settings.default, deadline=None)
    settings.load_profile("untimed")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = tempfile.TemporaryDirectory(prefix="paceline-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CACHE_HOME"] = folder.name
