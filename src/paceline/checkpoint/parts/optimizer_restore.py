"""Restores an optimizer's state from a checkpoint: each rank reads what it holds, in the layout of its strategy.

Where a `ShardedOptimizer` divides the state, the layout is settled by the first backward. Until then the optimizer has
entries that are read, and verified, when its shards are built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.checkpoint.parts.boxes import Box, box_of_shard
from paceline.checkpoint.parts.optimizer_parts import FlatOrder, slot_names
from paceline.checkpoint.parts.optimizer_state_pieces import partition_by_size
from paceline.checkpoint.parts.state_reader import Read, StateReader
from paceline.errors import UsageError
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.world.plain_values import unpack

__all__ = ["OptimizerPlan", "plan_optimizer"]

_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]")


@dataclass(frozen=True)
class OptimizerPlan:
    """What a rank reads of an optimizer's state, and what then loads it."""

    reads: Sequence[Read]
    load: Callable[[], None]


@dataclass
class _Entries:
    """The stored state of a parameter: names of tensors by key, values by key, and entries of ranges of elements."""

    tensors: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    ranges: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)


class _StoredFlat:
    """A per-element entry in a checkpoint, see `StoredEntry`.

    Args:
        reader: of the checkpoint, whose files stay open.
        name: of the tensor.
        order: in which the parameter is flattened.
    """

    def __init__(self, reader: StateReader, name: str, order: FlatOrder) -> None:
        self._reader, self._name, self._order = reader, name, order
        dtype = reader.info(name).dtype
        self._dtype = dtype.to_real() if dtype.is_complex else dtype
        self._ready: tuple[int, int, Tensor] | None = None

    def read_ahead(self, boxes: Sequence[Box]) -> list[Read]:
        """Return what reads boxes now, because `read` probably needs them later."""
        found = self._order.range_of(boxes)
        if found is None:
            return [Read(self._name, box, None) for box in boxes if box.numel]
        flat = torch.empty(found[1] - found[0], dtype=self._dtype)
        reads, later = self._reads(*found, flat)
        if later:
            return [replace(read, into=None) for read in reads]
        self._ready = (*found, flat)
        return reads

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start … stop - 1."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[:2] == (start, stop):
            return ready[2]
        flat = torch.empty(stop - start, dtype=self._dtype)
        reads, later = self._reads(start, stop, flat)
        self._reader.read(reads)
        for shaped, into in later:
            shaped.copy_(into)
        return flat

    def _reads(self, start: int, stop: int, flat: Tensor) -> tuple[list[Read], list[tuple[Tensor, Tensor]]]:
        """Return what fills `flat` with elements start … stop - 1, and what must be copied to it afterwards."""
        reads, later = [], []
        for box, first in self._order.boxes(start, stop):
            shaped = self._order.shaped(flat[first - start : first - start + box.numel], box)
            into = shaped if shaped.is_contiguous() else torch.empty(box.sizes, dtype=self._dtype)
            reads.append(Read(self._name, box, into))
            later += [] if into is shaped else [(shaped, into)]
        return reads, later


def plan_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    param_names: Mapping[int, str],
    reader: StateReader,
    rank: int,
    ranks: int,
    written: Callable[[str], list[Box] | None],
) -> OptimizerPlan:
    """Return what this rank reads of an optimizer's state, and what loads it then.

    Args:
        name: of the optimizer.
        optimizer: one of torch's, or a `ShardedOptimizer`.
        groups: saved options of each group, with the names of its parameters; they match.
        param_names: names of parameters by id.
        reader: of the checkpoint.
        rank, ranks: this rank, and the number of ranks.
        written: returns what this rank has written of a tensor; None: another number of ranks wrote the checkpoint.

    Raises:
        UsageError: the state belongs to other shapes, or to parts of parameters that this optimizer does not divide.
    """
    saved = {param for group in groups for param in group["params"]}
    entries = _entries(name, saved, reader)
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    if isinstance(optimizer, ShardedOptimizer) and optimizer.in_shards:
        return _plan_shards(optimizer, options, entries, param_names, reader, rank, ranks, written)
    return _plan_whole(optimizer, options, entries, param_names, reader)


def _entries(name: str, params: set[str], reader: StateReader) -> dict[str, _Entries]:
    """Return the stored entries of each parameter."""
    prefix = f"{name}.state."
    found: dict[str, _Entries] = {}
    inside: set[str] = set()  # tensors that are part of plain values

    def lookup(label: str) -> Tensor:
        inside.add(label)
        return reader.tensor(label)

    for stored, param, key in _split_names(prefix, params, reader.value_names()):
        value = unpack(reader.value(stored), lookup)
        entry = found.setdefault(param, _Entries())
        if (part := _RANGE.fullmatch(key)) is not None:
            entry.ranges.setdefault((int(part[2]), int(part[3])), {})[part[1]] = value
        else:
            entry.values[key] = value
    for stored, param, key in _split_names(prefix, params, reader.names()):
        entry = found.setdefault(param, _Entries())
        if stored in inside:
            continue
        if (part := _RANGE.fullmatch(key)) is not None:
            entry.ranges.setdefault((int(part[2]), int(part[3])), {})[part[1]] = reader.tensor(stored)
        else:
            entry.tensors[key] = stored
    for entry in found.values():
        _merge_ranges(entry)
    return found


def _merge_ranges(entry: _Entries) -> None:
    """Let single numbers that all ranges have in common, such as a step count, belong to the whole parameter."""
    first = next(iter(entry.ranges.values()), {})
    for key in [key for key, value in first.items() if _is_number(value)]:
        values = [part.get(key) for part in entry.ranges.values()]
        if all(
            _is_number(value) and type(value) is type(first[key]) and value == first[key] for value in values
        ):
            entry.values[key] = first[key]
            for part in entry.ranges.values():
                del part[key]
    entry.ranges = {place: part for place, part in entry.ranges.items() if part}


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float | bool)


