"""Collectives of plain values: as JSON and tensors' bytes, so that no rank executes what another one sends.

torch's object collectives, which these replace, read pickles.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline._core.step_state import step_state
from paceline.errors import UsageError
from paceline.world.control_collectives import gather_rows, rank_and_size
from paceline.world.group_devices import group_device
from paceline.world.plain_values import pack, unpack_objects

__all__ = ["broadcast_value", "gather_values"]

_LENGTH = struct.Struct("<Q")


def gather_values(mine: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, by rank; tensors are copies, on this rank's device of their kind.

    Args:
        mine: numbers, strings, tensors; lists, tuples, dicts, dataclasses of them.
        group: the ranks; all have to call this.

    Raises:
        UsageError: the value holds something else.
    """
    if rank_and_size(group)[1] == 1:
        return [mine]
    data = _encode(mine)
    lengths = [int(row) for row in gather_rows(torch.tensor([data.numel()]), group)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: data.numel()] = data
    return [_decode(row[:length]) for row, length in zip(gather_rows(padded, group), lengths, strict=True)]


def broadcast_value(value: Any, source: int, group: ProcessGroup | None = None) -> Any:
    """Return the value of rank `source` of the group on all its ranks; tensors as in `gather_values`.

    Args:
        value: as for `gather_values`; used on rank `source` only.
        source: rank in the group.
        group: the ranks; all have to call this.

    Raises:
        UsageError: on all ranks, the value holds something else, or a class that this rank has not imported.
    """
    rank, ranks = rank_and_size(group)
    if ranks == 1:
        return value
    data, problem = torch.empty(0, dtype=torch.uint8), ""
    if rank == source:
        try:
            data = _encode(value)
        except UsageError as error:
            problem = str(error).partition("\n")[0]
            data = torch.frombuffer(bytearray(problem.encode()), dtype=torch.uint8)
    device = group_device(group)
    sizes = torch.tensor([data.numel(), bool(problem)], device=device)
    with step_state.waiting_for_peers():
        dist.broadcast(sizes, group=group, group_src=source)
        length, failed = (int(each) for each in sizes)
        data = data.to(device) if rank == source else torch.empty(length, dtype=torch.uint8, device=device)
        dist.broadcast(data, group=group, group_src=source)
    if failed:
        raise UsageError(
            bytes(data.tolist()).decode(), remedy="use tensors, numbers, texts, and containers of them"
        )
    return value if rank == source else _decode(data.cpu())


def _encode(value: Any) -> Tensor:
    """Return a value as bytes: the length of the JSON, the JSON, and the bytes of the tensors."""
    packed, tensors = pack(value, "the value", classes=True)
    for label, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UsageError(f"{label} is a tensor of {tensor.layout}, which is not a plain value")
    rows = [
        [label, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]
        for label, tensor in tensors.items()
    ]
    head = json.dumps([packed, rows]).encode()
    parts = [torch.frombuffer(bytearray(_LENGTH.pack(len(head)) + head), dtype=torch.uint8)]
    return torch.cat([*parts, *(_bytes_of(tensor) for tensor in tensors.values())])


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    """Return the value that `_encode` turned into bytes."""
    (length,) = _LENGTH.unpack(bytes(data[: _LENGTH.size].tolist()))
    start = _LENGTH.size + length
    packed, rows = json.loads(bytes(data[_LENGTH.size : start].numpy()))
    try:
        return unpack_objects(packed, dict(_tensors(data[start:], rows)).__getitem__)
    except ValueError as error:
        raise UsageError(
            f"the value of another rank can't be read: {error}",
            remedy="import its module on every rank, or use tensors, numbers, texts, lists and dicts",
        ) from error


def _tensors(data: Tensor, rows: list[Any]) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for label, name, shape, device in rows:
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is not a dtype")
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        yield label, data[start:stop].clone().view(dtype).reshape(shape).to(device)
        start = stop
