"""Where to resume: the newest intact checkpoint, found by all ranks together.

Every rank reads the manifest; the files are dealt, so that each is read and summed once, and the ranks tell one
another what they found. A checkpoint that is not intact is passed over, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder
from paceline.checkpoint.format.manifest import Manifest, state_file
from paceline.checkpoint.format.verified_reader import VerifiedReader
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError

__all__ = ["ResumePoint", "SkippedCheckpoint", "find_problem", "find_resume_point"]

GatherTexts = Callable[[str], list[str]]
"""Returns every rank's text, by rank."""


_REFUSED = "refused: "
"""Begins what is said of a checkpoint that is intact, but not for this version to read or to pass over."""


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that is not intact, and why."""

    path: Path
    why: str


@dataclass(frozen=True)
class ResumePoint:
    """The newest intact checkpoint, and newer ones that are not."""

    path: Path
    manifest: Manifest
    reader: VerifiedReader
    passed_over: Sequence[SkippedCheckpoint]


def find_resume_point(
    folder: CheckpointFolder, rank: int, ranks: int, gather: GatherTexts
) -> ResumePoint | None:
    """Return the newest intact checkpoint; None where there never was one. All ranks call this.

    Raises:
        CheckpointError: there are checkpoints, but none is intact.
        UsageError: the newest is of a newer format.
    """
    mine = [path.name for path in folder.complete()] if rank == 0 else []
    names: list[str] = json.loads(gather(json.dumps(mine) if rank == 0 else "")[0])
    passed: list[SkippedCheckpoint] = []
    for name in names:
        path = folder.path / name
        opened, problem = _look(path, rank, ranks)
        told = [text for text in gather(problem) if text]
        refusals = [text for text in told if text.startswith(_REFUSED)]
        if refusals:
            raise UsageError(f"{str(path)!r} is {refusals[0].removeprefix(_REFUSED)}", rank=rank)
        if not told and opened is not None:
            return ResumePoint(path, *opened, passed)
        passed.append(SkippedCheckpoint(path, told[0]))
    if passed:
        raise CheckpointError(
            f"none of the {len(passed)} checkpoints in {str(folder.path)!r} is intact: "
            + "; ".join(f"{one.path.name}: {one.why}" for one in passed),
            remedy="put a copy of one back, or name another folder to start anew",
        )
    return None


def find_problem(path: Path) -> str:
    """Return what is wrong with the checkpoint at `path`; an empty text: it is intact."""
    return _look(path, 0, 1, keep=False)[1].removeprefix(_REFUSED)


def _look(
    path: Path, rank: int, ranks: int, *, keep: bool = True
) -> tuple[tuple[Manifest, VerifiedReader] | None, str]:
    """Return the manifest with a reader of the files, and what is wrong with it or with the files dealt to `rank`.

    The file of its own state is always dealt to a rank, which keeps what is in it.
    """
    try:
        manifest = Manifest.read(path)
        own = state_file(rank)
        mine = [name for number, name in enumerate(manifest.files) if number % ranks == rank or name == own]
        reader = VerifiedReader(path, manifest.files)
        reader.check(mine, keep=[own] if keep else [])
    except DamagedCheckpoint as error:
        return None, str(error)
    except UsageError as error:
        return None, f"{_REFUSED}{error}"
    return (manifest, reader), ""
