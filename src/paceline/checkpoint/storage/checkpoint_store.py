"""What the rest of `checkpoint` needs of a place that holds the checkpoints of a run: a folder, or an object store.

A checkpoint is a set of files. It counts once its manifest is there, which is written last. Ranks write their files on
a disk first (`SaveAttempt.folder`), publish them, and report; once all have, rank 0 completes the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

__all__ = ["CheckpointFiles", "CheckpointStore", "OpenFile", "SaveAttempt", "StoreLock"]


class OpenFile(Protocol):
    """A file of a complete checkpoint, open for reading by several threads."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on.

        Raises:
            OSError: they can't be read; EOFError: the file ends before.
        """
        ...

    def for_thread(self) -> AbstractContextManager[OpenFile]:
        """Return the same file for one thread that reads a part of it from the beginning to the end."""
        ...

    def close(self) -> None:
        """Release it; closing twice is no error.

        If the checkpoint is removed before, a file on a disk can be read to its end, and of a remote one only what is
        on this host.
        """
        ...


class CheckpointFiles(Protocol):
    """The files of one complete checkpoint."""

    @property
    def name(self) -> str:
        """Its name, such as ``step-00000200``."""
        ...

    @property
    def location(self) -> str:
        """Its path or URL."""
        ...

    def read(self, file: str) -> bytes:
        """Return a small file.

        Raises:
            FileNotFoundError: it is missing. OSError: it can't be read.
        """
        ...

    def open(self, file: str) -> OpenFile:
        """Open a file; errors as for `read`."""
        ...


class SaveAttempt(Protocol):
    """A checkpoint that the ranks are writing; each has its own object."""

    @property
    def folder(self) -> Path:
        """Existing folder on a disk in which this rank writes its files, flushed to the disk."""
        ...

    @property
    def prefix(self) -> str:
        """What precedes the names of published files in paths from the folder of the checkpoint; often empty."""
        ...

    def publish(self, names: Sequence[str]) -> None:
        """Make files of this rank in `folder` part of the checkpoint; return when they are durable.

        Raises:
            OSError: they can't be written.
        """
        ...

    def link(self, name: str, earlier: str) -> bool:
        """Make a file of an earlier complete checkpoint part of this one, without writing it again.

        Args:
            name: of the file, the path from the folder of that checkpoint.
            earlier: name of that checkpoint.

        Returns:
            False: that is not possible here.
        """
        ...

    def report(self, name: str, text: bytes) -> None:
        """Publish a small file that other ranks read with `reported`; atomic. Errors as for `publish`."""
        ...

    def reported(self, name: str) -> bytes | None:
        """Return a small file that a rank has published; None: not yet."""
        ...

    def complete(self, last: Sequence[tuple[str, bytes]], sizes: Mapping[str, int]) -> None:
        """Write small files in this order, the checkpoint being complete with the last; on rank 0.

        A checkpoint of the same name (from an earlier attempt at this step, which was skipped) is set aside.

        Args:
            last: names and contents.
            sizes: bytes of each file that ranks have published, by name.

        Raises:
            OSError: they can't be written, a published file has another size, or another run has taken over the place;
                earlier checkpoints stay.
        """
        ...

    def abandon(self) -> None:
        """Remove what was written, as far as possible; on rank 0, when no rank writes any more."""
        ...


class StoreLock(Protocol):
    """What makes this run the only one that writes."""

    def close(self) -> None:
        """Release it; closing twice is no error."""
        ...


class CheckpointStore(Protocol):
    """The checkpoints of a run."""

    @property
    def location(self) -> str:
        """Its path or URL."""
        ...

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, newest (highest step) first."""
        ...

    def files(self, name: str) -> CheckpointFiles:
        """Return the files of a complete checkpoint."""
        ...

    def prepare(self) -> None:
        """Make the place, and check that it can hold checkpoints; existing ones are not touched.

        Raises:
            UsageError: it can't be written.
        """
        ...

    def lock(self) -> StoreLock:
        """Make this run the only one that writes.

        Raises:
            CheckpointError: another run does; names it. UsageError: the place can't be written.
        """
        ...

    def remove_incomplete(self) -> None:
        """Remove what runs that died have left; only the holder of the lock may call this."""
        ...

    def put_probe(self, mark: str) -> None:
        """Leave a mark by which ranks find out whether they see the same place; on rank 0."""
        ...

    def sees_probe(self, mark: str) -> bool:
        """Return whether this rank sees the mark."""
        ...

    def remove_probe(self, mark: str) -> None:
        """Remove the mark."""
        ...

    def begin(self, step: int, mark: str) -> SaveAttempt:
        """Begin to write the checkpoint of `step`; `mark` identifies the run, the same on all ranks."""
        ...

    def set_aside(self, name: str) -> None:
        """Take a damaged checkpoint out of `names`, but keep its files."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove complete checkpoints, as far as possible, and damaged ones older than all that are left."""
        ...
