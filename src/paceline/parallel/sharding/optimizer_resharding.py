"""Moves optimizer state between layouts: gathered from the shards of all ranks, or cut into other shards.

Between layouts the state of a parameter is a dictionary: per-element tensors, flattened in the parameter's storage
order, and entries of the whole parameter, such as ``step``. A shard is ``{"start", "stop", "state"}``: the state of the
elements from `start` up to `stop`.

Whether an optimizer is elementwise, and which entries of its state are per-element, is found by trying it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.engine.bucket import Bucket, ShardPiece, shaped_as, storage_numel
from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import gather_texts

__all__ = [
    "Shards",
    "StateOf",
    "defaults_with",
    "elementwise_keys",
    "flatten_state",
    "gather_state",
    "is_elementwise",
    "merge_shards",
    "slice_state",
    "unflatten_state",
    "whole_shard",
]

Shards = dict[str, list[dict[str, Any]]]
"""Shards by parameter name."""

StateOf = dict[str, dict[str, Any]]
"""State by parameter name, then by its own name: ``state["head.weight"]["exp_avg"]``."""


def flatten_state(state: Mapping[str, Any], param: Tensor, elementwise: Collection[str]) -> dict[str, Any]:
    """Return a parameter's state as it is between layouts; `elementwise` names the per-element entries."""
    return {key: _flat(value, param) if key in elementwise else value for key, value in state.items()}


def _flat(value: Tensor, param: Tensor) -> Tensor:
    real = value.dtype.to_real() if value.is_complex() else value.dtype
    flat = torch.empty(storage_numel(param), dtype=real, device=value.device)
    shaped_as(param, flat).copy_(value)
    return flat


