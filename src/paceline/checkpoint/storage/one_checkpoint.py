"""A checkpoint by its path, as a store that holds only this one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from paceline.checkpoint.format.dcp_files import METADATA
from paceline.checkpoint.format.manifest import MANIFEST
from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles
from paceline.checkpoint.storage.local_folder import LocalFiles, LocalFolder

__all__ = ["ReadableStore", "store_at"]


class ReadableStore(Protocol):
    """Checkpoints to read."""

    @property
    def location(self) -> str:
        """Its path or URL."""
        ...

    def names(self) -> list[str]:
        """Return the names of checkpoints, newest first."""
        ...

    def files(self, name: str) -> CheckpointFiles:
        """Return the files of a checkpoint."""
        ...


class _OneCheckpoint:
    """A folder that is a checkpoint, whatever its name is."""

    def __init__(self, path: Path) -> None:
        self._path, self.location = path, str(path)

    def names(self) -> list[str]:
        return [self._path.name]

    def files(self, name: str) -> LocalFiles:
        return LocalFiles(self._path)


def store_at(path: str | Path) -> ReadableStore:
    """Return what is at a path: one checkpoint, or those of a run's folder, or of the ``checkpoint`` folder in it.

    Args:
        path: the path; it need not exist, and then holds no checkpoints.
    """
    folder = Path(path).absolute()
    if (folder / MANIFEST).exists() or (folder / METADATA).exists():
        return _OneCheckpoint(folder)
    inner = LocalFolder(folder / "checkpoint")
    return inner if inner.names() else LocalFolder(folder)
