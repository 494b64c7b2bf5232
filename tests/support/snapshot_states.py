"""Snapshots that a hub takes, and which of them a folder holds."""

from __future__ import annotations

import torch

from journal_folders import numbers_in
from paceline.async_dp.wal.hub_journal import HubJournal

__all__ = ["names_in", "numbers_of", "snap"]


def snap(journal, revision, count):
    """Take a snapshot of a state that `count` records have gone into."""
    journal.snapshot(revision, {"state": torch.full((3,), float(count))}, {"seen": list(range(count))})


def names_in(folder, begin):
    """Return the revisions of the files whose names begin so."""
    return sorted(
        int(path.name.split("-")[1][:12]) for path in folder.glob(f"{begin}-*") if path.suffix != ".damaged"
    )


def numbers_of(folder):
    with HubJournal.open(folder, resume=True) as journal:
        return numbers_in(journal)
