"""Optimizer state on its way between layouts: gathered whole from all ranks' shards, and taken up by other shards.

Between layouts the state of a parameter is a dictionary: tensors of one number per element, flattened in the order in
which the parameter is stored, and what belongs to the whole parameter, such as ``step``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.engine.bucket import Bucket, ShardPiece, shaped_as, storage_numel
from paceline.parallel.engine.comm import Comm
from paceline.world.object_collectives import gather_texts

__all__ = ["StateOf", "cut", "flatten_state", "gather", "unflatten_state"]

StateOf = dict[str, dict[str, Any]]
"""State by the parameter's name, then by its own name: ``state["head.weight"]["exp_avg"]``."""


def flatten_state(state: Mapping[str, Any], param: Tensor, elementwise: Collection[str]) -> dict[str, Any]:
    """Return a parameter's state as it is between layouts; `elementwise` names what has a number per element."""
    return {key: _flat(value, param) if key in elementwise else value for key, value in state.items()}


def unflatten_state(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a parameter's state as optimizers of whole parameters hold it; undoes `flatten_state`."""
    numel = storage_numel(param)
    return {
        key: shaped_as(param, value)
        if isinstance(value, Tensor) and value.dim() and value.numel() == numel
        else value
        for key, value in state.items()
    }


def gather(
    held: Sequence[tuple[ShardPiece, Mapping[str, Any]]], buckets: Sequence[Bucket], comm: Comm
) -> StateOf:
    """Return the whole state of every parameter; all ranks call this.

    Args:
        held: this rank's pieces of the parameters, each with its state.
        buckets: with the parameters, as the pieces lie in them.
        comm: the ranks.
    """
    whole, dtype_of = _told(held, comm)
    for bucket in buckets:
        for key in sorted({key for slot in bucket.slots for key in dtype_of.get(slot.name, {})}):
            slots = [slot for slot in bucket.slots if key in dtype_of.get(slot.name, {})]
            flat = torch.zeros(
                bucket.flat.numel(), dtype=dtype_of[slots[0].name][key], device=bucket.flat.device
            )
            for piece, state in held:
                if piece.slot.bucket is bucket and key in state:
                    first = piece.slot.start + piece.start
                    flat[first : first + piece.stop - piece.start] = state[key]
            comm.all_gather(flat).wait()
            for slot in slots:
                whole[slot.name][key] = flat[slot.start : slot.start + slot.numel].clone()
    return whole


def _told(
    held: Sequence[tuple[ShardPiece, Mapping[str, Any]]], comm: Comm
) -> tuple[StateOf, dict[str, dict[str, torch.dtype]]]:
    """Return what belongs to whole parameters, and the dtypes of what is one number per element, from all ranks."""
    mine: dict[str, dict[str, list[Any]]] = {}
    for piece, state in held:
        for key, value in state.items():
            mine.setdefault(piece.slot.name, {})[key] = _described(value, piece)
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


def _described(value: Any, piece: ShardPiece) -> list[Any]:
    """Return [dtype, number]: no number where there is one per element, no dtype where it is no tensor."""
    if not isinstance(value, Tensor):
        return ["", value]
    kind = str(value.dtype).removeprefix("torch.")
    per_element = value.dim() and value.numel() == piece.stop - piece.start
    return [kind, None if per_element else value.tolist()]


def _flat(value: Tensor, param: Tensor) -> Tensor:
    real = value.dtype.to_real() if value.is_complex() else value.dtype
    flat = torch.empty(storage_numel(param), dtype=real, device=value.device)
    shaped_as(param, flat).copy_(value)
    return flat


def whole_part(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a parameter's flattened state as its one part, in the form of `cut`."""
    return {"start": 0, "stop": storage_numel(param), "state": state}


def joined(shards_of: Sequence[Mapping[str, Sequence[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the parts of each parameter that any rank has, each once."""
    found: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for shards in shards_of:
        for name, parts in shards.items():
            found.setdefault(name, {}).update(((part["start"], part["stop"]), part) for part in parts)
    return {name: list(parts.values()) for name, parts in found.items()}


def cut(
    name: str, start: int, stop: int, parts: Sequence[Mapping[str, Any]], elementwise: frozenset[str]
) -> dict[str, Any]:
    """Return the state of a parameter's elements from `start` up to `stop`, put together from `parts` of it.

    Args:
        name: of the parameter. start, stop: of its elements in storage order.
        parts: ``{"start", "stop", "state"}`` each.
        elementwise: names what has a number per element: of a parameter without dimensions one can't tell by shapes.

    Raises:
        UsageError: the parts leave some elements out.
    """
    state: dict[str, Any] = {}
    covered = 0
    for part in parts:
        low, high = max(start, part["start"]), min(stop, part["stop"])
        if low >= high:
            continue
        covered += high - low
        for key, value in part["state"].items():
            if key in elementwise:
                value = value.reshape(-1)
                whole = state.setdefault(key, value.new_zeros(stop - start))
                whole[low - start : high - start] = value[low - part["start"] : high - part["start"]]
            else:  # a number that belongs to the whole parameter, such as the step count
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
    if parts and any(part["state"] for part in parts) and covered < stop - start:
        raise UsageError(
            f"the state of parameter {name!r} covers {covered} of {stop - start} elements",
            remedy="load the shards of all ranks that wrote the state",
        )
    return state
