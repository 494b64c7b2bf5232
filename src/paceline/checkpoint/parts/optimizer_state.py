"""Optimizer state as pieces: this range of elements of that parameter, flattened, has this state.

Every strategy's state can be said so, whole or cut, so a checkpoint fits any number of ranks and any strategy.
Elements are counted in the order in which the parameter is stored, a complex one as two, as shards are
(`paceline.parallel.sharding.reshard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError
from paceline.parallel.engine.bucket import storage_numel
from paceline.parallel.sharding.reshard import flatten_state, unflatten_state
from paceline.parallel.sharding.zero import ShardedOptimizer

__all__ = ["Piece", "load_optimizer", "optimizer_state"]

Piece = tuple[str, int, int, Mapping[str, Any]]
"""A parameter's name, start and stop among its flattened elements, and the state of start … stop - 1: tensors of as
many elements (``exp_avg``), and what belongs to the whole parameter (``step``, Adafactor's ``row_var``)."""


def optimizer_state(
    optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], rank: int, ranks: int
) -> dict[str, Any]:
    """Return the options of each group, and the pieces that `rank` answers for: over all ranks each element once.

    Args:
        optimizer: any of torch's, or a `ShardedOptimizer`.
        name_of: names of parameters by their ids.
        rank, ranks: this rank, and how many there are.

    Raises:
        UsageError: it has a parameter without a name.
    """
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": names}
        for group, names in zip(optimizer.param_groups, _names(optimizer, name_of), strict=True)
    ]
    shards = _shards_of(optimizer)
    if shards is None:
        pieces = _pieces(optimizer, name_of, rank, ranks)
    else:
        of_slot = _of_slot(optimizer, name_of)
        pieces = [
            (of_slot[slot], part["start"], part["stop"], part["state"])
            for slot, parts in shards.items()
            for part in parts
        ]
    return {"groups": groups, "pieces": pieces}


def check_optimizer(
    name: str, optimizer: torch.optim.Optimizer, groups: Sequence[Any], name_of: Mapping[int, str]
) -> None:
    """Raise unless `optimizer` has the groups that were saved.

    Raises:
        UsageError: it has other groups, or other parameters in one; the first is named.
    """
    mine = _names(optimizer, name_of)
    if len(mine) != len(groups):
        raise UsageError(f"the checkpoint's {name} has {len(groups)} parameter groups, this one {len(mine)}")
    for number, (names, saved) in enumerate(zip(mine, groups, strict=True)):
        different = [
            each for each in [*names, *saved["params"]] if (each in names) != (each in saved["params"])
        ]
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
    name_of: Mapping[int, str],
    rank: int,
) -> None:
    """Give `optimizer` the options of `groups`, and the state that the `pieces` of all ranks make up together.

    Raises:
        UsageError: elements of a parameter are missing.
    """
    pieces_of: dict[str, list[Piece]] = {}
    for piece in pieces:
        pieces_of.setdefault(piece[0], []).append(piece)
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    if _shards_of(optimizer) is not None:
        shards = {
            slot: [
                {"start": start, "stop": stop, "state": dict(state)}
                for _, start, stop, state in pieces_of[name]
            ]
            for slot, name in _of_slot(optimizer, name_of).items()
            if name in pieces_of
        }
        optimizer.load_state_dict({"param_groups": options, "shards": shards})
        return
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    index = 0
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        packed["param_groups"].append({**saved, "params": list(range(index, index + len(group["params"])))})
        for param in group["params"]:
            name = name_of[id(param)]
            if name in pieces_of:
                packed["state"][index] = _joined(name, param, pieces_of[name], rank)
            index += 1
    optimizer.load_state_dict(packed)


def _names(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> list[list[str]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in name_of:
                raise UsageError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is of none of the models",
                    remedy="pass the model that it belongs to as well",
                )
    return [[name_of[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _shards_of(optimizer: torch.optim.Optimizer) -> dict[str, list[dict[str, Any]]] | None:
    """Return the shards of an optimizer that has shards, else None."""
    return optimizer.shards() if isinstance(optimizer, ShardedOptimizer) else None


def _of_slot(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> dict[str, str]:
    """Return the names of parameters by the names that their own model has for them."""
    names = [name for group in _names(optimizer, name_of) for name in group]
    return {name.partition("/")[2] or name: name for name in names}


def _pieces(
    optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], rank: int, ranks: int
) -> list[Piece]:
    """Return what `rank` answers for: its rows of sharded parameters, and whole ones that are dealt to it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = optimizer.state_dict()["state"]
    owners = deal([0 if isinstance(param, DTensor) else param.numel() for param in params], ranks)
    pieces: list[Piece] = []
    for index, (param, owner) in enumerate(zip(params, owners, strict=True)):
        start, stop = _own_rows(param, rank) if isinstance(param, DTensor) else (0, storage_numel(param))
        mine = isinstance(param, DTensor) or owner == rank
        if mine and start < stop and states.get(index):
            state = {key: _flat(key, value, param) for key, value in states[index].items()}
            pieces.append((name_of[id(param)], start, stop, state))
    return pieces


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that each item goes to: runs of neighbours, about equal in the sum of their sizes.

    Example:
        >>> deal([4, 1, 1, 2], 2)
        [0, 1, 1, 1]
    """
    total, before, owners = sum(sizes), 0, []
    for size in sizes:
        owners.append(min(ranks - 1, (2 * before + size) * ranks // (2 * total)) if total else 0)
        before += size
    return owners


def _own_rows(param: DTensor, rank: int) -> tuple[int, int]:
    """Return start and stop of the rows of a sharded parameter that are on `rank`, in elements."""
    rows, row_numel = param.shape[0], param[0].numel() if param.dim() > 1 else 1
    first = min(rows, rank * -(-rows // param.device_mesh.size()))
    return first * row_numel, first * row_numel + param.to_local().numel()


def _flat(key: str, value: Any, param: Tensor) -> Any:
    """Return what has a number for each element of `param` flattened, and anything else as it is."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != param.shape:
        return value
    if isinstance(value, DTensor):
        return value.to_local().flatten()
    if value.is_contiguous() and param.is_contiguous() and not param.is_complex():
        return value.flatten()  # without a copy
    return flatten_state({key: value}, param, [key])[key]


def _joined(name: str, param: Tensor, pieces: Iterable[Piece], rank: int) -> dict[str, Any]:
    """Return the state of `param` put together from `pieces`, cut to this rank's rows if it is sharded."""
    joined: dict[str, Any] = {}
    covered, numel = 0, storage_numel(param)
    for _, start, stop, state in pieces:
        covered += stop - start
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                joined[key] = value
            elif stop - start == numel:
                # A view of a mapped file is copied: the file may be gone before the state is used up.
                joined[key] = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
            else:
                if key not in joined:
                    joined[key] = value.new_zeros(numel)
                joined[key][start:stop] = value
    if covered != numel:
        raise UsageError(
            f"the checkpoint's optimizer state covers {covered} of {numel} elements of {name!r}",
            remedy="resume with the model and the optimizer that the checkpoint was written with",
        )
    if isinstance(param, DTensor):
        return {key: _rows(param, value, rank) for key, value in joined.items()}
    return unflatten_state(joined, param)


def _rows(param: DTensor, whole: Any, rank: int) -> Any:
    """Return this rank's rows of what has a number for each element of `param`, and anything else as it is."""
    if not isinstance(whole, Tensor) or whole.dim() == 0:
        return whole
    start, stop = _own_rows(param, rank)
    local = whole[start:stop].view(param.to_local().shape).to(param.device)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
