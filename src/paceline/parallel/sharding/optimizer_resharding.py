"""Moves optimizer state between layouts: gathered from the shards of all ranks, or cut into other shards.

Between layouts the state of a parameter is a dictionary: per-element tensors, flattened in the parameter's storage
order, and entries of the whole parameter, such as ``step``. A shard is ``{"start", "stop", "state"}``: the state of the
elements from `start` up to `stop`. Which entries are per-element is found by trying the optimizer (`optimizer_probe`);
those that it does not know are judged by their shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.grad_slot import ShardPiece, shaped_as, storage_numel
from paceline.parallel.gradient_collectives import Comm

__all__ = [
    "Shards",
    "StateOf",
    "flatten_state",
    "gather_state",
    "merge_shards",
    "sharded_like",
    "slice_state",
    "unflatten_state",
    "whole_shard",
    "with_whole_tensors",
]

Shards = dict[str, list[dict[str, Any]]]
"""Shards by parameter name."""

StateOf = dict[str, dict[str, Any]]
"""State by parameter name, then by its own name: ``state["head.weight"]["exp_avg"]``."""


def flatten_state(state: Mapping[str, Any], param: Tensor, elementwise: Collection[str]) -> dict[str, Any]:
    """Return a parameter's state as it is between layouts; `elementwise` names the per-element entries.

    Raises:
        UsageError: a per-element entry has another shape than the parameter.
    """
    flat = {}
    for key, value in state.items():
        unknown = isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape
        flat[key] = _flat(key, value, param) if key in elementwise or unknown else value
    return flat


def _flat(key: str, value: Tensor, param: Tensor) -> Tensor:
    if value.shape != param.shape:
        raise UsageError(
            f"the state's {key!r} has shape {list(value.shape)}, its parameter {list(param.shape)}",
            remedy="load a state of the same model, with the parameters in the same order",
        )
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
    held: Sequence[tuple[ShardPiece, Mapping[str, Any]]],
    buckets: Sequence[Bucket],
    comm: Comm,
    elementwise: Collection[str],
    *,
    to: int | None = None,
) -> StateOf:
    """Return the whole state of every parameter; a collective.

    Args:
        held: this rank's pieces of the parameters, each with its state.
        buckets: of the parameters.
        comm: the ranks.
        elementwise: names of the per-element entries.
        to: the only rank that needs the result; others return none of the per-element entries. None: all.
    """
    whole, dtype_of = _gather_entries(held, comm, elementwise)
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
            for slot in slots if to in (None, comm.rank) else []:
                whole[slot.name][key] = flat[slot.start : slot.start + slot.numel].clone()
    return whole


def _gather_entries(
    held: Sequence[tuple[ShardPiece, Mapping[str, Any]]], comm: Comm, elementwise: Collection[str]
) -> tuple[StateOf, dict[str, dict[str, torch.dtype]]]:
    """Return the entries of whole parameters, and the dtypes of the per-element ones, from all ranks."""
    entries: StateOf = {}
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    for piece, state in held:
        for key, value in state.items():
            if _is_per_element(key, value, piece.stop - piece.start, elementwise):
                dtypes.setdefault(piece.slot.name, {})[key] = value.dtype
            else:
                kept = value.cpu() if isinstance(value, Tensor) else value
                entries.setdefault(piece.slot.name, {})[key] = kept
    whole: StateOf = {}
    dtype_of: dict[str, dict[str, torch.dtype]] = {}
    names = {
        name: {key: str(dtype).removeprefix("torch.") for key, dtype in of.items()}
        for name, of in dtypes.items()
    }
    for theirs, their_dtypes in comm.gather_values((entries, names)):
        for name in theirs.keys() | their_dtypes.keys():
            whole.setdefault(name, {}).update(theirs.get(name, {}))
            found = {key: getattr(torch, dtype) for key, dtype in their_dtypes.get(name, {}).items()}
            dtype_of.setdefault(name, {}).update(found)
    return whole, dtype_of


def _is_per_element(key: str, value: object, numel: int, elementwise: Collection[str]) -> bool:
    """Return whether an entry in the state of `numel` flattened elements has one value for each."""
    return key in elementwise or (isinstance(value, Tensor) and value.shape == (numel,) != (1,))


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
    name: str, start: int, stop: int, shards: Sequence[Mapping[str, Any]], elementwise: Collection[str]
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
            if _is_per_element(key, value, shard["stop"] - shard["start"], elementwise):
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


def with_whole_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with its sharded tensors whole; a collective."""
    return pytree.tree_map_only(DTensor, DTensor.full_tensor, state)


def sharded_like(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's part of those entries that have the shape of a sharded parameter, and are whole."""
    if not isinstance(param, DTensor):
        return {}
    return {
        key: distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        for key, value in state.items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == param.shape
    }
