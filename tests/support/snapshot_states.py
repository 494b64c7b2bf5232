"""Takes snapshots, and lists those in a folder."""

from __future__ import annotations

import torch

from journal_folders import numbers_in
from paceline.async_dp.wal.hub_journal import HubJournal

__all__ = ["open_and_read", "revisions_in", "snap"]


def snap(journal, revision, count):
    """Take a snapshot that includes `count` records."""
    journal.snapshot(revision, {"state": torch.full((3,), float(count))}, {"seen": list(range(count))})


def revisions_in(folder, begin):
    """Return the revisions of the files with this beginning of the name."""
    return sorted(
        int(path.name.split("-")[1][:12]) for path in folder.glob(f"{begin}-*") if path.suffix != ".damaged"
    )


def open_and_read(folder):
    with HubJournal.open(folder, resume=True) as journal:
        return numbers_in(journal)
