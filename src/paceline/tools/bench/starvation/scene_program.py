"""The part of one rank in a scene (torch).

The program that plays scenes: ``python -m paceline.tools.bench.starvation.scene_program JOB`` (torch).

Importing torch takes seconds, so this process imports it once and forks the ranks of each scene: fresh
processes, each of which ends as it ends. A scene is over when all have ended, or when nothing has moved for
longer than the group's time-out: then those that are left count as hung, and are killed. What is known of a
scene is added to a file as soon as it is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.data.loader import Loader
from paceline.tools.bench.starvation.scene_outcome import End, Notes, SceneOutcome, outcome_of, read_notes
from paceline.tools.bench.starvation.scene_setup import Setup
from paceline.tools.bench.starvation.scene_training import DDP, Batch, Task, Trainer, Truth, trainer
from paceline.tools.bench.starvation.starvation_scenes import Scene, scenes_named
from paceline.tools.bench.starvation.starvation_table import sentence

__all__ = ["OVER", "main", "play", "show"]

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
    dealing = setup.balance.dispatch
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


_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


_LOOK_SECONDS = 0.005


_PATIENCE_SECONDS = 20.0  # beyond the group's time-out


def main(job: Mapping[str, Any]) -> None:
    """Play all scenes of a job, tell of each in a line, and add what is known of it to the job's file."""
    torch.set_num_threads(1)
    setup, scenes = Setup.from_json(job["setup"]), scenes_named(job["scenes"])
    with Path(job["out"]).open("a", encoding="utf-8") as out:
        for number, scene in enumerate(scenes, start=1):
            found = show(scene, setup).to_json()
            print(f"{number}/{len(scenes)} {sentence(found)}", file=sys.stderr, flush=True)
            out.write(json.dumps(found) + "\n")
            out.flush()


def show(scene: Scene, setup: Setup) -> SceneOutcome:
    """Play one scene with fresh processes, and return what became of it; none of them is left."""
    with tempfile.TemporaryDirectory(prefix="paceline-scene-") as name:
        folder = Path(name)
        pids: dict[int, int] = {}
        try:
            for rank in range(setup.ranks):
                pids[rank] = _fork(scene, setup, rank, folder)
            ends = _watch(setup, pids, folder)
        finally:
            for pid in pids.values():
                _kill(pid)
        notes = {rank: read_notes(_notes(folder, rank)) for rank in ends}
        return outcome_of(scene, setup, notes, ends)


def _notes(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def _stderr(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stderr"


def _watch(setup: Setup, pids: dict[int, int], folder: Path) -> dict[int, End]:
    """Return how all ranks ended; take those off `pids` that are no more."""
    ends: dict[int, End] = {}
    moved, size = time.monotonic(), 0
    while pids:
        for rank, pid in list(pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del pids[rank]
                ends[rank] = _end(os.waitstatus_to_exitcode(status), rank, folder)
        if set(pids) <= set(setup.dry):
            (folder / OVER).touch()
        written = sum(_notes(folder, rank).stat().st_size for rank in pids if _notes(folder, rank).exists())
        if written + len(ends) != size:
            moved, size = time.monotonic(), written + len(ends)
        if time.monotonic() - moved > setup.timeout + _PATIENCE_SECONDS:
            for rank in pids:
                ends[rank] = _end(None, rank, folder)
            break
        time.sleep(_LOOK_SECONDS)
    return ends


def _end(code: int | None, rank: int, folder: Path) -> End:
    return End(code, time.monotonic(), _stderr(folder, rank).read_text(encoding="utf-8", errors="replace"))


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _fork(scene: Scene, setup: Setup, rank: int, folder: Path) -> int:
    """Return the process id of a new process that plays `rank` and ends with this one."""
    stage = os.getpid()
    _stderr(folder, rank).touch()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _be_alone(stage, _stderr(folder, rank))
        play(scene, setup, rank, folder, Notes(_notes(folder, rank)))
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on as the one that forked it would
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _be_alone(parent: int, stderr: Path) -> None:
    """End when `parent` ends, write to `stderr` only, and leave no core behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handle = os.open(stderr, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
