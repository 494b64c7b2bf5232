"""`Checkpoint`: the state of a training on the disk, whole at every instant, and back from there.

How a checkpoint comes about is told in `saving`, what it consists of in `manifest`, which one a run resumes from in
`recovery`.
"""

from __future__ import annotations

import json
import logging
import uuid
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from paceline._core.step_state import step_state
from paceline._core.version import __version__
from paceline.checkpoint.background_saver import BackgroundSave, Buffers, RankShare
from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder, CheckpointLock, checkpoint_name
from paceline.checkpoint.parts.checkpoint_contents import contents_of, take_up
from paceline.checkpoint.parts.named_objects import NamedObjects
from paceline.checkpoint.resume import SkippedCheckpoint, find_resume_point
from paceline.checkpoint.save_cadence import cadence
from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.world.object_collectives import gather_texts, place_in, sum_over_ranks

__all__ = ["Checkpoint", "Resumed"]

log = logging.getLogger("paceline.checkpoint")


@dataclass(frozen=True)
class Resumed:
    """What a run went on from.

    Attributes:
        path: the checkpoint.
        step: optimizer steps that had been taken.
        ranks: how many ranks wrote it.
        facts: what the program wanted to be remembered.
        passed_over: newer checkpoints that are not intact, and why.
    """

    path: Path
    step: int
    ranks: int
    facts: Mapping[str, Any]
    passed_over: tuple[SkippedCheckpoint, ...]


