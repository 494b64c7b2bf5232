"""The part of one rank in a scene (torch)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.bench.starvation.notes import Notes
from paceline.bench.starvation.scenes import Scene
from paceline.bench.starvation.setup import Setup
from paceline.bench.starvation.task import Batch, Task, Truth
from paceline.bench.starvation.trainers import DDP, Trainer, trainer
from paceline.data.loader import Loader

__all__ = ["OVER", "play"]

OVER = "over"
"""Made in a scene's folder when the others have ended: who idles need wait no longer."""

_LARGE = 100_000  # elements: more than the model has


def play(scene: Scene, setup: Setup, rank: int, folder: Path, notes: Notes) -> None:
    """Train an epoch as `rank` of a scene, and note what comes of it.

    Args:
        scene: what to do.
        setup: the batches, and the group's time-out.
        rank: whose part.
        folder: shared by the ranks of this scene.
        notes: this rank's.

    Raises:
        Exception: whatever torch raises where a rank starves, once it is noted.
    """
    try:
        dist.init_process_group(
            setup.backend,
            init_method=(folder / "rendezvous").as_uri(),
            rank=rank,
            world_size=setup.ranks,
            timeout=timedelta(seconds=setup.timeout),
        )
        _Part(scene, setup, rank, folder, notes).play()
        dist.destroy_process_group()
    except Exception as error:
        notes.write("raised", kind=type(error).__name__, text=str(error))
        raise


class _Part:
    def __init__(self, scene: Scene, setup: Setup, rank: int, folder: Path, notes: Notes) -> None:
        self.scene, self.setup, self.rank, self.folder, self.notes = scene, setup, rank, folder, notes
        self.task = Task(setup)
        self.truth = Truth(self.task, setup)
        self.trainer: Trainer = trainer(scene.trainer, self.task.model())

    def play(self) -> None:
        """Make all steps, then what the scene has this rank do, and tell how it ended."""
        with self._join():
            made = 0
            for batch in self._batches():
                self._make(made, batch)
                made += 1
            if made < self.setup.steps and self.scene.then != "stops early":
                self.notes.write("dry")
                _AFTER.get(self.scene.then, _nothing)(self)
        self._finish()

    def _join(self) -> contextlib.AbstractContextManager[object]:
        """Return torch's context for unequal numbers of batches, in the scenes that have it."""
        if self.scene.then != "join" or not isinstance(self.trainer, DDP):
            return contextlib.nullcontext()
        return self.trainer.model.join(divide_by_initial_world_size=self.scene.divide_by_initial)

    def _batches(self) -> Iterator[Batch]:
        """Return the batch of each step that this rank makes."""
        if self.scene.then == "takes part":
            return loaded_batches(self.task, self.setup)
        least = min(self.setup.balance.batches) if self.scene.then == "stops early" else None
        return (self.task.batch(numbers) for numbers in self.setup.batches(self.rank)[:least])

    def _make(self, step: int, batch: Batch, *, own: bool = True) -> None:
        """Make one step and note by how much its gradient was off; `own`: with samples of this epoch."""
        before = self.trainer.whole()
        self.notes.write("began", step=step)
        self.trainer.step(batch)
        after = self.trainer.whole()
        error = None if before is None or after is None else self.truth.error(before, after, step)
        self.notes.write("made", step=step, samples=batch.samples if own else 0, error=error)

    def _finish(self) -> None:
        parameters = self.trainer.whole()
        if parameters is None:
            self.notes.write("finished")
            return
        error = self.truth.parameter_error(parameters)
        self.notes.write("finished", parameters=parameters.tolist(), parameter_error=error)

    # ------------------------------------------------------------------ out of batches

    def idle(self) -> None:
        """Do something else until the others have ended."""
        while not (self.folder / OVER).exists():
            time.sleep(0.01)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def next_epoch(self) -> None:
        """Go on with the next epoch for as many steps as the others have left."""
        made = self.setup.balance.batches[self.rank]
        left = range(made, self.setup.steps)
        further = islice(self.setup.further(self.rank), len(left))
        for step, numbers in zip(left, further, strict=True):
            self._make(step, self.task.batch(numbers), own=False)


def loaded_batches(task: Task, setup: Setup) -> Iterator[Batch]:
    """Yield this rank's batch of each step, as `paceline.Loader` serves them."""
    dealing = setup.balance.dealing
    loader = Loader(
        task.dataset,
        setup.balance.batch_size,
        dispatch=dealing.scheme,
        block=dealing.block,
        shares=list(dealing.shares),
        seed=dealing.seed,
    )
    for batch in loader:
        x, y = batch
        yield Batch(x, y, batch.samples)


def _nothing(part: _Part) -> None:
    """Do nothing."""


def _reduce(elements: int) -> Callable[[_Part], None]:
    def reduce(part: _Part) -> None:
        dist.all_reduce(torch.ones(elements, dtype=torch.float64))

    return reduce


_AFTER: dict[str, Callable[[_Part], None]] = {
    "idles": _Part.idle,
    "barrier": _Part.barrier,
    "reduces one": _reduce(1),
    "reduces many": _reduce(_LARGE),
    "next epoch": _Part.next_epoch,
}
