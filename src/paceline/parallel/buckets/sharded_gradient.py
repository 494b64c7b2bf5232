"""What ``param.grad`` is while every rank holds a shard of the gradient.

It is a tensor without memory. What torch's clipping computes, it computes over the shards of all ranks: norms, and
elementwise operations in place (`grad_scaler` does the rest of ``GradScaler``). All ranks call these alike, as they do
with whole gradients. Everything else raises, where ``grad=None`` would be skipped: ``torch.nn.utils.clip_grad_norm_``
would return 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.parallel.buckets.grad_slot import GradSlot, ShardPiece
from paceline.parallel.gradient_collectives import Comm

__all__ = ["GradientShards", "ShardedGradient"]

_IN_PLACE = frozenset(["mul_", "div_", "neg_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"])
"""Operations that are done by doing them to the shards."""


class GradientShards:
    """This rank's shards of a round's result.

    Args:
        comm: the ranks.
        count: number of parameters.
        pieces: waits for the result and returns this rank's pieces.
        copied: returns those of the right neighbour's shard, if this rank keeps a copy of it; changed alike.

    Attributes:
        norms_vary: a norm over shards is refused, since its last bits depend on the number of ranks.
    """

    def __init__(
        self,
        comm: Comm,
        count: int,
        pieces: Callable[[], Sequence[ShardPiece]],
        copied: Callable[[], Sequence[ShardPiece]],
    ) -> None:
        self._comm, self._count, self._pieces, self._copied = comm, count, pieces, copied
        self._grads: dict[int, torch.Tensor] | None = None
        self._norms: dict[float, torch.Tensor] = {}
        self.norms_vary = False

    def clear(self) -> None:
        """Forget what was computed, as gradients change."""
        self._grads = None
        self._norms.clear()

    def grads(self) -> dict[int, torch.Tensor]:
        """Return this rank's shard by the parameter's index, where it has one."""
        if self._grads is None:
            self._grads = {piece.slot.index: _grad_of(piece) for piece in self._pieces()}
        return self._grads

    def norm(self, index: int, norm_type: float) -> torch.Tensor:
        """Return the norm of a whole gradient. The first call exchanges those of all, so all ranks make it."""
        norms = self._norms.get(norm_type)
        if norms is None:
            grads = self.grads()
            device = next((grad.device for grad in grads.values()), torch.device("cpu"))
            nothing = torch.zeros((), dtype=torch.float64, device=device)
            found = {
                at: torch.linalg.vector_norm(grad, norm_type).to(device, torch.float64)
                for at, grad in grads.items()
            }
            mine = torch.stack([found.get(at, nothing) for at in range(self._count)])
            norms = self._norms[norm_type] = self._comm.combine_norms(mine, norm_type)
        return norms[index]

    def change(
        self, index: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Call ``function(shard, *args, **kwargs)`` with this rank's shard, and with the one that it has a copy of."""
        grad = self.grads().get(index)
        if grad is not None:
            function(grad, *args, **kwargs)
        for piece in self._copied():
            if piece.slot.index == index:
                function(_grad_of(piece), *args, **kwargs)
        self._norms.clear()


def _grad_of(piece: ShardPiece) -> torch.Tensor:
    """Return a piece of a gradient in the parameter's kind of numbers."""
    return torch.view_as_complex(piece.grad.view(-1, 2)) if piece.slot.param.is_complex() else piece.grad


class ShardedGradient(torch.Tensor):
    """Stands for a gradient of which every rank holds a shard.

    Args:
        slot: the parameter.
        shards: this rank's shards of all parameters.
    """

    _slot: GradSlot
    _shards: GradientShards

    @staticmethod
    def __new__(
        cls: type[ShardedGradient], slot: GradSlot, shards: GradientShards, **options: Any
    ) -> ShardedGradient:
        """Return a tensor with the parameter's shape, strides, dtype and device, unless `options` has others."""
        param = slot.param
        options = {"dtype": param.dtype, "device": param.device} | options
        made = torch.Tensor._make_wrapper_subclass(cls, param.shape, strides=param.stride(), **options)
        made._slot, made._shards = slot, shards
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Return its parameter's name and shape."""
        return f"ShardedGradient({self._slot.name!r}, shape={list(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one of torch's operations over the shards of all ranks."""
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        # a model that is converted: the step refuses other dtypes and devices
        if name in ("detach", "_to_copy"):
            options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
            return ShardedGradient(args[0]._slot, args[0]._shards, **options)
        if name.startswith("_foreach_"):
            _check_all(name, args[0])
            single = getattr(
                torch.ops.aten, name.removeprefix("_foreach_").replace("norm", "linalg_vector_norm")
            )
            results = [single(grad, *args[1:], **kwargs) for grad in args[0]]
            return None if name.endswith("_") else results
        grad = args[0] if args else None
        if name in ("add", "add_") and torch._C._current_graph_task_id() != -1:
            return _add_in_backward(name, *args)
        if not isinstance(grad, ShardedGradient) or any(
            isinstance(other, torch.Tensor) and other.dim() for other in args[1:]
        ):
            held = pytree.tree_leaves((args, kwargs))
            raise _refusal(name, next(each for each in held if isinstance(each, ShardedGradient)))
        if name in _IN_PLACE:
            grad._shards.change(grad._slot.index, function, args[1:], kwargs)
            return grad
        if name == "linalg_vector_norm" and len(args) <= 2 and not kwargs.get("keepdim"):
            norm_type = float(args[1]) if len(args) > 1 else 2.0
            if norm_type > 0 and not grad._shards.norms_vary:
                dtype = kwargs.get("dtype") or (torch.float64 if grad.dtype.itemsize >= 8 else torch.float32)
                return grad._shards.norm(grad._slot.index, norm_type).to(dtype)
        raise _refusal(name, grad)


def _add_in_backward(name: str, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Keep what autograd adds in a backward that bypasses the wrapped forward, until the hook after it."""
    assert isinstance(grad, ShardedGradient), "autograd adds to what is there"
    if name == "add":
        return new
    grad._slot.added = new
    return grad


def _check_all(name: str, grads: Sequence[torch.Tensor]) -> None:
    ours = [grad for grad in grads if isinstance(grad, ShardedGradient)]
    if len(ours) < len(grads) or any(grad._shards is not ours[0]._shards for grad in ours):
        raise _refusal(f"{name} with gradients of other models", ours[0])


def _refusal(what: str, grad: ShardedGradient) -> UsageError:
    return UsageError(
        f"{what.removeprefix('_foreach_').rstrip('_')} on the gradient of parameter {grad._slot.name!r}, of which "
        "every rank holds a shard",
        remedy="clip with model.clip_grad_norm_, or use a strategy that leaves whole gradients, such as 'bucketed'",
    )
