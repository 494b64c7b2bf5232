"""Checks that only one run, and all of its ranks, writes checkpoints to a place."""

from __future__ import annotations

import json
import uuid

from torch.distributed import ProcessGroup

from paceline.checkpoint.storage.checkpoint_store import CheckpointStore, StoreLock
from paceline.errors import PacelineError, UsageError
from paceline.world.control_collectives import gather_texts

__all__ = ["claim_store"]


def claim_store(
    store: CheckpointStore, rank: int, group: ProcessGroup | None
) -> tuple[str, StoreLock | None]:
    """Let this run write to a place, and no other; all ranks of `group` call this.

    Args:
        store: the place; rank 0 makes it, and removes incomplete checkpoints from it.
        rank: this rank in the group.
        group: the ranks of the run.

    Returns:
        An id of the run, and the lock, on rank 0.

    Raises:
        UsageError: the place can't be written, or is not the same for all ranks.
        CheckpointError: another run writes there.
    """
    run_id, lock = uuid.uuid4().hex[:12], None
    error: PacelineError | None = None
    if rank == 0:
        try:
            store.prepare()
            lock = store.lock()
            store.remove_incomplete()
            store.put_probe(run_id)
        except PacelineError as refused:
            error = refused
        except OSError as failed:
            error = UsageError(
                f"can't write checkpoints to {store.location!r}: {failed.strerror or failed}",
                remedy="name a place that you may write to",
            )
    own = json.dumps([run_id, str(error or "")]) if rank == 0 else ""
    run_id, refusal = json.loads(gather_texts(own, group)[0])
    if error is not None:
        raise error
    if refusal:
        raise UsageError(f"rank 0 can't use the folder: {refusal}", rank=rank)
    answers = gather_texts("" if _sees_probe(store, run_id) else "x", group)
    unseen = [str(rank) for rank, text in enumerate(answers) if text]
    if rank == 0:
        store.remove_probe(run_id)
    if unseen:
        if lock is not None:
            lock.close()
        raise UsageError(
            f"rank 0 writes to {store.location!r}, but its files are not there on rank {', '.join(unseen)}",
            remedy="name a folder on a disk that all hosts share",
        )
    return run_id, lock


def _sees_probe(store: CheckpointStore, mark: str) -> bool:
    try:
        return store.sees_probe(mark)
    except OSError:
        return False
