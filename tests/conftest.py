"""What all tests share."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest
from hypothesis import settings


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
