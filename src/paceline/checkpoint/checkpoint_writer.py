"""Writes the checkpoints of a run to one place, one after another, on all ranks together.

A checkpoint is begun when the one before has been completed, or has failed on all ranks. `background_saver` writes it.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline._core import __version__
from paceline.checkpoint.background_saver import BackgroundSave, on_cpu
from paceline.checkpoint.checkpoint_contents import CheckpointContents
from paceline.checkpoint.exclusive_use import claim_store
from paceline.checkpoint.retention import Retention, remove_old
from paceline.checkpoint.state_copies import HostBuffers
from paceline.checkpoint.storage.checkpoint_store import CheckpointStore, StoreLock
from paceline.checkpoint.storage.local_folder import checkpoint_name, step_of
from paceline.checkpoint.unchanged_files import UnchangedFiles
from paceline.world.control_collectives import gather_texts, rank_and_size

__all__ = ["CheckpointWriter"]

log = logging.getLogger("paceline.checkpoint")


class CheckpointWriter:
    """Writes the checkpoints of a run; all ranks call its methods at the same places.

    Args:
        store: the place.
        group: process group of the ranks; None: all.
        retention: which complete checkpoints stay.
        copies: whether it writes copies of the tensors, so that training goes on.
        later: whether the writing thread may make some of them, see `HostBuffers`.
        joins: this process joins a running world, whose ranks write to the place already; `rejoin` comes first.

    Attributes:
        rank, ranks: this rank, and the number of ranks.
        saved_step: of the checkpoint that has the present state, unless steps were made since; -1: none does.
        lock: of the place, on rank 0.
        latest: the checkpoint that was begun last.

    Raises:
        UsageError: the place can't be written, or is not the same for all ranks.
        CheckpointError: another run writes there.
    """

    def __init__(
        self,
        store: CheckpointStore,
        group: dist.ProcessGroup | None,
        retention: Retention,
        *,
        copies: bool,
        later: bool,
        joins: bool,
    ) -> None:
        self._store, self._group, self._retention, self._copies = store, group, retention, copies
        self.rank, self.ranks = rank_and_size(group)
        self.saved_step = -1
        self.lock: StoreLock | None = None
        self.latest: BackgroundSave | None = None
        self._run_id = ""
        if not joins:
            self._run_id, self.lock = claim_store(store, self.rank, group)
        self._metrics = dict[str, float | None]()
        self._buffers, self._unchanged = HostBuffers(later=later), UnchangedFiles(retention.keep)
        self._pending: tuple[int, BackgroundSave] | None = None

    def begin(
        self,
        step: int,
        contents: CheckpointContents,
        *,
        began: float,
        facts: Mapping[str, Any],
        metric: float | None,
        spared: str,
    ) -> None:
        """Begin a checkpoint, once the one before is finished; return when training may go on.

        Args:
            step: number of optimizer steps.
            contents: what this rank writes.
            began: when the save began, as `time.perf_counter` counts.
            facts: values of the program.
            metric: by which the best checkpoints are kept; None: none is known yet.
            spared: name of a checkpoint that stays now, as it is still being read.
        """
        self._metrics[checkpoint_name(step)] = None  # of another checkpoint of that step
        self.note_metric(step, metric)
        unchanged = self._unchanged.find(contents.parts)
        copied = {name: parts for name, parts in contents.parts.files.items() if name not in unchanged}
        copy = self._buffers.copy(copied) if self._copies else None
        ready = {name: on_cpu(parts) for name, parts in copied.items()} if copy is None else copy.files
        self.latest = BackgroundSave(
            partial(self._store.begin, step, self._run_id),
            replace(contents, parts=contents.parts.with_files({**contents.parts.files, **ready})),
            {**_head(step, facts, dict(self._metrics)), **contents.shared},
            began=began,
            rank=self.rank,
            ranks=self.ranks,
            remove_old=partial(  # none of this object
                remove_old, self._store, self._retention, self._metrics, spared=spared
            ),
            unchanged=unchanged,
            earlier=self._unchanged.checkpoint,
            copy=copy,
            lock=self.lock,
            previous=self.latest,
        )
        self._pending, self.saved_step = (step, self.latest), step

    def note_metric(self, step: int, metric: float | None) -> None:
        """Note the metric of a checkpoint that is begun; later ones have it in their manifest, too."""
        if metric is not None and math.isfinite(metric):
            self._metrics[checkpoint_name(step)] = float(metric)

    def before_step(self) -> None:
        """Wait until the state may change."""
        if self.latest is not None:
            self.latest.before_step()

    def finish(self) -> str:
        """Wait for the pending checkpoint; return why it can't be completed, or an empty text."""
        if self._pending is None:
            return ""
        (step, pending), self._pending = self._pending, None
        failures = gather_texts(pending.wait_written(), self._group)
        reasons = [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why]
        pending.finish(abandon=bool(reasons))
        last = gather_texts(pending.failure if self.rank == 0 and not reasons else "", self._group)[0]
        reasons += [f"rank 0: {last}"] if last else []
        if not reasons:
            frozen = {name: file for name, file in pending.files.items() if name in pending.frozen}
            self._unchanged.completed(checkpoint_name(step), frozen)
            return ""
        self.saved_step = -1
        failure = f"the checkpoint of step {step} can't be written to {self._store.location!r}: {'; '.join(reasons)}"
        if self.rank == 0:
            log.warning("%s; training continues, and complete checkpoints stay", failure)
        return failure

    def abandon(self) -> None:
        """Give up the pending checkpoint unless it is complete; one rank may do so alone."""
        if self._pending is not None:
            self._pending[1].finish(abandon=True)
            self._pending = None

    def warn_of_newer(self, step: int) -> None:
        """Warn of checkpoints from `step` on that this run did not load, and that count as newer than its own."""
        if self.rank != 0:
            return
        try:
            newest = next(iter(self._store.names()), None)
        except OSError:  # of a remote place; the save itself is tried again
            return
        if newest is not None and step_of(newest) >= step:
            log.warning(
                "%s already exists, and this run did not load it: checkpoints up to that step are removed as older "
                "ones; call load() before training, or name another folder",
                self._store.files(newest).location,
            )

    def rejoin(self) -> None:
        """Continue on the ranks of a process group that was made anew; its rank 0 lets no other run write."""
        self.abandon()
        self.saved_step = -1
        self.rank, self.ranks = rank_and_size(self._group)
        if self.rank == 0 and self.lock is None:
            self.lock = self._store.lock()  # once the process that had it has ended
            self._store.remove_incomplete()
        # Another id: a rank of the world before may still be writing.
        self._run_id = gather_texts(uuid.uuid4().hex[:12] if self.rank == 0 else "", self._group)[0]

    def unlock(self) -> None:
        """Let other runs write, once this process has ended its own work in the place."""
        if self.latest is not None:
            self.latest.join()
        if self.lock is not None:
            self.lock.close()
            self.lock = None


def _head(step: int, facts: Mapping[str, Any], metrics: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the entries of a manifest that come from no object."""
    own = checkpoint_name(step)
    return {
        "step": step,
        "facts": dict(facts),
        "metric": metrics.get(own),
        "metrics": {name: each for name, each in metrics.items() if name != own and each is not None},
        "written": {
            "at": datetime.now().astimezone().isoformat(timespec="seconds"),
            "paceline": __version__,
            "torch": str(torch.__version__),
        },
    }
