"""Checkpoints written by the real writing threads of several ranks in one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paceline.checkpoint.background_saver import BackgroundSave
from paceline.checkpoint.checkpoint_contents import CheckpointContents
from paceline.checkpoint.format.dcp_files import dcp_file
from paceline.checkpoint.parts.state_parts import StateParts, TensorPart
from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles, CheckpointStore
from paceline.checkpoint.storage.local_folder import checkpoint_name

__all__ = ["DTYPES", "small_blocks", "state_of", "tensor_bytes", "without_flushes", "write_checkpoint"]

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
"""All dtypes of tensors in checkpoints."""


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the elements of a tensor as bytes, in the order of its indices."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def state_of(tensors: Mapping[str, Tensor], rank: int = 0, file: str = "") -> StateParts:
    """Return what a rank writes that has these whole tensors."""
    parts = StateParts(rank)
    for name, tensor in tensors.items():
        parts.add(TensorPart.whole(name, tensor.contiguous()), file=file, label=name if file else "")
    return parts


def write_checkpoint(
    store: CheckpointStore,
    step: int,
    ranks: Sequence[StateParts],
    *,
    container: str = "safetensors",
    states: Sequence[Any] = (),
    values: Mapping[str, bytes] | None = None,
    **head: Any,
) -> CheckpointFiles:
    """Write a checkpoint of several ranks, and return its files.

    Args:
        store: where.
        step: of the checkpoint.
        ranks: what each rank writes.
        container: of the files.
        states: each rank's own state.
        values: with ``container="dcp"``, what rank 0 writes besides tensors.
        head: further entries of the manifest.
    """
    shared = {"container": container, "aliases": {}, "optimizers": {}}
    saves = []
    for rank, parts in enumerate(ranks):
        if container == "dcp":
            parts = parts.in_files(dcp_file(rank), dcp_file(rank, 1))
        state = states[rank] if states else {}
        contents = CheckpointContents(parts, state, shared, (values or {}) if rank == 0 else {})
        save = BackgroundSave(
            partial(store.begin, step, "mark"),
            contents,
            {"step": step, "facts": {}, "written": {}, **shared, **head},
            began=time.perf_counter(),
            rank=rank,
            ranks=len(ranks),
            remove_old=lambda: None,
            unchanged={},
            earlier="",
        )
        saves.append(save)
    failures = [save.wait_written() for save in saves]
    for save in saves:
        save.finish(abandon=any(failures))
        save.join()
    assert not any(failures), failures
    assert saves[0].complete, saves[0].failure
    return store.files(checkpoint_name(step))


@contextlib.contextmanager
def small_blocks(nbytes: int, stride_nbytes: int) -> Iterator[None]:
    """Give tensors a checksum per `nbytes` instead of 4 MiB, and read and write in strides of `stride_nbytes`."""
    format = "paceline.checkpoint.format"
    with contextlib.ExitStack() as stack:
        for module in ("manifest", "tensor_files", "checkpoint_reader"):
            stack.enter_context(mock.patch(f"{format}.{module}.BLOCK_NBYTES", nbytes))
        for module in ("tensor_files", "checkpoint_reader"):
            stack.enter_context(mock.patch(f"{format}.{module}._STRIDE_NBYTES", stride_nbytes))
        yield


@contextlib.contextmanager
def without_flushes() -> Iterator[None]:
    """Let writing wait neither for the disk nor for a timer, for tests that write hundreds of checkpoints."""
    with mock.patch("os.fsync"), mock.patch("paceline.checkpoint.background_saver._POLL_SECONDS", 0.001):
        yield
