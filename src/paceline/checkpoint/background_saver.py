"""Writes a checkpoint while training goes on.

    training thread, every rank     copy the state (this is all that training waits for), hand it over, go on
    writing thread, every rank      write and flush the files; say so in part-<rank>.json, in the growing folder
    writing thread, rank 0          wait for the parts of all ranks; write the manifest; rename the folder; only then
                                    remove older checkpoints, for which nobody waits

The threads of the ranks meet in the folder alone, not in the process group, whose collectives belong to training.
A rank that can't write says so in its part if it can. Before the next checkpoint the ranks ask one another how the
last one went (`BackgroundSave.settle`); so one that can't be completed is given up on all of them, and
training goes on.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline._core.files import write_text
from paceline.checkpoint.format.checkpoint_folder import CheckpointFolder, CheckpointLock
from paceline.checkpoint.format.manifest import Manifest, TensorFile
from paceline.checkpoint.format.safetensors_writer import write_safetensors

__all__ = ["BackgroundSave", "Buffers", "RankShare"]

_LOOK_SECONDS = 0.02
_END_SECONDS = 60.0  # how long rank 0's thread waits for parts after the program has ended


@dataclass(frozen=True)
class RankShare:
    """What one rank writes of a checkpoint.

    Attributes:
        files: the tensors of each of its files, copied.
        state: everything else it answers for, as JSON can say it.
        about: of rank 0: the manifest's step, facts, weights and written.
    """

    files: Mapping[str, Mapping[str, Tensor]]
    state: Any
    about: Mapping[str, Any]


class Buffers:
    """Memory on the CPU that tensors are copied into, the same one every time."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}

    def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return copies of the tensors in `files`, which are overwritten by the next call."""
        held: dict[tuple[str, str], Tensor] = {}
        on_gpu = False
        for file, tensors in files.items():
            for label, tensor in tensors.items():
                held[file, label] = self._buffer((file, label), tensor)
                held[file, label].copy_(tensor, non_blocking=tensor.is_cuda)
                on_gpu |= tensor.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        self._held = held
        return {file: {label: held[file, label] for label in tensors} for file, tensors in files.items()}

    def _buffer(self, place: tuple[str, str], tensor: Tensor) -> Tensor:
        there = self._held.get(place)
        if there is not None and there.shape == tensor.shape and there.dtype is tensor.dtype:
            return there
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class BackgroundSave:
    """One checkpoint on its way to the disk.

    Args:
        folder: where checkpoints are.
        growing: the folder that it grows in.
        share: what this rank writes.
        rank, ranks: this rank, and how many there are.
        keep: how many complete checkpoints stay.
        lock: of the folder, on rank 0; held until the end, even if nobody else holds it any more.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        growing: Path,
        share: RankShare,
        rank: int,
        ranks: int,
        keep: int,
        lock: CheckpointLock | None = None,
    ) -> None:
        self.failure = ""
        """Why this rank could not write its part."""
        self.path: Path | None = None
        """On rank 0, where the checkpoint is once it is complete."""

        self._folder, self._growing, self._share = folder, growing, share
        self._rank, self._ranks, self._keep, self._lock = rank, ranks, keep, lock
        self._written, self._over = threading.Event(), threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-checkpoint")
        self._thread.start()

    # ------------------------------------------------------------------ what the training thread asks

    def wait_written(self) -> str:
        """Wait until this rank's part is on the disk; return why it is not, or an empty text."""
        self._written.wait()
        return self.failure

    def finish(self, *, given_up: bool) -> None:
        """Wait until it is complete, which is rank 0's to do, or removed if it is `given_up`."""
        if given_up:
            self._given_up.set()
        self._over.wait()

    def end(self) -> None:
        """Wait for the thread, which may still be removing older checkpoints."""
        self._thread.join()

    # ------------------------------------------------------------------ the writing thread

    def _run(self) -> None:
        try:
            part = self._write()
        except Exception as error:  # noqa: BLE001 — a thread's exception would be printed and forgotten
            self.failure = _reason(error)
            part = {"failure": self.failure}
        try:
            write_text(self._part(self._rank), json.dumps(part))
        except OSError as error:
            self.failure = self.failure or _reason(error)
        self._written.set()
        if self._rank == 0:
            try:
                self._complete()
            except Exception as error:  # noqa: BLE001 — the training thread waits for this thread's end
                self.failure = _reason(error)
            if self.path is None:
                self._folder.remove(self._growing)
        self._over.set()
        if self.path is not None:
            self._folder.remove_old(self._keep)

    def _part(self, rank: int) -> Path:
        return self._growing / f"part-{rank}.json"

    def _write(self) -> dict[str, Any]:
        self._growing.mkdir(exist_ok=True)
        files = {
            name: asdict(write_safetensors(self._growing / name, tensors))
            for name, tensors in self._share.files.items()
        }
        return {"files": files, "state": self._share.state}

    def _complete(self) -> None:
        """Wait for the parts of all ranks, and make them the newest checkpoint."""
        parts = [self._await_part(rank) for rank in range(self._ranks)]
        if any(part is None or "failure" in part for part in parts):
            return
        good = [part for part in parts if part is not None]
        files = {name: TensorFile.of(told) for part in good for name, told in part["files"].items()}
        manifest = Manifest(files=files, states=[part["state"] for part in good], **self._share.about)
        for rank in range(self._ranks):
            os.unlink(self._part(rank))
        self.path = self._folder.complete_with(self._growing, manifest)

    def _await_part(self, rank: int) -> dict[str, Any] | None:
        """Return what `rank` wrote, None once it is clear that nothing will come."""
        left = _END_SECONDS
        while not (there := self._part(rank)).exists():
            if self._given_up.wait(_LOOK_SECONDS) or left <= 0:
                return None
            if not threading.main_thread().is_alive():
                left -= _LOOK_SECONDS
        return json.loads(there.read_bytes())


def _reason(error: Exception) -> str:
    """Return why a checkpoint could not be written, in one line."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
