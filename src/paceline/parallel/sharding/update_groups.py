"""Units that are updated together, by one inner optimizer.

[Note: groups] Shards that are updated together have an inner optimizer; there is one per 4 MiB or so. All of them
share the outer parameter groups: each starts a step with their values, and as the optimizer updates every parameter by
itself, all end it with the same new ones, which become the outer groups' values. So what a scheduler sets reaches the
update, and what an optimizer keeps in its groups (a step count) lasts, and is the same on all ranks. For a group of
which this rank holds no element, an inner optimizer of a single zero does the counting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.grad_slot import GradSlot, ShardPiece, shaped_as
from paceline.parallel.engine.grad_scaler import skips_on_device
from paceline.parallel.sharding.blocks import Block
from paceline.parallel.sharding.update_units import StatePrecision, UpdateUnit

__all__ = [
    "UpdateGroup",
    "copied",
    "flat_units",
    "on_device",
    "owned_units",
    "saved_options",
    "take_over",
    "units_in_place",
    "zero_with_grad",
]

_IMMUTABLE = (int, float, complex, str, bytes, tuple, type(None))


@dataclass(frozen=True, eq=False)
class UpdateGroup:
    """Units that are updated together, and the buckets that they are shards of.

    Attributes:
        units: what this rank updates.
        indices: of the outer parameter groups that the inner optimizer's groups belong to.
        optimizer: of the units; None without any.
        buckets: that are waited for before the update and gathered after it; none where nothing is sharded.
    """

    units: list[UpdateUnit]
    indices: list[int]
    optimizer: torch.optim.Optimizer | None
    buckets: list[Bucket] = field(default_factory=list)

    def flats(self) -> list[Tensor]:
        """Return the buckets' parameters."""
        return [bucket.params for bucket in self.buckets if bucket.params is not None]

    def follow_buckets(self) -> None:
        """Update the units in their buckets' present buffers, which replaced others."""
        for unit in self.units:
            unit.follow_memory()

    def param_groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Return the inner groups, each with the index of its outer group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return zip(self.indices, groups, strict=True)

    def state_of(self, unit: UpdateUnit) -> dict[str, Any]:
        """Return the inner optimizer's state of a unit."""
        assert self.optimizer is not None, "there are units"
        return self.optimizer.state[unit.inner]

    def skips_on_device(self) -> bool:
        """Return whether the optimizer skips an update by a flag on the device; see `grad_scaler`."""
        if self.optimizer is None:
            return True
        used = {id(unit.inner) for unit in self.units if unit.used}
        return skips_on_device(self.optimizer, lambda param: id(param) in used)

    def update(
        self, options: Sequence[Mapping[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run the optimizer with the `options` of the outer groups, and with arguments of its ``step``."""
        self.load(options)
        self.run(args, kwargs)

    def load(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer the `options` of the outer groups, and the gradients."""
        for index, mine in self.param_groups():
            mine.update(copied(options[index]))
        for unit in self.units:
            if not self.buckets:  # the program may have replaced the parameter's memory
                unit.follow_memory()
            unit.load()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the optimizer, with what was loaded."""
        if self.optimizer is None:
            return
        self.optimizer.step(*args, **kwargs)
        for unit in self.units:
            unit.store()


def flat_units(bucket: Bucket, shard: int, shards: int, precision: StatePrecision) -> list[UpdateUnit]:
    """Return the parts of parameters that lie in a shard of a bucket, flattened."""
    return [
        UpdateUnit(
            piece.slot.name,
            piece.start,
            piece.stop,
            _place(piece),
            _grad_of(piece.slot, piece.grad),
            precision,
        )
        for piece in bucket.pieces(shard, shards)
    ]


def owned_units(
    bucket: Bucket, shard: int, shards: int, blocks: Mapping[str, list[Block]], precision: StatePrecision
) -> list[UpdateUnit]:
    """Return the blocks of the parameters that a rank owns in a bucket, in their own shapes.

    Args:
        bucket: whose parameters lie wholly in one shard each.
        shard: this rank's.
        shards: number of shards.
        blocks: by parameter name.
        precision: of what the optimizer holds.
    """
    units = []
    for piece in bucket.pieces(shard, shards):
        place, param = _place(piece), piece.slot.param
        for block in blocks.get(piece.slot.name, []):

            def data(
                block: Block = block, place: Callable[[], Tensor] = place, param: Tensor = param
            ) -> Tensor:
                return block.of(shaped_as(param, place()))

            grad = block.of(shaped_as(param, piece.grad))
            grad_of = _grad_of(piece.slot, grad)
            units.append(UpdateUnit(block.name, block.start, block.stop, data, grad_of, precision))
    return units


def units_in_place(blocks: Sequence[Block], precision: StatePrecision) -> list[UpdateUnit]:
    """Return blocks of parameters that every rank updates whole."""
    units = []
    for block in blocks:

        def data(block: Block = block) -> Tensor:
            return block.of(block.param.detach())

        def grad(block: Block = block) -> Tensor | None:
            whole = block.param.grad
            return None if whole is None else block.of(whole.detach())

        unit = UpdateUnit(block.name, block.start, block.stop, data, grad, precision, replicated=True)
        units.append(unit)
    return units


def _place(piece: ShardPiece) -> Callable[[], Tensor]:
    """Return a function that returns where the piece's parameter is now, flattened."""
    bucket, low = piece.slot.bucket, piece.slot.start + piece.start
    high = piece.slot.start + piece.stop

    def place() -> Tensor:
        assert bucket.params is not None, "sharded buckets hold parameters"
        return bucket.params[low:high]

    return place


def _grad_of(slot: GradSlot, grad: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that returns a gradient if the round has one."""
    return lambda: grad if slot.used else None


def saved_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a state dictionary has of a group, besides the parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that an inner optimizer may change in place."""
    return {
        key: value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value)
        for key, value in options.items()
    }


def take_over(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set a group's options; a tensor stays the object that it is, as the program may hold it."""
    for key, value in options.items():
        now = group.get(key)
        if now is value:
            continue
        if (
            isinstance(value, torch.Tensor)
            and isinstance(now, torch.Tensor)
            and (now.shape, now.dtype) == (value.shape, value.dtype)
        ):
            now.copy_(value)
        else:
            group[key] = value


def on_device(state: Mapping[str, Any], param: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loaded state on the parameter's device, but for ``step`` where torch's optimizers keep it."""
    kept = () if options.get("capturable") or options.get("fused") else ("step",)
    return {
        key: value.to(param.device) if isinstance(value, torch.Tensor) and key not in kept else value
        for key, value in state.items()
    }


def zero_with_grad(device: torch.device) -> torch.nn.Parameter:
    """Return a parameter that stays zero; see [Note: groups]."""
    param = torch.nn.Parameter(torch.zeros(1, device=device))
    param.grad = torch.zeros(1, device=device)
    return param
