"""Finds the newest intact checkpoint, on all ranks together.

Every rank reads, and verifies, what it needs; the ranks exchange what they found. A checkpoint that is not intact is
skipped on all of them, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.interop.dcp_reader import DcpReader, is_plain_dcp
from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles
from paceline.checkpoint.storage.stores import ReadableStore
from paceline.errors import CheckpointError, DamagedCheckpoint, PacelineError, UsageError

__all__ = [
    "ResumePoint",
    "Resumed",
    "SkippedCheckpoint",
    "find_problem",
    "find_resume_point",
    "open_checkpoint",
]

GatherTexts = Callable[[str], list[str]]
"""Returns the texts of all ranks, in rank order."""

_REFUSED = "refused: "
"""Prefix of the problem of an intact checkpoint that does not fit, and that must not be skipped."""

P = TypeVar("P")


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that is not intact, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumed from.

    Attributes:
        path: the checkpoint, a folder or a URL.
        step: its number of optimizer steps.
        ranks: number of ranks that wrote it.
        facts: the program's own values, saved with it.
        passed_over: newer checkpoints that were skipped because they are not intact.
    """

    path: Path | str
    step: int
    ranks: int
    facts: Mapping[str, Any]
    passed_over: tuple[SkippedCheckpoint, ...]


@dataclass(frozen=True)
class ResumePoint(Generic[P]):
    """The newest intact checkpoint, what this rank has prepared of it, and newer ones that are not intact."""

    files: CheckpointFiles
    plan: P
    skipped: Sequence[SkippedCheckpoint]


def find_resume_point(
    store: ReadableStore, rank: int, gather: GatherTexts, prepare: Callable[[CheckpointReader | DcpReader], P]
) -> ResumePoint[P] | None:
    """Return the newest intact checkpoint; None if there is no checkpoint. All ranks call this.

    If none is, those that have appeared meanwhile are tried: a run that writes here removes the ones it replaces.

    Args:
        store: the checkpoints.
        rank: this rank.
        gather: exchanges texts.
        prepare: reads what this rank needs; raises `DamagedCheckpoint` if that is not intact, and other errors of
            Paceline if the checkpoint can't be used.

    Raises:
        CheckpointError: there are checkpoints, but none is intact.
        UsageError: the newest intact one has another format, or does not fit.
    """
    skipped: list[SkippedCheckpoint] = []
    tried: set[str] = set()
    while names := [name for name in _names(store, rank, gather) if name not in tried]:
        tried.update(names)
        for name in names:
            files = store.files(name)
            plan, problem, error = _try(files, prepare)
            problems = {at: text for at, text in enumerate(gather(problem)) if text}
            refused = {
                at: text.removeprefix(_REFUSED) for at, text in problems.items() if text.startswith(_REFUSED)
            }
            if error is not None and rank in refused:
                raise error
            if refused:
                at, text = next(iter(refused.items()))
                raise UsageError(f"rank {at} can't use {files.location!r}: {text}", rank=rank)
            if not problems and plan is not None:
                return ResumePoint(files, plan, skipped)
            skipped.append(SkippedCheckpoint(files.location, next(iter(problems.values()))))
    if skipped:
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {store.location!r} is intact: "
            + "; ".join(f"{each.path.rpartition('/')[2]}: {each.why}" for each in skipped),
            remedy="restore a copy of one, or name another folder to start anew",
        )
    return None


def open_checkpoint(files: CheckpointFiles) -> CheckpointReader | DcpReader:
    """Return a reader of a checkpoint of Paceline's, or of one that plain torch.distributed.checkpoint has written.

    Raises:
        DamagedCheckpoint: its manifest or its metadata are not intact.
        UsageError: it has another format.
    """
    return DcpReader(files) if is_plain_dcp(files) else CheckpointReader(files)


def _names(store: ReadableStore, rank: int, gather: GatherTexts) -> list[str]:
    """Return the names of the checkpoints that rank 0 sees now, newest first.

    Raises:
        CheckpointError: they can't be listed.
    """
    names, problem = json.loads(gather(_list(store) if rank == 0 else "")[0])
    if problem:
        raise CheckpointError(f"the checkpoints in {store.location!r} can't be listed: {problem}", rank=rank)
    return names


def _list(store: ReadableStore) -> str:
    """Return the names of checkpoints, or why they can't be listed, as a text."""
    try:
        return json.dumps([store.names(), ""])
    except OSError as error:
        return json.dumps([[], error.strerror or str(error)])


def _try(
    files: CheckpointFiles, prepare: Callable[[CheckpointReader | DcpReader], P]
) -> tuple[P | None, str, PacelineError | None]:
    """Return what was prepared, or the problem, and the error."""
    try:
        return prepare(open_checkpoint(files)), "", None
    except DamagedCheckpoint as error:
        return None, _first_line(error), error
    except PacelineError as error:
        return None, f"{_REFUSED}{_first_line(error)}", error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def find_problem(files: CheckpointFiles) -> str:
    """Return what is wrong with a checkpoint, after reading all of it; empty: it is intact."""
    try:
        reader = open_checkpoint(files)
        if isinstance(reader, CheckpointReader):
            for rank in range(reader.manifest.ranks):
                reader.verify(rank)
        else:
            reader.verify()
        reader.close()
    except (DamagedCheckpoint, UsageError) as error:
        return _first_line(error)
    return ""
