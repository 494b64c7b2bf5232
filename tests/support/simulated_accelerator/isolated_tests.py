"""Runs tests in processes of their own, as a process that has registered a device can't fork after gradients.

A conftest.py that imports `pytest_pyfunc_call` from here runs all tests of its folder so. Their arguments must be
picklable, so fixtures that set up something in pytest's process do not help them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["pytest_pyfunc_call"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call a test in the only rank of the fixture `simulated_pool`."""
    pool = pyfuncitem._request.getfixturevalue("simulated_pool")
    names = pyfuncitem._fixtureinfo.argnames
    pool(1).run(_call, pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names}, world=False)
    return True


def _call(rank: int, size: int, test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    test(**arguments)