def unflatten_state(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a parameter's state as optimizers of whole parameters hold it; undoes `flatten_state`."""
    numel = storage_numel(param)
    return {
        key: shaped_as(param, value)
        if isinstance(value, Tensor) and value.dim() and value.numel() == numel
        else value
        for key, value in state.items()
    }


def gather_state(
    held: Sequence[tuple[ShardPiece, Mapping[str, Any]]], buckets: Sequence[Bucket], comm: Comm
) -> StateOf:
    """Return the whole state of every parameter; a collective.

    Args:
        held: this rank's pieces of the parameters, each with its state.
        buckets: of the parameters.
        comm: the ranks.
    """
    whole, dtype_of = _gather_entries(held, comm)
    for bucket in buckets:
        for key in sorted({key for slot in bucket.slots for key in dtype_of.get(slot.name, {})}):
            slots = [slot for slot in bucket.slots if key in dtype_of.get(slot.name, {})]
            dtype = dtype_of[slots[0].name][key]
            flat = torch.zeros(bucket.flat.numel(), dtype=dtype, device=bucket.flat.device)
            for piece, state in held:
                if piece.slot.bucket is bucket and key in state:
                    first = piece.slot.start + piece.start
                    flat[first : first + piece.stop - piece.start] = state[key]
            comm.all_gather(flat).wait()
            for slot in slots:
                whole[slot.name][key] = flat[slot.start : slot.start + slot.numel].clone()
    return whole


def _gather_entries(
    held: Sequence[tuple[ShardPiece, Mapping[str, Any]]], comm: Comm
) -> tuple[StateOf, dict[str, dict[str, torch.dtype]]]:
    """Return the entries of whole parameters, and the dtypes of the per-element ones, from all ranks."""
    mine: dict[str, dict[str, list[Any]]] = {}
    for piece, state in held:
        for key, value in state.items():
            mine.setdefault(piece.slot.name, {})[key] = _describe(value, piece)
    whole: StateOf = {}
    dtype_of: dict[str, dict[str, torch.dtype]] = {}
    for text in gather_texts(json.dumps(mine), comm.group):
        for name, described in json.loads(text).items():
            for key, (kind, value) in described.items():
                dtype = getattr(torch, kind) if kind else None
                if value is None and dtype is not None:
                    dtype_of.setdefault(name, {})[key] = dtype
                    whole.setdefault(name, {})
                else:
                    number = value if dtype is None else torch.tensor(value, dtype=dtype)
                    whole.setdefault(name, {})[key] = number
    return whole, dtype_of


def _describe(value: Any, piece: ShardPiece) -> list[Any]:
    """Return [dtype, number]: no number for a per-element entry, no dtype for anything but a tensor."""
    if not isinstance(value, Tensor):
        return ["", value]
    kind = str(value.dtype).removeprefix("torch.")
    per_element = value.dim() and value.numel() == piece.stop - piece.start
    return [kind, None if per_element else value.tolist()]


def whole_shard(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a parameter's flattened state as its only shard."""
    return {"start": 0, "stop": storage_numel(param), "state": state}


def merge_shards(shards_of_ranks: Sequence[Mapping[str, Sequence[dict[str, Any]]]]) -> Shards:
    """Return the shards of each parameter that any rank holds, each once."""
    found: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for shards in shards_of_ranks:
        for name, parts in shards.items():
            found.setdefault(name, {}).update(((part["start"], part["stop"]), part) for part in parts)
    return {name: list(parts.values()) for name, parts in found.items()}


def slice_state(
    name: str, start: int, stop: int, shards: Sequence[Mapping[str, Any]], elementwise: frozenset[str]
) -> dict[str, Any]:
    """Return the state of a parameter's elements from `start` up to `stop`, assembled from shards.

    Args:
        name: of the parameter.
        start: first element, in storage order.
        stop: one past the last element.
        shards: of the parameter.
        elementwise: names of the per-element entries; shapes can't tell for a parameter without dimensions.

    Raises:
        UsageError: the shards don't cover all elements.
    """
    state: dict[str, Any] = {}
    covered = 0
    for shard in shards:
        low, high = max(start, shard["start"]), min(stop, shard["stop"])
        if low >= high:
            continue
        covered += high - low
        for key, value in shard["state"].items():
            if key in elementwise:
                value = value.reshape(-1)
                whole = state.setdefault(key, value.new_zeros(stop - start))
                whole[low - start : high - start] = value[low - shard["start"] : high - shard["start"]]
            else:  # an entry of the whole parameter, such as the step count
                state[key] = value.clone() if isinstance(value, Tensor) else value
    if any(shard["state"] for shard in shards) and covered < stop - start:
        raise UsageError(
            f"the state of parameter {name!r} covers {covered} of {stop - start} elements",
            remedy="load the shards of all ranks that wrote the state",
        )
    return state


def defaults_with(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's defaults with the options, once it accepts them."""
    try:
        return dict(optimizer([torch.nn.Parameter(torch.zeros(2, 2))], **options).defaults)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{optimizer.__name__} rejects its options: {error}") from error


def is_elementwise(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool:
    """Return whether updating two halves of a matrix, flattened, equals updating the matrix."""
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(4, 4, generator=generator), torch.randn(3, 4, 4, generator=generator)
    whole = torch.nn.Parameter(start.clone())
    halves = [torch.nn.Parameter(half.clone()) for half in start.reshape(2, 8)]
    try:
        one, two = optimizer([whole], **options), optimizer(halves, **options)
        for grad in grads:
            whole.grad = grad.clone()
            for half, part in zip(halves, grad.reshape(2, 8), strict=True):
                half.grad = part.clone()
            one.step()
            two.step()
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # it needs matrices, a closure, sparse gradients …
    return torch.allclose(whole.detach().reshape(2, 8), torch.stack([half.detach() for half in halves]))


def elementwise_keys(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> frozenset[str]:
    """Return the names of the per-element state entries (``exp_avg``), not those of whole parameters (``step``)."""
    param = torch.nn.Parameter(torch.zeros(2, 2))
    tried = optimizer([param], **options)
    param.grad = torch.ones(2, 2)
    tried.step()
    state = tried.state[param]
    return frozenset(key for key, value in state.items() if getattr(value, "shape", None) == param.shape)
