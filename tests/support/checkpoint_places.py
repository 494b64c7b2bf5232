"""Places for checkpoints, of every kind: what a test needs to make stores of the same place."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST, Manifest
from paceline.checkpoint.storage.checkpoint_store import CheckpointStore, SaveAttempt
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.checkpoint.storage.remote_folder import RemoteFolder

__all__ = ["KINDS", "Place", "save", "small_files"]

KINDS = ("memory", "local", "file", "sftp", "s3")


@dataclass
class Place:
    """A place; `store()` returns a new store of it, as another process would make.

    Attributes:
        url: of the place.
        options: of fsspec's implementation.
        cache: folder of this host.
        is_local: whether it is a plain folder.
        closed: called by the fixture at the end.
    """

    url: str
    options: dict[str, Any]
    cache: Path
    is_local: bool = False
    closers: list[Callable[[], object]] = field(default_factory=list)

    def store(self, **options: Any) -> Any:
        """Return a store; keyword arguments are RemoteFolder's."""
        if self.is_local:
            return LocalFolder(self.url)
        given = {"cache": self.cache, "options": self.options, "reads_cache": True, **options}
        return RemoteFolder(given.pop("url", self.url), **given)

    def owned(self, **options: Any) -> Any:
        """Return a store of which this run is the owner until the end of the test."""
        store = self.store(**options)
        store.prepare()
        self.closers.append(store.lock().close)
        return store


def small_files(text: str) -> list[tuple[str, bytes]]:
    """Return files that complete a checkpoint."""
    content = text.encode()
    return [(MANIFEST, content), (CHECKSUM, Manifest.checksum_line(content))]


def save(
    store: CheckpointStore, step: int, files: dict[str, bytes] | None = None, mark: str = ""
) -> SaveAttempt:
    """Write a complete checkpoint, as a run with one rank; return the attempt."""
    files = {"model.safetensors": b"weights"} if files is None else files
    attempt = store.begin(step, mark or uuid.uuid4().hex[:12])
    for name, content in files.items():
        (attempt.folder / name).write_bytes(content)
    attempt.publish(list(files))
    sizes = {name: len(content) for name, content in files.items()}
    attempt.complete(small_files(f"step {step} {attempt.prefix}"), sizes)
    return attempt
