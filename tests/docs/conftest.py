"""Fixture: the warm ranks of tests/ranks, for recipes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rank_pool import RankProcesses


@pytest.fixture(scope="session")
def pool() -> Iterator[RankProcesses]:
    """`pool(3)` is a pool of three warm ranks; see tests/support/rank_pool.py."""
    processes = RankProcesses()
    yield processes
    processes.close()
