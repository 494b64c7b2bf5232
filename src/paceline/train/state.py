"""Weights and optimizer state to the disk and back: safetensors and JSON, never pickle.

How a checkpoint is written, so that there always is a complete one:

    1. all ranks write into step-….tmp and flush their files to the disk
    2. when all have, rank 0 checks that every file is there, writes checkpoint.json and renames the folder
    3. only then are older checkpoints removed
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.durable import flush
from paceline.errors import PacelineError, UsageError
from paceline.sync.engine import DataParallel
from paceline.sync.shard import ShardedOptimizer
from paceline.train.pieces import StatePiece, load_pieces, pieces_of
from paceline.train.snapshot import FORMAT, Snapshot, optimizer_file
from paceline.train.tensor_file import read_tensors, write_tensors
from paceline.world import World
from paceline.world.agree import barrier

__all__ = ["load_model", "load_optimizer", "save"]


def save(
    folder: Path,
    step: int,
    model: DataParallel,
    optimizer: ShardedOptimizer,
    world: World,
    facts: Mapping[str, Any],
) -> None:
    """Write a checkpoint of the state after `step` updates; every rank must call this.

    Args:
        folder: where checkpoints lie, the same for all ranks and on a disk that all of them share.
        step: updates so far.
        model: the wrapped model.
        optimizer: its optimizer.
        world: the ranks.
        facts: what else is to be remembered; values that JSON can hold.

    Raises:
        PacelineError: it can't be written, or a rank's file did not arrive. The checkpoint before it stays.
    """
    final = folder / f"step-{step:08d}"
    growing = final.with_suffix(".tmp")
    try:
        if world.rank == 0:
            shutil.rmtree(growing, ignore_errors=True)
            growing.mkdir(parents=True)
        barrier()
        weights = _whole_weights(model.module, keep=world.rank == 0)
        if world.rank == 0:
            write_tensors(growing / "model.safetensors", weights)
        _write_pieces(optimizer_file(growing, world.rank), pieces_of(model, optimizer, world.rank))
        barrier()
        if world.rank == 0:
            _complete(growing, final, world, {"format": FORMAT, "step": step, **facts})
    except OSError as error:
        raise PacelineError(
            f"can't write checkpoint {str(final)!r}: {error.strerror or error}",
            rank=world.rank,
            step=step,
            remedy="the checkpoint before it is untouched: make room and go on with --resume",
        ) from error


@torch.no_grad()
def load_model(snapshot: Snapshot, net: nn.Module) -> None:
    """Fill the parameters of `net`, which is not wrapped yet, with those of `snapshot`.

    Raises:
        UsageError: the file is damaged or holds other parameters.
    """
    weights = dict(read_tensors(snapshot.weights))
    params = dict(net.named_parameters())
    different = sorted(params.keys() ^ weights.keys())
    different += [name for name in params if name in weights and params[name].shape != weights[name].shape]
    if different:
        raise UsageError(
            f"checkpoint {str(snapshot.path)!r} is of another model: {different[0]!r} does not fit",
            remedy="resume with the options that the run began with, or start anew with --overwrite",
        )
    for name, param in params.items():
        param.copy_(weights[name])


def load_optimizer(snapshot: Snapshot, model: DataParallel, optimizer: ShardedOptimizer, rank: int) -> None:
    """Give `optimizer` the state it had, cut to fit the ranks and the strategy of now.

    Raises:
        UsageError: a file is missing or damaged.
    """
    pieces = [piece for path in snapshot.optimizer_of_rank for piece in _read_pieces(path)]
    load_pieces(model, optimizer, pieces, rank)


def _whole_weights(net: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Return every parameter whole, nothing where not `keep`; gathers sharded ones, so all ranks must call."""
    weights = {}
    for name, param in net.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        if keep:
            weights[name] = whole.detach()
    return weights


def _write_pieces(path: Path, pieces: list[StatePiece]) -> None:
    tensors = {
        f"{piece.name}:{piece.start}:{piece.stop}:{key}": value
        for piece in pieces
        for key, value in piece.state.items()
    }
    write_tensors(path, tensors)


def _read_pieces(path: Path) -> list[StatePiece]:
    states: dict[tuple[str, int, int], dict[str, Tensor]] = {}
    for label, value in read_tensors(path):
        name, start, stop, key = label.rsplit(":", 3)
        states.setdefault((name, int(start), int(stop)), {})[key] = value
    return [StatePiece(*place, state) for place, state in states.items()]


def _complete(growing: Path, final: Path, world: World, facts: Mapping[str, Any]) -> None:
    """Turn what the ranks wrote into the latest checkpoint, and remove the others."""
    for rank in range(world.size):
        if not (optimizer_file(growing, rank)).is_file():
            raise FileNotFoundError(0, f"rank {rank} wrote to another disk; the run folder must be shared")
    about = growing / "checkpoint.json"
    about.write_text(json.dumps({"ranks": world.size, **facts}, indent=2) + "\n", encoding="utf-8")
    flush(about)
    flush(growing)
    os.rename(growing, final)
    flush(final.parent)
    for path in final.parent.glob("step-*"):
        if path != final:
            shutil.rmtree(path, ignore_errors=True)
