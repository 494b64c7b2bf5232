"""The warm ranks that all process tests share, and the process that forks those that may be killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nursery import Nursery
from pool import Staff


@pytest.fixture(scope="session")
def pool() -> Iterator[Staff]:
    """`pool(3)` is a pool of three warm ranks; see pool.py."""
    staff = Staff()
    yield staff
    staff.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """`nursery.play(scene)` runs a scene of ranks that may be killed; see nursery.py."""
    warm = Nursery()
    yield warm
    warm.close()
