"""Gathering receipts: every rank leaves its notes in the group's store, and the root reads them.

A store needs no counterpart: a rank writes and goes on, whatever became of the others, and the root knows after a
time whose notes are missing. A collective of the group could not tell, since it would hang or fail with that rank.
"""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from paceline.collectives.memory import Memory
from paceline.collectives.receipts import Log, Receipt, complaints, receipts_of
from paceline.collectives.schedule import Schedule
from paceline.errors import CollectiveError

__all__ = ["collect"]

_SHOWN = 5
_runs: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def collect(
    schedule: Schedule, memory: Memory, log: Log, group: dist.ProcessGroup | None, timeout: float
) -> list[Receipt] | None:
    """Hand in this rank's notes; on the root wait for those of all ranks, compare them and return the receipts.

    Args:
        schedule, memory: what was run, and where it lies on this rank.
        log: this rank's notes.
        group: as for `run`.
        timeout: seconds to wait for each rank's notes.

    Raises:
        CollectiveError: on the root: something is missing or wrong; all of it is named, the first few in full.
    """
    if schedule.ranks == 1:
        return receipts_of({0: log})
    real = group or dist.group.WORLD
    assert real is not None, "a schedule of several ranks runs on a group"
    store = dist.PrefixStore("paceline/receipts", _get_process_group_store(real))
    number = _runs[real] = _runs.get(real, 0) + 1
    if memory.rank != schedule.root:
        store.set(f"{number}/{memory.rank}", log.pack())  # pyright: ignore[reportArgumentType] — bytes are taken too
        return None
    logs = {memory.rank: log}
    for rank in range(schedule.ranks):
        packed = None if rank == memory.rank else _read(store, f"{number}/{rank}", timeout)
        if packed is not None:
            logs[rank] = Log.unpack(packed)
    said = complaints(schedule, logs, memory.nbytes())
    if said:
        more = f"\n  … and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
        raise CollectiveError(
            f"{schedule} was not delivered:" + "".join(f"\n  {line}" for line in said[:_SHOWN]) + more,
            rank=memory.rank,
            remedy="look at the ranks and links named first; what follows may be their consequence",
        )
    return receipts_of(logs)


def _read(store: dist.Store, key: str, timeout: float) -> bytes | None:
    """Return what a rank wrote, and remove it; None if it did not come in time."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except RuntimeError:  # torch's DistStoreError
        return None
    packed = store.get(key)
    store.delete_key(key)
    return packed
