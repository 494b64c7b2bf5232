"""Sparse gradients, as of ``torch.nn.Embedding(sparse=True)``: all-reduced one by one, outside the buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from paceline.parallel.comm_hook import CommHook, GradBucket
from paceline.parallel.engine.loss_weights import Factor
from paceline.parallel.gradient_collectives import Comm

__all__ = ["SparseGradients"]


class SparseGradients:
    """The parameters with sparse gradients. Every rank counts the same.

    Args:
        named: the parameters with their names, in the same order on all ranks.
        comm: the ranks.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], comm: Comm) -> None:
        self.params = [param for _, param in named]
        self._comm = comm
        self._handles: list[RemovableHandle] = []

    def watch(self, arrived: Callable[[], None]) -> None:
        """Call `arrived`, held weakly, after autograd has added to a gradient."""
        method = weakref.WeakMethod(arrived)

        def hook(_param: torch.Tensor) -> None:
            alive = method()
            if alive is not None:
                alive()

        self._handles = [param.register_post_accumulate_grad_hook(hook) for param in self.params]

    def unwatch(self) -> None:
        """Undo `watch`."""
        for handle in self._handles:
            handle.remove()

    def reduce(self, hook: CommHook | None, buckets: int, factor: Factor) -> None:
        """Average every gradient over all ranks, and multiply it; all ranks call this in every round.

        Args:
            hook: averages instead of the engine.
            buckets: number of the buckets before these, for the hook.
            factor: of the averages.
        """
        waits = [self._launch(param, hook, buckets + at) for at, param in enumerate(self.params)]
        for param, wait in zip(self.params, waits, strict=True):
            param.grad = wait() * factor

    def _launch(
        self, param: torch.nn.Parameter, hook: CommHook | None, index: int
    ) -> Callable[[], torch.Tensor]:
        mine = _no_rows(param) if param.grad is None else param.grad.detach().coalesce()
        if hook is not None:
            last = param is self.params[-1]
            return hook.reduce_sparse(GradBucket(index, mine, [mine], [param], last=last))
        work = dist.all_reduce(mine, group=self._comm.group, async_op=True)

        def wait() -> torch.Tensor:
            if work is not None:
                work.wait()
            return mine / self._comm.size

        return wait

    def drop(self) -> None:
        """Discard all gradients."""
        for param in self.params:
            param.grad = None


def _no_rows(param: torch.Tensor) -> torch.Tensor:
    """Return a gradient without rows, as of an embedding that was not used."""
    indices = torch.zeros(1, 0, dtype=torch.int64, device=param.device)
    values = param.new_zeros(0, *param.shape[1:])
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False).coalesce()
