"""The program that plays scenes: ``python -m paceline.bench.starvation.stage JOB`` (torch).

Importing torch takes seconds, so this process imports it once and forks the ranks of each scene: fresh
processes, each of which ends as it ends. A scene is over when all have ended, or when nothing has moved for
longer than the group's time-out: then those that are left count as hung, and are killed. What is known of a
scene is added to a file as soon as it is over.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.bench.starvation.notes import Notes, read_notes
from paceline.bench.starvation.outcome import End, SceneOutcome, outcome_of
from paceline.bench.starvation.rank import OVER, play
from paceline.bench.starvation.scenes import Scene, scenes_named
from paceline.bench.starvation.setup import Setup
from paceline.bench.starvation.table import sentence

__all__ = ["main", "show"]

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


# ---------------------------------------------------------------------- watching


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


# ---------------------------------------------------------------------- a rank


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
