"""Finds the newest intact checkpoint, on all ranks together.

Every rank reads the manifest; the files are divided among the ranks, so that each file is read and hashed once, and
the ranks exchange what they found. A checkpoint that is not intact is skipped, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder
from paceline.checkpoint.format.manifest import Manifest, state_file
from paceline.checkpoint.format.tensor_files import VerifiedReader
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError

__all__ = ["ResumePoint", "SkippedCheckpoint", "find_problem", "find_resume_point"]

GatherTexts = Callable[[str], list[str]]
"""Returns the texts of all ranks, in rank order."""

_REFUSED = "refused: "
"""Prefix of the problem of an intact checkpoint that this version can't read, and that must not be skipped."""


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
    skipped: Sequence[SkippedCheckpoint]


def find_resume_point(
    folder: CheckpointFolder, rank: int, ranks: int, gather: GatherTexts
) -> ResumePoint | None:
    """Return the newest intact checkpoint; None if there is no checkpoint. All ranks call this.

    Raises:
        CheckpointError: there are checkpoints, but none is intact.
        UsageError: the newest has a newer format.
    """
    own = json.dumps([path.name for path in folder.complete()]) if rank == 0 else ""
    names: list[str] = json.loads(gather(own)[0])
    skipped: list[SkippedCheckpoint] = []
    for name in names:
        path = folder.path / name
        opened, problem = _open(path, rank, ranks)
        problems = [text for text in gather(problem) if text]
        for text in problems:
            if text.startswith(_REFUSED):
                raise UsageError(f"{str(path)!r} is {text.removeprefix(_REFUSED)}", rank=rank)
        if not problems and opened is not None:
            return ResumePoint(path, *opened, skipped)
        skipped.append(SkippedCheckpoint(path, problems[0]))
    if skipped:
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {str(folder.path)!r} is intact: "
            + "; ".join(f"{each.path.name}: {each.why}" for each in skipped),
            remedy="restore a copy of one, or name another folder to start anew",
        )
    return None


def find_problem(path: Path) -> str:
    """Return what is wrong with the checkpoint at `path`; empty: it is intact."""
    return _open(path, 0, 1, keep=False)[1].removeprefix(_REFUSED)


def _open(
    path: Path, rank: int, ranks: int, *, keep: bool = True
) -> tuple[tuple[Manifest, VerifiedReader] | None, str]:
    """Return manifest and reader, or the problem with the manifest or with this rank's part of the files.

    A rank always verifies the file with its own state, and keeps the tensors in it.
    """
    try:
        manifest = Manifest.read(path)
        own = state_file(rank)
        names = [name for number, name in enumerate(manifest.files) if number % ranks == rank or name == own]
        reader = VerifiedReader(path, manifest.files)
        reader.verify(names, keep=[own] if keep else [])
    except DamagedCheckpoint as error:
        return None, str(error)
    except UsageError as error:
        return None, f"{_REFUSED}{error}"
    return (manifest, reader), ""