def _split_names(prefix: str, params: set[str], names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, parameter and key of each entry; names of parameters have dots, too."""
    for name in names:
        if not name.startswith(prefix):
            continue
        param = name[len(prefix) :]
        while param and param not in params:
            param = param.rpartition(".")[0]
        if param:
            yield name, param, name[len(prefix) + len(param) + 1 :]


# ------------------------------------------------------------------ optimizers of torch's


def _plan_whole(
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    entries: Mapping[str, _Entries],
    param_names: Mapping[int, str],
    reader: StateReader,
) -> OptimizerPlan:
    """Plan the state in torch's format: of sharded parameters this rank's shards, of others whole tensors."""
    reads: list[Read] = []
    state: dict[int, dict[str, Callable[[], Any]]] = {}
    packed_groups, index = [], 0
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        packed_groups.append({**saved, "params": list(range(index, index + len(group["params"])))})
        for param in group["params"]:
            entry = entries.get(name := param_names[id(param)])
            if entry is not None:
                for place in entry.ranges:
                    raise _other_blocks(name, place)
                state[index] = {key: lambda value=value: value for key, value in entry.values.items()}
                for key, stored in entry.tensors.items():
                    read, make = _whole_entry(param, stored, reader)
                    reads += read
                    state[index][key] = make
            index += 1

    def load() -> None:
        made = {at: {key: make() for key, make in entry.items()} for at, entry in state.items()}
        optimizer.load_state_dict({"state": made, "param_groups": packed_groups})

    return OptimizerPlan(reads, load)


def _other_blocks(name: str, place: tuple[int, int]) -> UsageError:
    return UsageError(
        f"the state of parameter {name!r} belongs to its elements {place[0]} to {place[1]}, and the optimizer updates "
        "others together",
        remedy="split parameters as in the run that wrote the state",
    )


def _whole_entry(param: Tensor, stored: str, reader: StateReader) -> tuple[list[Read], Callable[[], Tensor]]:
    """Return how to read an entry, and what makes it."""
    info = reader.info(stored)
    paired = param.is_complex() and info.shape == (*param.shape, 2)  # from shards
    if isinstance(param, DTensor) and (paired or info.shape == tuple(param.shape)):
        box = box_of_shard(stored, param)
        local = torch.empty(box.sizes, dtype=info.dtype.to_complex() if paired else info.dtype)
        into = torch.view_as_real(local) if paired else local
        read = Read(stored, Box((*box.offsets, 0), into.shape) if paired else box, into)

        def sharded() -> Tensor:
            return DTensor.from_local(
                local.to(param.device),
                param.device_mesh,
                param.placements,
                shape=param.shape,
                stride=param.stride(),
            )

        return ([read] if box.numel else []), sharded
    whole = torch.empty(info.shape, dtype=info.dtype)

    def make() -> Tensor:
        made = whole
        if paired:
            made = torch.view_as_complex(made)
        if made.shape == param.shape and not param.is_contiguous():
            return torch.empty_like(param, dtype=made.dtype, device="cpu").copy_(made)
        return made

    return ([Read(stored, Box.whole(info.shape), whole)] if whole.numel() else []), make


# ------------------------------------------------------------------ shards


def _plan_shards(
    optimizer: ShardedOptimizer,
    options: Sequence[Mapping[str, Any]],
    entries: Mapping[str, _Entries],
    param_names: Mapping[int, str],
    reader: StateReader,
    rank: int,
    ranks: int,
    written: Callable[[str], list[Box] | None],
) -> OptimizerPlan:
    """Plan the state in shards: the layout is known later, and then per-element entries are read.

    Now each is verified by one of the ranks; or each rank reads what it has written, as it will probably hold that.
    """
    shards: dict[str, list[dict[str, Any]]] = {}
    reads: list[Read] = []
    later: list[str] = []
    blocks = optimizer.block_ranges()
    for slot, (name, param) in slot_names(optimizer, param_names).items():
        entry = entries.get(name)
        if entry is None:
            continue
        for place in entry.ranges:
            if (slot, *place) not in blocks:
                raise _other_blocks(name, place)
        order = FlatOrder(param)
        state: dict[str, Any] = dict(entry.values)
        for key, stored in entry.tensors.items():
            info = reader.info(stored)
            fits = info.shape in (tuple(param.shape), order.shape)
            named = optimizer.is_per_element(key, None, 0)
            if named and not fits:
                raise UsageError(
                    f"the state's {key!r} of parameter {name!r} has shape {list(info.shape)}, the parameter "
                    f"{list(param.shape)}",
                    remedy="resume with the model and the optimizer that the checkpoint was written with",
                )
            if named or (fits and info.shape):
                state[key] = entry_in_file = _StoredFlat(reader, stored, order)
                if (mine := written(stored)) is None:
                    later.append(stored)
                else:
                    reads += entry_in_file.read_ahead(mine)
            else:
                state[key] = torch.empty(info.shape, dtype=info.dtype)
                reads.append(Read(stored, Box.whole(info.shape), state[key]))
        shards[slot] = [{"start": 0, "stop": order.numel, "state": state}]
        shards[slot] += [
            {"start": start, "stop": stop, "state": part} for (start, stop), part in entry.ranges.items()
        ]
    infos = [reader.info(stored) for stored in later]
    owners = partition_by_size([Box.whole(info.shape).numel for info in infos], ranks)
    reads += [
        Read(stored, Box.whole(info.shape), None)
        for stored, info, owner in zip(later, infos, owners, strict=True)
        if owner == rank
    ]
    return OptimizerPlan(reads, lambda: optimizer.load_shards(options, shards))
