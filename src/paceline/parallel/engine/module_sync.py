"""The same model on every rank: what to verify, and the broadcast from rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.parallel.engine.comm import Comm

__all__ = ["broadcast_tensors", "model_signature"]


def model_signature(module: torch.nn.Module, plan: object) -> list[str]:
    """Return one line per fact about `module` and `plan` on which all ranks must agree, in order."""
    lines = [f"sync plan: {plan}"]
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            grad = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"{kind} {name!r}: shape {list(tensor.shape)}, {dtype}{grad}")
    return lines


def broadcast_tensors(
    comm: Comm, tensors: Iterable[torch.Tensor], *, source: int = 0, cap_nbytes: int = 64 << 20
) -> None:
    """Copy the values of rank `source` to all ranks, many tensors to a message.

    Args:
        comm: the ranks.
        tensors: the same shapes and dtypes in the same order on all ranks; written in place.
        source: the rank to copy from.
        cap_nbytes: most bytes to pack into one message.
    """
    if comm.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same_kind in kinds.values():
        for batch in _batches(same_kind, cap_nbytes):
            _broadcast_packed(comm, batch, source)


def _batches(tensors: Sequence[torch.Tensor], cap_nbytes: int) -> Iterable[list[torch.Tensor]]:
    batch, held = [], 0
    for tensor in tensors:
        if batch and held + tensor.nbytes > cap_nbytes:
            yield batch
            batch, held = [], 0
        batch.append(tensor)
        held += tensor.nbytes
    yield batch


def _broadcast_packed(comm: Comm, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Send the tensors as bytes, so that every dtype travels (gloo refuses some)."""
    packed = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    comm.broadcast(packed, source)
    if comm.rank == source:
        return
    at = 0
    for tensor in tensors:
        part = packed[at : at + tensor.nbytes].clone()  # a copy starts at an aligned address
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        at += tensor.nbytes
