"""What all tests share."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take SIGINT as usual, here and in all processes that tests start: a shell's background job ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
