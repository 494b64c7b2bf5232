"""Copies of the state at one moment, in memory that every checkpoint reuses.

[Note: copied later] Between two steps of the optimizers, weights and optimizer state on the CPU change only if the
program itself writes to them. So the writing thread copies them while the next forward and backward run, and the next
step waits for that. Whether something was written to them meanwhile, in whatever way, is found by checksums: the
training thread takes those of the elements that belong into the checkpoint (which reads them once, where a copy reads
and writes), and the files must have the same ones. Otherwise the checkpoint is given up, and from then on everything is
copied at once. So that programs that always write between steps lose no checkpoint, the first one is copied at once,
and the step after it finds out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.checkpoint.format.manifest import StoredFile
from paceline.checkpoint.format.tensor_files import block_checksums, bytes_of
from paceline.checkpoint.parts.state_parts import TensorPart
from paceline.world.accelerator import host_buffer, synchronize

__all__ = ["Files", "HostBuffers", "StateCopy", "call_before_steps"]

_LATER_NBYTES = 64 << 10  # smaller tensors are copied at once

Files = Mapping[str, Mapping[str, TensorPart]]
"""Parts of tensors by file and label."""


class _Steady(NamedTuple):
    """A tensor that only steps of optimizers are expected to change, its copy, and its checksums when that began."""

    data: Tensor
    copy: Tensor
    checksums: str


class HostBuffers:
    """CPU memory for copies of tensors, reused by every checkpoint.

    Args:
        later: whether the writing thread may copy, see [Note: copied later]; steps must then call
            `StateCopy.before_step`.

    Attributes:
        later: whether it copies; None: to be found out.
    """

    def __init__(self, *, later: bool = False) -> None:
        self.later: bool | None = None if later else False
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, files: Files) -> StateCopy:
        """Return a copy of `files` as they are now; the next call overwrites it."""
        copies: dict[str, dict[str, TensorPart]] = {}
        now: list[tuple[Tensor, Tensor]] = []
        steady: dict[tuple[str, str], _Steady] = {}
        for file, parts in files.items():
            copies[file] = {}
            for label, part in parts.items():
                copy = self._buffer((file, label), part.data)
                copies[file][label] = replace(part, data=copy)
                is_steady = self.later is not False and _is_steady(part)
                if is_steady:
                    steady[file, label] = _Steady(part.data, copy, block_checksums(bytes_of(part.data)))
                if not (is_steady and self.later):
                    now.append((copy, part.data))
        _copy(now)
        self._buffers = {
            (file, label): part.data for file, parts in copies.items() for label, part in parts.items()
        }
        return StateCopy(copies, steady, self)

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and known.shape == tensor.shape and known.dtype is tensor.dtype:
            return known
        return host_buffer(tensor.shape, tensor.dtype, tensor.device)


class StateCopy:
    """A copy of the state, complete once the writing thread has called `finish`; see [Note: copied later].

    Args:
        files: with the copied tensors.
        steady: by file and label, tensors that are copied later, or of which it is to be found out whether they could.
        buffers: of the copies.

    Attributes:
        files: with the copied tensors, contiguous on the CPU.
    """

    def __init__(self, files: Files, steady: Mapping[tuple[str, str], _Steady], buffers: HostBuffers) -> None:
        self.files = files
        self._steady = list(steady.values())
        self._checksums = {place: each.checksums for place, each in steady.items()}
        self._buffers, self._later = buffers, buffers.later is True
        self._finished = threading.Event()

    def finish(self) -> None:
        """Copy what is left; called by the writing thread."""
        if self._later:
            try:
                _copy((each.copy, each.data) for each in self._steady)
            finally:
                self._steady = []
                self._finished.set()

    def before_step(self) -> None:
        """Wait until nothing is left to copy; the first time, find out whether the program has changed tensors."""
        if self._later:
            self._finished.wait()
        elif self._steady:
            same = all(block_checksums(bytes_of(each.data)) == each.checksums for each in self._steady)
            self._buffers.later, self._steady = same, []

    def check(self, written: Mapping[str, StoredFile]) -> None:
        """Raise unless files have the elements that the tensors had when the copy began.

        Raises:
            RuntimeError: the program has changed a tensor; names it.
        """
        for (file, label), checksums in self._checksums.items():
            chunk = written[file].chunks[label]
            if chunk.checksums != checksums:
                self._buffers.later = False
                raise RuntimeError(
                    f"the program changed {chunk.tensor!r} between save() and the next step of the optimizer; from now "
                    "on, save() copies everything before it returns"
                )


def _is_steady(part: TensorPart) -> bool:
    data = part.data
    return part.steady and data.device.type == "cpu" and data.nbytes >= _LATER_NBYTES and data.is_contiguous()


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    devices: set[torch.device] = set()
    for copy, data in pairs:
        copy.copy_(data, non_blocking=True)
        devices.add(data.device)
    for device in devices:
        synchronize(device)


def call_before_steps(
    optimizers: Iterable[torch.optim.Optimizer], method: weakref.WeakMethod[Callable[[], None]]
) -> None:
    """Have each step of the optimizers call a method first, as long as its object exists."""

    def call(*_: Any) -> None:
        bound = method()
        if bound is not None:
            bound()

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(call)
