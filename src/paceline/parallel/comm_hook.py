"""Communication hooks: a function of the user's reduces each bucket instead of the engine's all-reduce.

The interface is that of torch's DistributedDataParallel, so its hooks work here: ``hook(state, bucket)`` is called once
per bucket on every rank, in the same order, and returns a future of the mean over ranks.

[Note: weights] A gradient that is weighted by samples, or divided by the number of ranks already, is summed over ranks.
A hook averages, so such a bucket is multiplied by the number of ranks before the hook sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import SyncError, UsageError

__all__ = ["CommHook", "GradBucket", "HookedReduction"]

_HookResult = torch._C.Future | torch.Tensor | None


class GradBucket:
    """A bucket as a communication hook sees it, with the methods of ``torch.distributed.GradBucket``.

    Args:
        index: position in launch order, which is the same on all ranks.
        buffer: this rank's gradients, 1-D, or one sparse gradient.
        gradients: the views into it, one per parameter.
        parameters: the parameters.
        last: no bucket follows in this round.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: list[torch.Tensor],
        parameters: list[torch.nn.Parameter],
        *,
        last: bool,
    ) -> None:
        self._index, self._buffer, self._last = index, buffer, last
        self._gradients, self._parameters = gradients, parameters

    def index(self) -> int:
        """Return the position in launch order."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return this rank's gradients, one behind the other."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each parameter: views into `buffer`."""
        return list(self._gradients)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether no bucket follows in this round."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace what `buffer` returns; the result of the hook still decides."""
        self._buffer = tensor


class HookedReduction:
    """The result of a communication hook while it is pending.

    Args:
        result: what the hook returned.
        place: where the mean is written, 1-D.
    """

    def __init__(self, result: _HookResult, place: torch.Tensor) -> None:
        self._result, self._place = result, place
        self.ended: float | None = None

    def poll(self) -> None:
        """A hook's future does not report when it completed."""

    def wait(self) -> None:
        """Block until the mean is in place."""
        reduced = _value_of(self._result)
        if reduced is None:
            return
        if reduced.numel() != self._place.numel():
            raise UsageError(
                f"the communication hook returned {list(reduced.shape)} for a bucket of {list(self._place.shape)}",
                remedy="return a tensor of the shape of bucket.buffer()",
            )
        if reduced.data_ptr() != self._place.data_ptr() or reduced.dtype != self._place.dtype:
            self._place.copy_(reduced.detach().reshape(-1))


class CommHook:
    """A communication hook with its state.

    Args:
        state: passed to the hook as its first argument.
        hook: ``hook(state, bucket)`` with a `GradBucket`; returns a future of the mean over ranks, the mean itself, or
            None if it was written into ``bucket.buffer()``.
        ranks: number of ranks.
    """

    def __init__(self, state: Any, hook: Callable[[Any, Any], _HookResult], ranks: int) -> None:
        self._state, self._hook, self._ranks = state, hook, ranks

    def reduce(self, bucket: GradBucket, place: torch.Tensor, *, mean: bool) -> HookedReduction:
        """Call the hook.

        Args:
            bucket: the gradients of this rank.
            place: their memory, which receives the result.
            mean: the mean over ranks is wanted, not the sum; see [Note: weights].

        Raises:
            SyncError: the hook returned something else than a future, a tensor or None.
        """
        if not mean:
            place.mul_(self._ranks)
        return HookedReduction(self._call(bucket), place)

    def reduce_sparse(self, bucket: GradBucket) -> Callable[[], torch.Tensor]:
        """Call the hook with one sparse gradient; the result is returned by the function that is returned."""
        result = self._call(bucket)

        def wait() -> torch.Tensor:
            reduced = _value_of(result)
            return bucket.buffer() if reduced is None else reduced

        return wait

    def _call(self, bucket: GradBucket) -> _HookResult:
        result = self._hook(self._state, bucket)
        if result is None or isinstance(result, torch.Tensor | torch._C.Future):
            return result
        raise SyncError(
            f"callback must return a torch.futures.Future object, but got {type(result)}",
            remedy="return for example dist.all_reduce(bucket.buffer(), async_op=True).get_future()",
        )


def _value_of(result: _HookResult) -> torch.Tensor | None:
    value = result.wait() if isinstance(result, torch._C.Future) else result
    return value[0] if isinstance(value, list | tuple) else value
