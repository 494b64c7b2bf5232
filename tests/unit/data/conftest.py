"""Fixtures of the loader's tests."""

from __future__ import annotations

import pytest

from paceline.data import loader as loader_module


@pytest.fixture
def as_rank(monkeypatch):
    """`as_rank(1, 3)`: what is created now is on rank 1 of 3; ranks that serve map-style data need nothing else."""

    def pretend(rank, ranks):
        monkeypatch.setattr(loader_module, "rank_and_size", lambda group=None: (rank, ranks))
        monkeypatch.setattr(loader_module, "verify_same", lambda *args, **options: None)

    return pretend
