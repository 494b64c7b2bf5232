"""The warm ranks that all process tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Staff


@pytest.fixture(scope="session")
def pool() -> Iterator[Staff]:
    """`pool(3)` is a pool of three warm ranks; see pool.py."""
    staff = Staff()
    yield staff
    staff.close()
