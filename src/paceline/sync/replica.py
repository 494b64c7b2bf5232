"""The same model on every rank: verified, then broadcast from rank 0."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from paceline.errors import MismatchError
from paceline.sync.wire import Wire

__all__ = ["broadcast_tensors", "describe", "verify_same"]


def describe(module: torch.nn.Module, plan: object) -> list[str]:
    """Return one line per fact about `module` and `plan` on which all ranks must agree, in order."""
    lines = [f"sync plan: {plan}"]
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            grad = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"{kind} {name!r}: shape {list(tensor.shape)}, {dtype}{grad}")
    return lines


def verify_same(wire: Wire, lines: Sequence[str], subject: str) -> None:
    """Check that all ranks hold the same lines; costs one tiny all-gather where they do.

    Raises:
        MismatchError: on every rank alike, naming the first line that differs from rank 0's and the ranks.
    """
    if wire.size == 1:
        return
    text = json.dumps(list(lines)).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
    facts = _all_gather(wire, torch.tensor([digest, len(text)], dtype=torch.int64))
    digests, lengths = zip(*(row.tolist() for row in facts), strict=True)
    if len(set(digests)) == 1:
        return
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = _all_gather(wire, padded)
    told = [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, lengths, strict=True)]
    raise _first_difference(told, subject)


def _first_difference(told: Sequence[Sequence[str]], subject: str) -> MismatchError:
    """Return the error that names the first line on which a rank differs from rank 0."""
    reference = told[0]
    differing = [rank for rank, lines in enumerate(told) if lines != reference]
    rank = differing[0]
    pairs = itertools.zip_longest(reference, told[rank], fillvalue="nothing more")
    mine, theirs = next((a, b) for a, b in pairs if a != b)
    ranks = ", ".join(map(str, differing))
    return MismatchError(
        f"{subject} differs between ranks: rank 0 has {mine}; rank {rank} has {theirs}"
        + (f" (ranks that differ from rank 0: {ranks})" if len(differing) > 1 else ""),
        rank=rank,
        remedy="build the same model, in the same order and with the same options, on every rank",
    )


def _all_gather(wire: Wire, row: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's `row` (the same shape on all ranks) on the CPU."""
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in wire.backend else row.device
    row = row.to(device)
    rows = [torch.empty_like(row) for _ in range(wire.size)]
    dist.all_gather(rows, row, group=wire.group)
    return [each.cpu() for each in rows]


def broadcast_tensors(
    wire: Wire, tensors: Iterable[torch.Tensor], *, source: int = 0, cap_nbytes: int = 64 << 20
) -> None:
    """Copy the values of rank `source` to all ranks, many tensors to a message.

    Args:
        wire: the ranks.
        tensors: the same shapes and dtypes in the same order on all ranks; written in place.
        source: the rank to copy from.
        cap_nbytes: most bytes to pack into one message.
    """
    if wire.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same_kind in kinds.values():
        for batch in _batches(same_kind, cap_nbytes):
            _broadcast_packed(wire, batch, source)


def _batches(tensors: Sequence[torch.Tensor], cap_nbytes: int) -> Iterable[list[torch.Tensor]]:
    batch, held = [], 0
    for tensor in tensors:
        if batch and held + tensor.nbytes > cap_nbytes:
            yield batch
            batch, held = [], 0
        batch.append(tensor)
        held += tensor.nbytes
    yield batch


def _broadcast_packed(wire: Wire, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Send the tensors as bytes, so that every dtype travels (gloo refuses some)."""
    packed = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    wire.broadcast(packed, source)
    if wire.rank == source:
        return
    at = 0
    for tensor in tensors:
        part = packed[at : at + tensor.nbytes].clone()  # a copy starts at an aligned address
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        at += tensor.nbytes
