"""What ranks announce to each other about their next batches of a stream, in one row per process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from paceline.data.iterable_sharding import StreamBatch
from paceline.data.rank_place import RankPlace
from paceline.world.control_collectives import PendingRows, gather_rows_async

__all__ = ["FAILED", "Announcement", "announce", "read_announcements"]

FAILED = -1


class Announcement(NamedTuple):
    """A rank's next batch: whether it has one, its worker and number of samples, and `StreamBatch.first`."""

    has: int = 0  # 1, 0, or FAILED
    worker: int = 0
    samples: int = 0
    first: int = 0


def announce(
    batches: Sequence[StreamBatch | None], place: RankPlace, group: ProcessGroup | None, *, failed: bool
) -> PendingRows:
    """Announce the next batches of this process's ranks, in a row as long as all others'.

    Args:
        batches: one of each rank that this process serves; None: it has no more.
        place: these ranks.
        group: all processes.
        failed: they could not be loaded.
    """
    own = [
        Announcement() if batch is None else Announcement(1, batch.worker, batch.samples, batch.first)
        for batch in batches
    ]
    if failed:
        own = [Announcement(FAILED)] * len(own)
    own += [Announcement()] * (place.most_own - len(own))
    return gather_rows_async(torch.tensor(own, dtype=torch.int64).reshape(-1), group)


def read_announcements(pending: PendingRows, place: RankPlace) -> list[Announcement]:
    """Return the announcement of each rank, with virtual ranks of each of these."""
    found: list[Announcement] = []
    for rank, row in enumerate(pending.wait()):
        each = row.reshape(place.most_own, -1).tolist()
        found += [Announcement(*map(int, one)) for one in each[: len(place.own_of(rank))]]
    return found
