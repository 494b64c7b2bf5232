"""This rank's shards of some buckets and the inner optimizer that updates them.

[Note: groups] Shards that are updated together have an inner optimizer; there is one per 4 MiB or so. All of them
share the outer parameter groups: each starts a step with their values, and as the optimizer is elementwise, all end it
with the same new ones, which become the outer groups' values. So what a scheduler sets reaches the update, and what an
optimizer keeps in its groups (a step count) lasts, and is the same on all ranks. For a group of which this rank holds
no element, an inner optimizer of a single zero does the counting.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.grad_slot import ShardPiece
from paceline.parallel.engine.grad_scaler import skips_on_device

__all__ = ["BucketGroup", "copied", "on_device", "saved_options", "take_over", "zero_with_grad"]

_IMMUTABLE = (int, float, complex, str, bytes, tuple, type(None))


@dataclass(frozen=True)
class BucketGroup:
    """This rank's shards of some buckets, updated together.

    Attributes:
        buckets: the buckets.
        pieces: of parameters in these shards, each with the parameter that the optimizer updates.
        indices: of the outer parameter groups that the inner optimizer's groups belong to.
        optimizer: of the pieces; None without any.
    """

    buckets: list[Bucket]
    pieces: list[tuple[ShardPiece, torch.nn.Parameter]]
    indices: list[int]
    optimizer: torch.optim.Optimizer | None

    def flats(self) -> list[torch.Tensor]:
        """Return the buckets' parameters."""
        return [bucket.params for bucket in self.buckets if bucket.params is not None]

    def follow_buckets(self) -> None:
        """Update the pieces in their buckets' present buffers, which replaced others."""
        for piece, param in self.pieces:
            buffer, start = piece.slot.bucket.params, piece.slot.start
            assert buffer is not None, "sharded buckets hold parameters"
            param.data = buffer[start + piece.start : start + piece.stop]

    def param_groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Return the inner groups, each with the index of its outer group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return zip(self.indices, groups, strict=True)

    def state_of(self, param: torch.nn.Parameter) -> dict[str, Any]:
        """Return the state of a piece's parameter."""
        assert self.optimizer is not None, "there are pieces"
        return self.optimizer.state[param]

    def skips_on_device(self) -> bool:
        """Return whether the optimizer skips an update by a flag on the device; see `grad_scaler`."""
        if self.optimizer is None:
            return True
        used = {id(param) for piece, param in self.pieces if piece.slot.used}
        return skips_on_device(self.optimizer, lambda param: id(param) in used)

    def update(
        self, options: Sequence[Mapping[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run the optimizer with the `options` of the outer groups, and with arguments of its ``step``."""
        if self.optimizer is None:
            return
        for index, mine in self.param_groups():
            mine.update(copied(options[index]))
        for piece, param in self.pieces:
            param.grad = piece.grad.to(param.dtype) if piece.slot.used else None
        self.optimizer.step(*args, **kwargs)


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
