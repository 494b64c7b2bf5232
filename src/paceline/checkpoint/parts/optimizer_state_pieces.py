"""Optimizer state as pieces: the state of a range of flattened elements of a parameter.

Pieces represent the state of whole parameters and of ZeRO's shards, so that ranks can give it to each other in any
strategy. Elements are counted in the order in which the parameter is stored, a complex one as two, as in shards
(`paceline.parallel.sharding.optimizer_resharding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.buckets.grad_slot import storage_numel
from paceline.parallel.sharding.optimizer_resharding import flatten_state, unflatten_state
from paceline.parallel.sharding.zero import ShardedOptimizer

__all__ = [
    "Piece",
    "check_optimizer",
    "copied_pieces",
    "load_optimizer",
    "optimizer_groups",
    "optimizer_state",
    "partition_by_size",
    "whole_states",
]

Piece = tuple[str, int, int, Mapping[str, Any]]
"""A parameter's name, start and stop among its flattened elements, and the state of elements start … stop - 1: tensors
with one value per element (``exp_avg``), and state of the whole parameter (``step``, Adafactor's ``row_var``)."""


def optimizer_state(optimizer: torch.optim.Optimizer, param_names: Mapping[int, str]) -> dict[str, Any]:
    """Return the options of each group, and the pieces of all state that this rank has.

    Args:
        optimizer: one of torch's, or a `ShardedOptimizer`.
        param_names: names of parameters by id.

    Raises:
        UsageError: it has a parameter without a name.
    """
    if isinstance(optimizer, ShardedOptimizer) and optimizer.in_shards:
        pieces = _pieces_of_shards(optimizer.held_shards(), optimizer, param_names)
    else:
        pieces = _pieces(optimizer, param_names)
    return {"groups": optimizer_groups(optimizer, param_names), "pieces": pieces}


def optimizer_groups(
    optimizer: torch.optim.Optimizer, param_names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the options of each group, with the names of its parameters."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "params": names}
        for group, names in zip(optimizer.param_groups, _group_names(optimizer, param_names), strict=True)
    ]


def copied_pieces(optimizer: ShardedOptimizer, param_names: Mapping[int, str]) -> list[Piece]:
    """Return the pieces of which this rank keeps a copy: those of its right neighbour."""
    return _pieces_of_shards(optimizer.copied_shards(), optimizer, param_names)


def _pieces_of_shards(
    shards: Mapping[str, list[dict[str, Any]]],
    optimizer: torch.optim.Optimizer,
    param_names: Mapping[int, str],
) -> list[Piece]:
    names = _names_by_slot(_group_names(optimizer, param_names))
    return [
        (names[slot], part["start"], part["stop"], part["state"])
        for slot, parts in shards.items()
        for part in parts
    ]


def check_optimizer(
    name: str, optimizer: torch.optim.Optimizer, groups: Sequence[Any], param_names: Mapping[int, str]
) -> None:
    """Raise unless `optimizer` has the groups that were saved.

    Raises:
        UsageError: the number of groups or the parameters in one differ; names the first.
    """
    here = _group_names(optimizer, param_names)
    if len(here) != len(groups):
        raise UsageError(f"the checkpoint's {name} has {len(groups)} parameter groups, this one {len(here)}")
    for number, (names, group) in enumerate(zip(here, groups, strict=True)):
        saved = group["params"]
        different = [each for each in [*names, *saved] if (each in names) != (each in saved)]
        if different:
            where = "this one's" if different[0] in names else "the checkpoint's"
            raise UsageError(
                f"parameter {different[0]!r} is in group {number} of {where} {name} only",
                remedy="build the optimizer as in the run that wrote the checkpoint",
            )


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    pieces: Iterable[Piece],
    param_names: Mapping[int, str],
) -> None:
    """Load the options of `groups`, and the state in the `pieces` of all ranks.

    Raises:
        UsageError: elements of a parameter are missing.
    """
    pieces_of: dict[str, list[Piece]] = {}
    for piece in pieces:
        pieces_of.setdefault(piece[0], []).append(piece)
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    if isinstance(optimizer, ShardedOptimizer) and optimizer.in_shards:
        shards = {
            slot: [
                {"start": start, "stop": stop, "state": dict(state)}
                for _, start, stop, state in pieces_of[name]
            ]
            for slot, name in _names_by_slot(_group_names(optimizer, param_names)).items()
            if name in pieces_of
        }
        optimizer.load_shards(options, shards)
        return
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    index = 0
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        packed["param_groups"].append({**saved, "params": list(range(index, index + len(group["params"])))})
        for param in group["params"]:
            name = param_names[id(param)]
            if name in pieces_of:
                packed["state"][index] = _join(name, param, pieces_of[name])
            index += 1
    optimizer.load_state_dict(packed)


def _group_names(optimizer: torch.optim.Optimizer, param_names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of the parameters in each group."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in param_names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that belongs to none of the models",
                    remedy="pass the model that it belongs to as well",
                )
    return [[param_names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _names_by_slot(group_names: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the names of parameters by their names in their own model."""
    return {name.partition("/")[2] or name: name for names in group_names for name in names}


def _pieces(optimizer: torch.optim.Optimizer, param_names: Mapping[int, str]) -> list[Piece]:
    """Return the state of whole parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = whole_states(optimizer)
    return [
        (
            param_names[id(param)],
            0,
            storage_numel(param),
            {key: _flatten(key, value, param) for key, value in states[index].items()},
        )
        for index, param in enumerate(params)
        if param.numel() and states.get(index)
    ]


def whole_states(optimizer: torch.optim.Optimizer) -> Mapping[int, Mapping[str, Any]]:
    """Return the state of each parameter of an optimizer that does not shard, by its number in torch's format."""
    own = isinstance(
        optimizer, ShardedOptimizer
    )  # not what was gathered on one rank by `consolidate_state_dict`
    return (optimizer.own_state_dict() if own else optimizer.state_dict())["state"]


def partition_by_size(sizes: Sequence[int], parts: int) -> list[int]:
    """Return the part of each item: runs of neighbours with about equal total sizes.

    Example:
        >>> partition_by_size([4, 1, 1, 2], 2)
        [0, 1, 1, 1]
    """
    total, before, owners = sum(sizes), 0, []
    for size in sizes:
        owners.append(min(parts - 1, (2 * before + size) * parts // (2 * total)) if total else 0)
        before += size
    return owners


def _flatten(key: str, value: Any, param: Tensor) -> Any:
    """Return `value` flattened if it has the shape of `param`, else unchanged."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != param.shape:
        return value
    if value.is_contiguous() and param.is_contiguous() and not param.is_complex():
        return value.flatten()  # without a copy
    return flatten_state({key: value}, param, [key])[key]


def _join(name: str, param: Tensor, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the state of `param` from all its pieces."""
    joined: dict[str, Any] = {}
    covered, numel = 0, storage_numel(param)
    for _, start, stop, state in pieces:
        covered += stop - start
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or stop - start == numel:
                joined[key] = value
            else:
                if key not in joined:
                    joined[key] = value.new_zeros(numel)
                joined[key][start:stop] = value
    if covered != numel:
        raise UsageError(
            f"the checkpoint's optimizer state covers {covered} of {numel} elements of {name!r}",
            remedy="resume with the model and the optimizer that the checkpoint was written with",
        )
    return unflatten_state(joined, param)
