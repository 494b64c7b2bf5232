"""`Checkpoint`: saves the state of a training run in the background, and resumes it exactly.

`checkpoint_writer` writes checkpoints, `checkpoint_contents` collects and restores the state, and `newest_checkpoint`
finds the checkpoint that a run resumes from.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from paceline._core.step_state import step_state
from paceline.checkpoint.checkpoint_contents import collect_contents
from paceline.checkpoint.checkpoint_writer import CheckpointWriter
from paceline.checkpoint.interop.dcp_restore import plan_restore
from paceline.checkpoint.newest_checkpoint import Resumed, find_resume_point
from paceline.checkpoint.parts.loader_epochs import LoaderEpochs, with_loader
from paceline.checkpoint.parts.loader_states import check_moves, check_others_move
from paceline.checkpoint.parts.named_objects import NamedObjects
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.save_on_warning import SaveOnWarning
from paceline.checkpoint.state_copies import call_before_steps
from paceline.checkpoint.storage.checkpoint_store import CheckpointStore
from paceline.checkpoint.storage.local_folder import checkpoint_name, step_of
from paceline.checkpoint.storage.stores import open_store, store_at
from paceline.errors import CheckpointError, UsageError
from paceline.world.control_collectives import gather_texts, rank_and_size
from paceline.world.live_file import JOINER_VARIABLE

__all__ = ["Checkpoint", "Resumed"]

_CONTAINERS = {"paceline": "safetensors", "dcp": "dcp"}
"""Kinds of files by format."""

log = logging.getLogger("paceline.checkpoint")


class Checkpoint:
    """Saves a training run regularly, pausing it only for a copy of its state, and resumes it exactly.

    All ranks create it with the same arguments and call its methods at the same places. It saves models, optimizers
    (with sharded state, resharded if the number of ranks changes), loaders, schedulers, any object with
    ``state_dict()`` and ``load_state_dict()``, and the random generators of every rank. Of loaders of other libraries,
    of `LocalSGD` and related ones, and of compression residuals, every rank's state is saved. Of other objects that are
    neither models nor optimizers, rank 0's is saved and loaded on all ranks, with a warning if states differ.

    After SIGTERM, SIGUSR1, `request_leave` or a `notice` on any rank, all ranks save a checkpoint after the same step,
    and leave with exit code 75. Another signal, 2 s later or more, ends the process at once.

    Args:
        folder: for this run's checkpoints: a path on a disk that all ranks share, or a URL such as ``s3://bucket/run``
            (see `RemoteFolder`).
        objects: to save, named by kind: ``"model"``, ``"optimizer"``, ``"scheduler"``, ``"loader"``, or by class.
        every: optimizer steps between two checkpoints, or a time such as ``"10min"``; None: only `save` saves.
        keep: number of newest checkpoints to keep, 1 or more. With 2, one is left if a disk damages the newest.
        keep_every: optimizer steps; the first checkpoint at or after each multiple is kept, too. None: no such rule.
        keep_best: number of checkpoints with the lowest metric (see `save`) to keep, too.
        asynchronous: False: training waits until a checkpoint is complete, and no memory is used for copies.
        format: of the checkpoints to write. ``"paceline"``: safetensors and a manifest; ``"dcp"``: files that
            torch.distributed.checkpoint reads, too. `load` reads both, and checkpoints that it alone has written.
        facts: further values to save, as JSON; no NaN.
        notice: returns whether this machine is about to go; called every 5 s in a thread, so it may block.
        group: process group of the ranks; None: all.
        named: objects to save under given names.

    Attributes:
        folder: the folder, an absolute path or a URL.
        step: number of optimizer steps, including those before a restart (of the first optimizer if there are several).
        epoch: number of epochs that `resume` has completed.
        resumed: what `load` found; None: nothing.

    Raises:
        UsageError: the folder can't be written or is not shared, its file system does not rename atomically, an object
            has no state, `facts` can't be encoded as JSON, or an option is invalid.
        CheckpointError: another run writes to the folder.

    Example:
        >>> checkpoint = Checkpoint("runs/a", model, optim, loader, every=100)  # doctest: +SKIP
        >>> for batch in checkpoint.resume(loader):  # doctest: +SKIP
        ...     train_on(batch)
    """

    def __init__(
        self,
        folder: str | Path | CheckpointStore,
        *objects: Any,
        every: int | str | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: int = 0,
        asynchronous: bool = True,
        format: str = "paceline",
        facts: Mapping[str, Any] | None = None,
        notice: Callable[[], bool] | None = None,
        group: dist.ProcessGroup | None = None,
        **named: Any,
    ) -> None:
        retention = Retention(keep, keep_every, keep_best)
        if format not in _CONTAINERS:
            raise UsageError(f"format={format!r}", remedy=f"pass one of {', '.join(map(repr, _CONTAINERS))}")
        self._container = _CONTAINERS[format]
        self._objects = NamedObjects.of(objects, named)
        self.step, self.epoch = 0, 0
        self.resumed: Resumed | None = None
        self.facts = _check_facts(facts or {})
        self._group = group
        self._warning = SaveOnWarning(every, notice, group)
        self._asynchronous = asynchronous
        self._store = open_store(folder)
        self.folder = getattr(self._store, "path", self._store.location)
        optimizers = list(self._objects.optimizers.values())
        self._joins = rank_and_size(group)[1] == 1 and bool(os.environ.get(JOINER_VARIABLE))
        self._writer = CheckpointWriter(
            self._store, group, retention, copies=asynchronous, later=bool(optimizers), joins=self._joins
        )
        self._closed = False
        self._loaded = False  # load() was called
        self._moves = False  # ranks may leave and join
        self._epochs = LoaderEpochs()
        for optimizer in optimizers[:1]:
            _count_steps(optimizer, weakref.ref(self))
        if asynchronous:
            call_before_steps(optimizers, weakref.WeakMethod(self._writer.before_step))

    # ------------------------------------------------------------------ the loop

    def resume(self, loader: Any, *, epochs: int | None = None) -> Iterator[Any]:
        """Yield the remaining batches of `loader`, and save when a checkpoint is due.

        The state is loaded before the first batch, unless `load` was called. A checkpoint is due after the body of the
        loop, if an optimizer made a step in it; and at the end of every epoch.

        Args:
            loader: any iterable; if it has a state, that belongs to the checkpoint. If it has ``set_epoch()``, that is
                called before every epoch; a `Loader` counts epochs itself.
            epochs: total number of epochs since training began; None: the rest of one epoch.

        Raises:
            PacelineError: see `load`; or ranks may leave and join (`Elastic`), and the loader can't be dealt to others.
        """
        if self._moves:
            check_moves("loader", loader)
        self._objects = with_loader(self._objects, loader, loaded=self._loaded)
        self._warning.listen()
        if not self._loaded:
            self.load()
        self._warning.leave_if_warned(self)
        while epochs is None or self.epoch < epochs:
            for batch in self._epochs.batches(loader, self.epoch):
                yield batch
                self.save_if_due()
            self.epoch += 1
            self._warning.leave_if_warned(self)
            if self._warning.saves:
                self.save()
            if epochs is None:
                return

    # ------------------------------------------------------------------ save

    def save(self, *, metric: float | None = None, wait: bool = False) -> None:
        """Start a checkpoint of the present state; return when training may go on. All ranks call this.

        Weights and optimizer state on the CPU may be copied until the next step of an optimizer, which waits for that:
        a program that changes them in between loses the checkpoint, with a warning, and later ones are copied at once.

        If the previous checkpoint can't be completed (a full disk), a warning is logged, training continues, and
        complete checkpoints stay. A step that is saved already is not saved again, but gets its metric, which
        the next checkpoint records.

        Args:
            metric: by which the best checkpoints are kept, such as the loss on held-out data; lower is better.
            wait: return when it is complete.

        Raises:
            CheckpointError: with `wait`, it can't be completed; or this is closed, and another run may use the folder.
        """
        if self._closed:
            raise CheckpointError(
                f"save() into {self.folder} after close()",
                rank=self._writer.rank,
                step=self.step,
                remedy="close at the end, or create another paceline.Checkpoint",
            )
        if self.step != self._writer.saved_step:
            with step_state.running_task("checkpoint"):
                self._writer.finish()
                self._begin(metric)
        else:
            self._writer.note_metric(self.step, metric)
        failure = ""
        if wait or not self._asynchronous:
            with step_state.running_task("checkpoint"):
                failure = self._writer.finish()
        if failure and wait:
            raise CheckpointError(
                failure,
                rank=self._writer.rank,
                step=self.step,
                remedy="the previous checkpoint is untouched: make room, and resume from that",
            )

    def save_if_due(self) -> None:
        """Save if one is due after the latest step, as `resume` and `Elastic` do; after a warning, save and leave.

        All ranks call this after each step. Errors as for `save`.

        Raises:
            SystemExit: with code 75, after a warning to any rank; the checkpoint of this step is complete.
        """
        if self._warning.due(self):
            self.save()

    def request_leave(self) -> None:
        """Have all ranks save and leave, as after SIGTERM; for signal handlers of the program. One rank is enough."""
        self._warning.request()

    def _begin(self, metric: float | None) -> None:
        if not self._loaded:
            self._writer.warn_of_newer(self.step)
        began = time.perf_counter()
        contents = collect_contents(
            self._objects,
            self._writer.rank,
            self._writer.ranks,
            epoch=self.epoch,
            between_epochs=self._epochs.between,
            container=self._container,
        )
        spared = self._still_read()
        self._writer.begin(self.step, contents, began=began, facts=self.facts, metric=metric, spared=spared)
        self._warning.saved()

    def _still_read(self) -> str:
        """Return the name of the checkpoint that was loaded if an optimizer has yet to read its state."""
        used = all(getattr(optimizer, "movable", True) for optimizer in self._objects.optimizers.values())
        return "" if used or self.resumed is None else checkpoint_name(self.resumed.step)

    def wait(self) -> None:
        """Return when the pending checkpoint is complete, or has failed with a warning. All ranks call this."""
        self._writer.finish()

    # ------------------------------------------------------------------ load

    def load(self, path: str | Path | None = None) -> Resumed | None:
        """Load the newest intact checkpoint, if there is one. All ranks call this, before training.

        Newer checkpoints that are not intact are skipped; the log and `Resumed.passed_over` say why. A checkpoint of
        torch.distributed.checkpoint is loaded too: models and optimizers are found by the names of their parameters,
        other objects by their own; what it lacks begins anew, and the log names that.

        Args:
            path: another checkpoint, of Paceline's or of torch.distributed.checkpoint, or a folder of them, whose
                newest intact one is loaded. None: this folder's. To continue a run that began from another one:
                ``checkpoint.load() or checkpoint.load(path)``.

        Returns:
            The checkpoint that was loaded; None: the folder holds none, or this process joins a running world, whose
            ranks give it their state.

        Raises:
            CheckpointError: there are checkpoints, but none is intact.
            UsageError: the checkpoint belongs to another model or optimizer, has a newer format, holds a loader's state
                that does not fit this number of ranks, or there is none at `path`; nothing was changed.
        """
        if self._joins:
            return None
        store = self._store if path is None else store_at(path)
        found = find_resume_point(
            store,
            self._writer.rank,
            lambda text: gather_texts(text, self._group),
            lambda reader: plan_restore(reader, self._objects, self._writer.rank, self._writer.ranks),
        )
        self._loaded = True
        if found is None:
            if path is not None:
                raise UsageError(
                    f"{str(path)!r} holds no checkpoint", remedy="name a checkpoint, or a folder of them"
                )
            return None
        if self._writer.rank == 0:
            for skipped in found.skipped:
                log.warning("skipped %s, which is not intact: %s", skipped.path, skipped.why)
                if path is None:
                    self._store.set_aside(skipped.path.rpartition("/")[2])
        self._writer.before_step()
        self.epoch = found.plan.restore()
        self._epochs.resume(between=bool(found.plan.first.get("between_epochs")))
        manifest = found.plan.reader.manifest
        self.step = manifest.step
        self._warning.loaded(self.step)
        self._writer.saved_step = manifest.step if path is None else -1
        if path is not None:
            self._writer.warn_of_newer(self.step + 1)
        location = getattr(found.files, "path", found.files.location)
        ranks = manifest.written.get("ranks", manifest.ranks)
        self.resumed = Resumed(location, manifest.step, ranks, manifest.facts, tuple(found.skipped))
        if self._writer.rank == 0:
            log.info("resumed at step %d from %s, written by %d ranks", self.step, location, ranks)
        return self.resumed

    # ------------------------------------------------------------------ another world

    @property
    def newest_step(self) -> int | None:
        """The step of the newest complete checkpoint in the folder; None: there is none."""
        return next((step_of(name) for name in self._store.names()), None)

    def check_rejoin(self, moved: Iterable[Any] = ()) -> None:
        """Check that this run can go on when ranks leave or join, as they may from now on.

        Args:
            moved: the objects whose ``rejoin()`` is called then.

        Raises:
            UsageError: names a loader that can't be dealt to other ranks, or a loader or scheduler not among `moved`.
        """
        check_others_move(self._objects.others, moved)
        self._moves = True

    def rejoin(self) -> None:
        """Continue on the ranks of the default process group, after it was made anew; all ranks call this.

        A checkpoint that was being written by other ranks is given up unless it is complete.
        """
        self._warning.rejoin()
        self._joins = False
        self._loaded = True  # what lies in the folder belongs to this run
        self._writer.rejoin()

    def leave(self) -> None:
        """Leave the run to its other ranks: give up the checkpoint that is being written, and the folder's lock."""
        self._writer.abandon()
        self._warning.close()
        self._writer.unlock()

    # ------------------------------------------------------------------ close

    def close(self) -> None:
        """Wait for the pending checkpoint, and let other runs write to the folder. All ranks call this."""
        self._writer.finish()
        self._closed = True
        self._warning.close()
        self._writer.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


def _check_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(dict(facts), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the facts of a checkpoint can't be encoded as JSON: {error}",
            remedy="pass strings, finite numbers, True, False, None, and lists and dicts of them",
        ) from error
    return dict(facts)


def _count_steps(optimizer: torch.optim.Optimizer, reference: weakref.ref[Checkpoint]) -> None:
    """Count the steps of `optimizer` as long as the checkpoint exists."""

    def count(*_: Any) -> None:
        checkpoint = reference()
        if checkpoint is not None:
            checkpoint.step += 1

    optimizer.register_step_post_hook(count)
