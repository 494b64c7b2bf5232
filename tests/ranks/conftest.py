"""Fixtures of tests with rank processes: shared warm ranks, and ranks that may be killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from killable_ranks import KillableRanks
from rank_pool import RankProcesses


@pytest.fixture(scope="session")
def pool() -> Iterator[RankProcesses]:
    """`pool(3)` is a pool of three warm ranks; see rank_pool.py."""
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def killable() -> Iterator[KillableRanks]:
    """`killable.run_ranks(scenario)` runs ranks that may be killed; see killable_ranks.py."""
    warm = KillableRanks()
    yield warm
    warm.close()


@pytest.fixture
def ends() -> Iterator[Callable[..., Any]]:
    """`ends(HubExchange, …)` makes a hub's or worker's exchange that is closed afterwards; see zmq_ends.py."""
    made = []

    def make(kind: Callable[..., Any], *arguments: object, **options: object) -> Any:
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for end in made:
        end.close()