class Checkpoint:
    """Saves a training every so often, without stopping it for longer than a copy takes, and resumes it exactly.

    All ranks make one, with the same arguments, and call its methods at the same places. It saves models, optimizers
    (sharded state too, re-dealt when the number of ranks changes), loaders, schedulers, anything with ``state_dict()``
    and ``load_state_dict()``, and the random numbers of every rank. Of things that are neither models nor optimizers,
    rank 0's state is saved, and given to all; of `LocalSGD` and its kin, and of what compression has left out, every
    rank's.

    Args:
        folder: where this run's checkpoints go; on a disk that all ranks share.
        objects: what is saved, named by kind: ``"model"``, ``"optimizer"``, ``"scheduler"``, ``"loader"``, or class.
        every: optimizer steps between two checkpoints, or a time such as ``"10min"``; None: where `save` is called.
        keep: complete checkpoints that stay, 1 or more. With 2 there is another one if a disk damages the newest.
        asynchronous: False: training waits until a checkpoint is complete, and no memory is taken for copies.
        facts: what else is to be remembered, as JSON can say it: no NaN.
        group: the ranks, as a process group; None: all.
        named: objects under names of their own.

    Attributes:
        folder: where the checkpoints go.
        step: optimizer steps so far, those before a restart included (of the first optimizer, where there are several).
        epoch: epochs that `resume` has served whole.
        resumed: what `load` found; None: nothing.

    Raises:
        UsageError: the folder can't be written or is not shared, its file system does not rename in one step, an object
            has no state, `facts` are more than JSON can say, or `every` or `keep` make no sense.
        CheckpointError: another run writes to the folder.

    Example:
        >>> keep = Checkpoint("runs/a", model, optim, loader, every=100)  # doctest: +SKIP
        >>> for batch in keep.resume(loader):  # doctest: +SKIP
        ...     train_on(batch)
    """

    def __init__(
        self,
        folder: str | Path,
        *objects: Any,
        every: int | str | None = None,
        keep: int = 2,
        asynchronous: bool = True,
        facts: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        **named: Any,
    ) -> None:
        if type(keep) is not int or keep < 1:
            raise UsageError(f"keep={keep!r}", remedy="keep at least 1 checkpoint")
        self.subjects = NamedObjects.of(objects, named)
        self.folder = Path(folder)
        self.step, self.epoch = 0, 0
        self.resumed: Resumed | None = None
        self.facts = _checked(facts or {})
        self._group, (self._rank, self._ranks) = group, place_in(group)
        self._cadence = cadence(every, self._rank_0s)
        self._keep, self._asynchronous = keep, asynchronous
        self._folder = CheckpointFolder(folder)
        self._lock: CheckpointLock | None = None
        self._mark = self._open()
        self._buffers = Buffers()
        self._under_way: tuple[int, BackgroundSave] | None = None
        self._latest: BackgroundSave | None = None
        self._closed = False
        self._loaded = False  # a state was looked for
        self._fresh = False  # one was found, and nobody has gone on from it
        self._saved_at, self._ticked = -1, 0
        for optimizer in list(self.subjects.optimizers.values())[:1]:
            _have_counted(optimizer, weakref.ref(self))

    # ------------------------------------------------------------------ the loop

    def resume(self, loader: Any, *, epochs: int | None = None) -> Iterator[Any]:
        """Yield the batches of `loader` from where the run stands, and save when it is due.

        The state is loaded before the first batch, unless `load` was called. A checkpoint is due after the body of the
        loop, if an optimizer made a step in it; and at the end of every epoch.

        Args:
            loader: anything that can be iterated over; if it has a state it belongs to the checkpoint.
            epochs: serve epochs until there were so many since the training began; None: what is left of one.

        Raises:
            PacelineError: what `load` raises.
        """
        self._adopt(loader)
        if not self._loaded:
            self.load()
        if self._fresh and hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)  # of which nothing may be left
        self._fresh = False
        while epochs is None or self.epoch < epochs:
            for batch in loader:
                yield batch
                self._tick()
            self.epoch += 1
            if self._cadence is not None:
                self.save()
            if epochs is None:
                return

    def _adopt(self, loader: Any) -> None:
        """Make `loader` part of the checkpoint, if it is not."""
        if any(each is loader for each in self.subjects.others.values()):
            return
        if hasattr(loader, "state_dict") and not self._loaded:
            self.subjects = self.subjects.with_other("loader", loader)
        elif not self._loaded:
            log.warning(
                "a %s has no state_dict(): a run that is resumed begins its epoch again; paceline.Loader goes on "
                "with the next batch",
                type(loader).__qualname__,
            )
        elif hasattr(loader, "state_dict"):
            log.warning(
                "the loader was not there when load() was called, so it is not saved: a run that is resumed begins its "
                "epoch again; give it to paceline.Checkpoint too"
            )

    def _tick(self) -> None:
        """Save if that is due; after the body of the loop."""
        if self.step != self._ticked:
            self._ticked = self.step
            if self._cadence is not None and self._cadence.due(self.step):
                self.save()

    # ------------------------------------------------------------------ save

    def save(self, *, wait: bool = False) -> None:
        """Begin a checkpoint of the state as it is; return when it is copied. All ranks call this.

        If the checkpoint before can't be completed (a full disk), a warning says so, training goes on, and what was
        complete stays. At a step that was saved already nothing is done.

        Args:
            wait: return when it is complete.

        Raises:
            CheckpointError: with `wait`, it can't be completed; or this is closed: the folder may be another run's now.
        """
        if self._closed:
            raise CheckpointError(
                f"save() into {self.folder} after close()",
                rank=self._rank,
                step=self.step,
                remedy="close at the end, or make another paceline.Checkpoint",
            )
        if self.step != self._saved_at:
            self._settle()
            with step_state.running_task("checkpoint"):
                self._begin()
        if (wait or not self._asynchronous) and (failure := self._settle()) and wait:
            raise CheckpointError(
                failure,
                rank=self._rank,
                step=self.step,
                remedy="the checkpoint before it is untouched: make room, and resume from that",
            )

    def _begin(self) -> None:
        self._warn_of_newer()
        contents = contents_of(self.subjects, self._rank, self._ranks, epoch=self.epoch)
        files = self._buffers.copy(contents.files) if self._asynchronous else _on_cpu(contents.files)
        about = {
            "step": self.step,
            "facts": dict(self.facts),
            "weights": contents.weights,
            "written": {
                "at": datetime.now().astimezone().isoformat(timespec="seconds"),
                "paceline": __version__,
                "torch": torch.__version__,
            },
        }
        share = RankShare(files, contents.state, about)
        growing = self._folder.growing(self.step, self._mark)
        saving = BackgroundSave(self._folder, growing, share, self._rank, self._ranks, self._keep, self._lock)
        self._under_way, self._latest, self._saved_at = (self.step, saving), saving, self.step
        if self._cadence is not None:
            self._cadence.saved()

    def _warn_of_newer(self) -> None:
        """Say so where another run has left checkpoints that count as newer than what this one saves."""
        if self._loaded or self._rank != 0:
            return
        newest = next(iter(self._folder.complete()), None)
        if newest is not None and newest.name >= checkpoint_name(self.step):
            log.warning(
                "%s is there already, and this run did not begin with it: what is saved up to that step is removed "
                "as older; call load() before training, or name another folder",
                newest,
            )

    def _settle(self) -> str:
        """See the checkpoint under way through to its end; return why it can't be completed, if so."""
        if self._under_way is None:
            return ""
        (step, saving), self._under_way = self._under_way, None
        failures = gather_texts(saving.wait_written(), self._group)
        broken = [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why]
        saving.finish(given_up=bool(broken))
        last = gather_texts(saving.failure if self._rank == 0 and not broken else "", self._group)[0]
        broken += [f"rank 0: {last}"] if last else []
        if not broken:
            return ""
        self._saved_at = -1
        failure = f"the checkpoint of step {step} can't be written to {str(self._folder.path)!r}: {'; '.join(broken)}"
        if self._rank == 0:
            log.warning("%s; training goes on, and what was complete stays", failure)
        return failure

    # ------------------------------------------------------------------ load

    def load(self) -> Resumed | None:
        """Go on from the newest intact checkpoint, if there is one. All ranks call this, before training.

        A newer one that is not intact is passed over: the log says why, and `Resumed.passed_over`.

        Returns:
            What was found; None where the folder holds no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none is intact.
            UsageError: the checkpoint is of another model, of another optimizer, or of a newer format; nothing
                was changed.
        """
        found = find_resume_point(
            self._folder, self._rank, self._ranks, lambda text: gather_texts(text, self._group)
        )
        self._loaded = True
        if found is None:
            return None
        if self._rank == 0:
            for one in found.passed_over:
                log.warning("passed over %s, which is not intact: %s", one.path, one.why)
                self._folder.set_aside(one.path)
        manifest = found.manifest
        self._fresh = True
        self.epoch = take_up(found.path, manifest, found.reader, self.subjects, self._rank, self._ranks)
        self.step = self._saved_at = self._ticked = manifest.step
        self.resumed = Resumed(
            found.path, manifest.step, manifest.ranks, manifest.facts, tuple(found.passed_over)
        )
        if self._rank == 0:
            log.info("resumed at step %d from %s, written by %d ranks", self.step, found.path, manifest.ranks)
        return self.resumed

    # ------------------------------------------------------------------ begin and end

    def _open(self) -> str:
        """Make sure that this run, and no other, can write to the folder from all ranks; return the run's mark.

        Raises: as the class.
        """
        mark, error = uuid.uuid4().hex[:12], None
        if self._rank == 0:
            try:
                self._folder.prepare()
                self._lock = CheckpointLock(self._folder.path)
                self._folder.sweep()
                self._folder.probe(mark).mkdir()
            except PacelineError as refused:
                error = refused
        answer = gather_texts(json.dumps([mark, str(error or "")]) if self._rank == 0 else "", self._group)[0]
        mark, refusal = json.loads(answer)
        if error is not None:
            raise error
        if refusal:
            raise UsageError(f"rank 0 can't use the folder: {refusal}", rank=self._rank)
        probe = self._folder.probe(mark)
        unseen = [
            rank for rank, text in enumerate(gather_texts("" if probe.is_dir() else "x", self._group)) if text
        ]
        if self._rank == 0:
            self._folder.remove(probe)
        if unseen:
            raise UsageError(
                f"what rank 0 writes to {str(self._folder.path)!r} is not there on rank {', '.join(map(str, unseen))}",
                remedy="name a folder on a disk that all hosts share",
            )
        return mark

    def wait(self) -> None:
        """Return when the checkpoint under way is complete, or has failed with a warning. All ranks call this."""
        self._settle()

    def close(self) -> None:
        """See the checkpoint under way through, and let other runs write to the folder; all ranks call this."""
        self._settle()
        self._closed = True
        if self._latest is not None:
            self._latest.end()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _rank_0s(self, numbers: list[float]) -> list[float]:
        """Return rank 0's numbers on all ranks."""
        mine = numbers if self._rank == 0 else [0.0] * len(numbers)
        return sum_over_ranks(torch.tensor(mine, dtype=torch.float64), self._group).tolist()


def _checked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return `facts`, once it is clear that a manifest can hold them."""
    try:
        json.dumps(dict(facts), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the facts of a checkpoint are more than JSON can say: {error}",
            remedy="give texts, finite numbers, True, False, None, and lists and dicts of them",
        ) from error
    return dict(facts)


def _have_counted(optimizer: torch.optim.Optimizer, reference: weakref.ref[Checkpoint]) -> None:
    """Count the steps of `optimizer`, as long as the checkpoint that counts them is there."""

    def count(*_: Any) -> None:
        checkpoint = reference()
        if checkpoint is not None:
            checkpoint.step += 1

    optimizer.register_step_post_hook(count)


def _on_cpu(files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors, contiguous on the CPU, without copying those that are so already."""
    return {
        file: {label: tensor.detach().cpu().contiguous() for label, tensor in tensors.items()}
        for file, tensors in files.items()
    }
