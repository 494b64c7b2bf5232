"""Writes a checkpoint while training continues.

    training thread, all ranks     copy the state (training waits for nothing else) and hand it over
    writing thread, all ranks      write and flush the files; report in part-<rank>.json in the staging folder
    writing thread, rank 0         wait for the parts of all ranks; write the manifest; rename the folder; only then
                                   remove older checkpoints, which no rank waits for

The writing threads communicate through the folder alone: collectives of the process group belong to training. A rank
that can't write reports that in its part, if it can. Before the next checkpoint the ranks exchange how the last one
went (`Checkpoint.wait`), so that all abandon one that can't be completed, and training continues.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline._core.file_lock import FolderLock
from paceline._core.files import make_private_folder, write_text
from paceline._core.json_codec import decode
from paceline.checkpoint.checkpoint_contents import CheckpointContents
from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder
from paceline.checkpoint.format.manifest import Manifest, TensorFile
from paceline.checkpoint.format.tensor_files import write_safetensors
from paceline.checkpoint.parts.rank_digests import warn_of_differences
from paceline.world.accelerator import host_buffer, synchronize

__all__ = ["BackgroundSave", "HostBuffers"]

_POLL_SECONDS = 0.02
_EXIT_SECONDS = 60.0  # for which rank 0's thread waits for parts after the main thread has ended


class HostBuffers:
    """CPU memory for copies of tensors, reused by every checkpoint."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return copies of the tensors in `files`; the next call overwrites them."""
        copies: dict[str, dict[str, Tensor]] = {}
        devices: set[torch.device] = set()
        for file, tensors in files.items():
            copies[file] = {}
            for label, tensor in tensors.items():
                copies[file][label] = copy = self._buffer((file, label), tensor)
                copy.copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
        for device in devices:
            synchronize(device)
        self._buffers = {
            (file, label): copy for file, tensors in copies.items() for label, copy in tensors.items()
        }
        return copies

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and known.shape == tensor.shape and known.dtype is tensor.dtype:
            return known
        return host_buffer(tensor.shape, tensor.dtype, tensor.device)


class BackgroundSave:
    """A checkpoint that is being written.

    Args:
        folder: the run's checkpoints.
        staging: the folder that is written.
        contents: what this rank writes, with copied tensors.
        head: on rank 0, the manifest's step, facts and written.
        rank, ranks: this rank, and the number of ranks.
        keep: number of complete checkpoints to keep.
        lock: of the folder, on rank 0; referenced until the end, so that it stays held.
        previous: the save before, whose thread may still remove older checkpoints; joined by this one's.

    Attributes:
        failure: why this rank could not write; empty: it could.
        path: on rank 0, the complete checkpoint.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        staging: Path,
        contents: CheckpointContents,
        head: Mapping[str, Any],
        *,
        rank: int,
        ranks: int,
        keep: int,
        lock: FolderLock | None = None,
        previous: BackgroundSave | None = None,
    ) -> None:
        self.failure = ""
        self.path: Path | None = None
        self._folder, self._staging, self._contents, self._head = folder, staging, contents, head
        self._rank, self._ranks, self._keep, self._lock = rank, ranks, keep, lock
        self._previous = previous
        self._written, self._finished, self._abandoned = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="paceline-checkpoint")
        self._thread.start()

    # ------------------------------------------------------------------ called by the training thread

    def wait_written(self) -> str:
        """Wait until this rank's files are on the disk; return why they are not, or an empty text."""
        self._written.wait()
        return self.failure

    def finish(self, *, abandon: bool) -> None:
        """Wait until rank 0 has completed the checkpoint, or removed it with `abandon`."""
        if abandon:
            self._abandoned.set()
        self._finished.wait()

    def join(self) -> None:
        """Wait for this thread and those of earlier saves, which may still remove older checkpoints."""
        self._thread.join()

    # ------------------------------------------------------------------ the writing thread

    def _run(self) -> None:
        try:
            part = self._write()
        except Exception as error:  # noqa: BLE001 — reported to all ranks instead of ending the thread
            self.failure = _reason(error)
            part = {"failure": self.failure}
        try:
            write_text(self._part_file(self._rank), json.dumps(part), private=True)
        except OSError as error:
            self.failure = self.failure or _reason(error)
        self._written.set()
        if self._rank == 0:
            try:
                self._complete()
            except Exception as error:  # noqa: BLE001 — the training thread waits for the end of this one
                self.failure = _reason(error)
            if self.path is None:
                shutil.rmtree(self._staging, ignore_errors=True)
        self._finished.set()
        if self._previous is not None:
            self._previous.join()
            self._previous = None
        if self.path is not None:
            self._folder.remove_old(self._keep)

    def _part_file(self, rank: int) -> Path:
        return self._staging / f"part-{rank}.json"

    def _write(self) -> dict[str, Any]:
        make_private_folder(self._staging)
        files = {
            name: asdict(write_safetensors(self._staging / name, tensors))
            for name, tensors in self._contents.files.items()
        }
        return {"files": files, "state": self._contents.state}

    def _complete(self) -> None:
        """Wait for the parts of all ranks, and make them the newest checkpoint."""
        parts = [self._wait_for_part(rank) for rank in range(self._ranks)]
        if any(part is None or "failure" in part for part in parts):
            return
        written = [part for part in parts if part is not None]
        files = decode([part["files"] for part in written], list[dict[str, TensorFile]], "part")
        by_name = {name: file for each in files for name, file in each.items()}
        states = [part["state"] for part in written]
        warn_of_differences(str(self._folder.path), states)
        manifest = Manifest(files=by_name, states=states, weights=self._contents.weights, **self._head)
        for rank in range(self._ranks):
            os.unlink(self._part_file(rank))
        self.path = self._folder.complete_with(self._staging, manifest)

    def _wait_for_part(self, rank: int) -> dict[str, Any] | None:
        """Return the part of `rank`, None once it is clear that none will come."""
        left = _EXIT_SECONDS
        while not (path := self._part_file(rank)).exists():
            if self._abandoned.wait(_POLL_SECONDS) or left <= 0:
                return None
            if not threading.main_thread().is_alive():
                left -= _POLL_SECONDS
        return json.loads(path.read_bytes())


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
