"""Optimizer state as named tensors: what a rank writes of it, whichever strategy divides it.

    optimizer.state.head.weight.exp_avg             one value per element of the parameter: boxes of its shape
    optimizer.state.head.weight.step                an entry of the whole parameter, a tensor or a plain value
    optimizer.state.head.weight.row_var[0:4096]     an entry of a part of it that is updated as a matrix of its own

The names are those of torch's ``get_optimizer_state_dict``. Elements of shards are counted in the order in which the
parameter is stored, a complex one as two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from paceline.checkpoint.parts.boxes import Box, boxes_of_range, storage_order
from paceline.checkpoint.parts.optimizer_state_pieces import optimizer_groups, partition_by_size, whole_states
from paceline.checkpoint.parts.state_parts import StateParts, TensorPart
from paceline.parallel.buckets.grad_slot import shaped_as, storage_numel
from paceline.parallel.sharding.zero import ShardedOptimizer

__all__ = ["FlatOrder", "collect_optimizer", "slot_names"]


class FlatOrder:
    """The order in which a parameter's elements are flattened in shards, and the boxes of ranges of them.

    Args:
        param: the parameter.
    """

    def __init__(self, param: Tensor) -> None:
        shape = tuple(param.shape)
        self.numel = storage_numel(param)
        order = list(range(param.dim()))
        if not isinstance(param, DTensor) and not param.is_contiguous() and not param.is_complex():
            meta = torch.empty(param.numel(), device="meta")
            order = storage_order(shaped_as(param, meta))
        if param.is_complex():
            shape, order = (*shape, 2), [*order, len(order)]
        self.shape, self._order = shape, order
        self._back = sorted(range(len(order)), key=order.__getitem__)

    def boxes(self, start: int, stop: int) -> Iterator[tuple[Box, int]]:
        """Yield the boxes of elements start … stop - 1, each with the number of its first element."""
        for box in boxes_of_range([self.shape[at] for at in self._order], start, stop):
            yield box.permuted(self._back), start
            start += box.numel

    def range_of(self, boxes: Sequence[Box]) -> tuple[int, int] | None:
        """Return start and stop of the elements of boxes if they are one range, and in its order; else None."""
        whole = Box.whole([self.shape[at] for at in self._order])
        start = stop = None
        for box in boxes:
            if len(box.sizes) < len(self.shape):  # of complex numbers that were not in shards
                box = Box((*box.offsets, 0), (*box.sizes, 2))
            found = box.permuted(self._order).flat_range_in(whole)
            if found is None or stop not in (None, found[0]):
                return None
            start, stop = found[0] if start is None else start, found[1]
        return None if start is None or stop is None else (start, stop)

    def shaped(self, flat: Tensor, box: Box) -> Tensor:
        """Return a view of a box's flattened elements in the shape of the box."""
        return flat.view([box.sizes[at] for at in self._order]).permute(self._back)


def collect_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    param_names: Mapping[int, str],
    parts: StateParts,
    ranks: int,
) -> list[dict[str, Any]]:
    """Add a rank's part of an optimizer's state to `parts`; return the options of each group.

    Over all ranks, every element is added once.

    Args:
        name: of the optimizer.
        optimizer: one of torch's, or a `ShardedOptimizer`.
        param_names: names of parameters by id.
        parts: of the rank.
        ranks: number of ranks.

    Raises:
        UsageError: it has a parameter without a name, or a shard that is several boxes.
    """
    groups = optimizer_groups(optimizer, param_names)
    shards = optimizer.shards() if isinstance(optimizer, ShardedOptimizer) else None
    if shards is None:
        _collect_whole(name, optimizer, param_names, parts, ranks)
    elif isinstance(optimizer, ShardedOptimizer) and not optimizer.replica:
        names = slot_names(optimizer, param_names)
        for slot, pieces in shards.items():
            param_name, param = names[slot]
            _collect_shards(f"{name}.state.{param_name}", optimizer, param, pieces, parts)
    return groups


def slot_names(
    optimizer: torch.optim.Optimizer, param_names: Mapping[int, str]
) -> dict[str, tuple[str, Tensor]]:
    """Return the names of parameters, and parameters, by their names in their own model."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    named = [(param_names[id(param)], param) for param in params]
    return {name.partition("/")[2] or name: (name, param) for name, param in named}


def _collect_whole(
    name: str, optimizer: torch.optim.Optimizer, param_names: Mapping[int, str], parts: StateParts, ranks: int
) -> None:
    """Add a share of whole parameters, and the shards of sharded ones."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = whole_states(optimizer)
    owners = partition_by_size([0 if isinstance(p, DTensor) else p.numel() for p in params], ranks)
    for index, (param, owner) in enumerate(zip(params, owners, strict=True)):
        prefix = f"{name}.state.{param_names[id(param)]}"
        has_first = owner == parts.rank
        if isinstance(param, DTensor):
            part = TensorPart.of_shard(prefix, param, index, parts.rank)
            has_first = part is not None and not any(part.box.offsets)
        for key, value in (states.get(index) or {}).items():
            if isinstance(value, DTensor):
                part = TensorPart.of_shard(f"{prefix}.{key}", value, index, parts.rank, steady=True)
                if part is not None:
                    parts.add(part)
            elif has_first:
                _add_entry(parts, f"{prefix}.{key}", value)


def _collect_shards(
    prefix: str,
    optimizer: ShardedOptimizer,
    param: Tensor,
    pieces: Sequence[Mapping[str, Any]],
    parts: StateParts,
) -> None:
    """Add shards of a parameter's state."""
    flat, has_blocks = FlatOrder(param), optimizer.has_blocks
    for piece in pieces:
        start, stop = piece["start"], piece["stop"]
        is_block = has_blocks and (start, stop) != (0, flat.numel)
        for key, value in piece["state"].items():
            entry = f"{prefix}.{key}"
            if optimizer.is_per_element(key, None if is_block else value, stop - start):
                for box, first in flat.boxes(start, stop):
                    data = value.reshape(-1)[first - start : first - start + box.numel]
                    part = TensorPart(entry, flat.shape, box, flat.shaped(data, box).detach(), steady=True)
                    parts.add(part)
            elif is_block or ((start, stop) != (0, flat.numel) and _is_large(value)):
                _add_entry(parts, f"{entry}[{start}:{stop}]", value)
            elif start == 0:  # the same for all shards
                _add_entry(parts, entry, value)


def _is_large(value: object) -> bool:
    """Return whether an entry has more than one number, so that it belongs to certain elements."""
    return any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in pytree.tree_leaves(value))


def _add_entry(parts: StateParts, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        parts.add(TensorPart.whole(name, value, steady=True))
    else:
        parts.values[name] = parts.add_packed(name, value)
