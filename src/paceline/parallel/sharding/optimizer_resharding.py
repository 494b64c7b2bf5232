"""Moves optimizer state between layouts: gathered from the shards of all ranks, or cut into other shards.

Between layouts the state of a parameter is a list of shards: ``{"start", "stop", "state"}``, the state of the elements
from `start` up to `stop`. That is a dictionary of per-element tensors, flattened in the parameter's storage order, and
entries that belong to all these elements, such as ``step`` or the factors of a preconditioner. Which entries are
per-element is found by trying the optimizer (`optimizer_probe`); those that it does not know are judged by their
shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.grad_slot import shaped_as, storage_numel
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.sharding.update_units import UpdateUnit

__all__ = [
    "Shards",
    "StoredEntry",
    "flatten_state",
    "gather_owned",
    "gather_state",
    "in_memory",
    "is_per_element",
    "merge_shards",
    "sharded_like",
    "slice_state",
    "unflatten_state",
    "whole_shard",
    "with_whole_tensors",
]

Shards = dict[str, list[dict[str, Any]]]
"""Shards by parameter name."""


@runtime_checkable
class StoredEntry(Protocol):
    """A per-element entry that lies elsewhere, such as in a checkpoint, and is read where it is needed."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return the flattened values of elements `start` up to `stop` of the parameter."""
        ...


def in_memory(shards: Shards) -> Shards:
    """Return shards with the entries that are stored elsewhere."""
    return {
        name: [
            {
                **part,
                "state": {
                    key: value.read(part["start"], part["stop"]) if isinstance(value, StoredEntry) else value
                    for key, value in part["state"].items()
                },
            }
            for part in parts
        ]
        for name, parts in shards.items()
    }


def flatten_state(
    state: Mapping[str, Any], param: Tensor, elementwise: Collection[str], *, copy: bool = True
) -> dict[str, Any]:
    """Return a parameter's state as it is between layouts.

    Args:
        state: of the parameter.
        param: the parameter.
        elementwise: names of the per-element entries.
        copy: whether these are copied; False: only where they are not flat in memory.

    Raises:
        UsageError: a per-element entry has another shape than the parameter.
    """
    flat = {}
    for key, value in state.items():
        unknown = isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape
        flat[key] = _flat(key, value, param, copy) if key in elementwise or unknown else value
    return flat


def _flat(key: str, value: Tensor, param: Tensor, copy: bool) -> Tensor:
    if value.shape != param.shape:
        raise UsageError(
            f"the state's {key!r} has shape {list(value.shape)}, its parameter {list(param.shape)}",
            remedy="load a state of the same model, with the parameters in the same order",
        )
    real = value.dtype.to_real() if value.is_complex() else value.dtype
    if not copy and value.is_contiguous() and param.is_contiguous():
        return torch.view_as_real(value).flatten() if value.is_complex() else value.flatten()
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
    units: Sequence[tuple[UpdateUnit, Mapping[str, Any]]],
    buckets: Sequence[Bucket],
    comm: Comm,
    elementwise: Collection[str],
    *,
    to: int | None = None,
) -> Shards:
    """Return the whole state of every parameter, from flat parts; a collective.

    Args:
        units: this rank's parts of the parameters, each with its state.
        buckets: of the parameters.
        comm: the ranks.
        elementwise: names of the per-element entries.
        to: the only rank that needs the result; others return none of the per-element entries. None: all.
    """
    whole, dtype_of = _gather_entries(units, comm, elementwise)
    for bucket in buckets:
        slot_of = {slot.name: slot for slot in bucket.slots}
        for key in sorted({key for name in slot_of for key in dtype_of.get(name, {})}):
            slots = [slot for slot in bucket.slots if key in dtype_of.get(slot.name, {})]
            dtype = dtype_of[slots[0].name][key]
            flat = torch.zeros(bucket.flat.numel(), dtype=dtype, device=bucket.flat.device)
            for unit, state in units:
                if key in state and (slot := slot_of.get(unit.name)) is not None:
                    flat[slot.start + unit.start : slot.start + unit.stop] = state[key]
            comm.all_gather(flat).wait()
            for slot in slots if to in (None, comm.rank) else []:
                whole[slot.name][key] = flat[slot.start : slot.start + slot.numel].clone()
    stops = {slot.name: slot.numel for bucket in buckets for slot in bucket.slots}
    return {
        name: [{"start": 0, "stop": stops[name], "state": state}] for name, state in whole.items() if state
    }


def gather_owned(mine: Shards, comm: Comm, *, to: int | None = None) -> Shards:
    """Return the shards of all ranks, which hold whole blocks; a collective.

    Args:
        mine: this rank's.
        comm: the ranks.
        to: the only rank that needs the result; others return an empty one. None: all.
    """
    rows = comm.gather_values([[name, part["start"]] for name, parts in mine.items() for part in parts])
    owner_of: dict[tuple[str, int], int] = {}
    for rank, row in enumerate(rows):
        for name, start in row:
            owner_of.setdefault((name, start), rank)
    found: Shards = {}
    for (name, start), owner in owner_of.items():
        part = next((part for part in mine.get(name, []) if part["start"] == start), None)
        sent = comm.broadcast_value(part if owner == comm.rank else None, owner)
        if to in (None, comm.rank):
            found.setdefault(name, []).append(sent)
    return found


def _gather_entries(
    units: Sequence[tuple[UpdateUnit, Mapping[str, Any]]], comm: Comm, elementwise: Collection[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, torch.dtype]]]:
    """Return the entries of whole parameters, and the dtypes of the per-element ones, from all ranks."""
    entries: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    for unit, state in units:
        for key, value in state.items():
            if is_per_element(key, value, unit.stop - unit.start, elementwise):
                dtypes.setdefault(unit.name, {})[key] = value.dtype
            else:
                kept = value.cpu() if isinstance(value, Tensor) else value
                entries.setdefault(unit.name, {})[key] = kept
    whole: dict[str, dict[str, Any]] = {}
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


def is_per_element(key: str, value: object, numel: int, elementwise: Collection[str]) -> bool:
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
            if isinstance(value, StoredEntry):
                part = value.read(low, high)
                if high - low == stop - start:
                    state[key] = part
                else:
                    state.setdefault(key, part.new_zeros(stop - start))[low - start : high - start] = part
            elif is_per_element(key, value, shard["stop"] - shard["start"], elementwise):
                value = value.reshape(-1)
                whole = state.setdefault(key, value.new_zeros(stop - start))
                whole[low - start : high - start] = value[low - shard["start"] : high - shard["start"]]
            else:  # an entry of the whole parameter, such as the step count
                _check_range(name, key, value, shard, (start, stop))
                state[key] = pytree.tree_map_only(Tensor, Tensor.clone, value)
    if any(shard["state"] for shard in shards) and covered < stop - start:
        raise UsageError(
            f"the state of parameter {name!r} covers {covered} of {stop - start} elements",
            remedy="load the shards of all ranks that wrote the state",
        )
    return state


def _check_range(
    name: str, key: str, value: object, shard: Mapping[str, Any], wanted: tuple[int, int]
) -> None:
    """Raise for an entry of more than one number that belongs to other elements than `wanted`."""
    many = any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in pytree.tree_leaves(value))
    if many and (shard["start"], shard["stop"]) != wanted:
        raise UsageError(
            f"the state's {key!r} of parameter {name!r} belongs to its elements {shard['start']} to {shard['stop']}, "
            f"and the optimizer updates {wanted[0]} to {wanted[1]} together",
            remedy="split parameters as in the run that wrote the state",
        )


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
