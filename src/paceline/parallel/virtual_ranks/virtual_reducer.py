"""Synchronises gradients so that their bits do not depend on the number of ranks.

A step consists of V backwards, one per virtual rank (*leaf*). Each rank runs those of its leaves, one after the other;
the last one closes the round. What may depend on who ran a leaf is kept apart:

    gradients   of each leaf are computed anew, outside of the sum, and added along the fixed tree (`partial_sums`
                inside a rank, `tree_sum` between ranks)
    weights     losses are scaled by samples / reference, where the reference is the total of the step before
    norm        summed over fixed blocks of the parameters (`grad_norm`)
    buffers     every leaf starts from those of the step before; all leaves' are averaged (`leaf_buffers`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline._core.format import plural
from paceline._core.step_state import step_state, wait_counters
from paceline._core.summation_tree import leaves_of
from paceline.data.leaf_random import seed_generators
from paceline.errors import SyncError, UsageError
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.bucket_builder import Layout, agree_order
from paceline.parallel.compression.compressed_bucket import ResidualState
from paceline.parallel.engine.engine_protocols import InFlight
from paceline.parallel.engine.grad_norm import NORM_BLOCK
from paceline.parallel.engine.launch_queue import LaunchQueue
from paceline.parallel.engine.loss_weights import Factor, LossWeights
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.round_status import RoundSummary, Status
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync
from paceline.parallel.virtual_ranks.arithmetic_probe import compare_arithmetic
from paceline.parallel.virtual_ranks.leaf_buffers import LeafBuffers
from paceline.parallel.virtual_ranks.partial_sums import PartialSums
from paceline.parallel.virtual_ranks.tree_sum import TreeSum

__all__ = ["VirtualRankReducer", "check_virtual_plan"]

_CALL = (
    "call model.backward(loss, samples=batch.samples) for every batch of a Loader with the same virtual_ranks"
)


def check_virtual_plan(
    module: torch.nn.Module, sync: object, plan: Sync, comm: Comm, reduce_dtype: torch.dtype | None
) -> None:
    """Raise for what virtual ranks can't do.

    Args:
        module: the model.
        sync: the strategy, as passed.
        plan: what it means.
        comm: the ranks.
        reduce_dtype: of gradients of 16-bit parameters.

    Raises:
        UsageError: names it, and what to do.
    """
    low = [
        name for name, param in module.named_parameters() if param.dtype.itemsize < 4 and param.requires_grad
    ]
    if sync == "auto" or plan.shard == "parameters":
        problem, remedy = f"sync={sync!r}", 'use "bucketed", "sharded" or another strategy of this engine'
    elif plan.compression is not None:
        problem = f"compression={str(plan.compression)!r}"
        remedy = "leave the compression out: what it leaves behind belongs to a rank, not to a virtual rank"
    elif comm.shard_axis is not comm:
        problem, remedy = f"a device mesh of two axes ({comm.layout})", "pass one axis of it"
    elif low and (reduce_dtype is None or reduce_dtype.itemsize < 4):
        problem = f"parameter {low[0]!r} of 16 bits, whose sums would be rounded after every addition"
        remedy = "pass reduce_dtype=torch.float32"
    else:
        return
    raise UsageError(f"virtual_ranks with {problem}", rank=comm.rank, remedy=remedy)


class _TreeLaunchQueue(LaunchQueue):
    """A launch queue that adds partial sums along the tree.

    Args:
        comm, sharded, overlap: as for `LaunchQueue`.
        partial_sums: of this rank.
        tree_sum: of all ranks.
    """

    def __init__(
        self, comm: Comm, *, sharded: bool, overlap: bool, partial_sums: PartialSums, tree_sum: TreeSum
    ) -> None:
        super().__init__(comm, sharded=sharded, overlap=overlap)
        self._partial_sums, self._tree_sum = partial_sums, tree_sum

    def _collected(self, bucket: Bucket) -> None:
        if bucket.slots:
            self._partial_sums.complete(bucket)

    def _send(self, bucket: Bucket, mean: bool) -> InFlight:
        if not bucket.slots:
            return super()._send(bucket, mean)
        partial = [*self._partial_sums.others(bucket), bucket.flat]
        if not self.sharded or (self.neighbours is not None and not self._tree_sum.exchanges):
            return self._tree_sum.all_reduce(partial)
        reduced = self._tree_sum.reduce_scatter(partial)
        return reduced if self.neighbours is None else self.neighbours.pass_on(bucket.flat, reduced)


class VirtualRankReducer(Reducer):
    """A `Reducer` whose results are the same to the bit for any number of ranks.

    Args:
        named, comm, plan, reduce_dtype, frozen, module: as for `Reducer`.
        virtual_ranks: backwards per step, at least one per rank.

    Attributes:
        arithmetic: of this rank; see `arithmetic_probe`.
    """

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        comm: Comm,
        plan: Sync,
        reduce_dtype: torch.dtype | None,
        frozen: Sequence[tuple[str, torch.nn.Parameter]],
        module: torch.nn.Module,
        virtual_ranks: int,
    ) -> None:
        device = named[0][1].device if named else torch.device("cpu")
        self.arithmetic = compare_arithmetic(comm, device)  # a collective: nothing is left behind if it fails
        super().__init__(named, comm, plan, reduce_dtype, frozen, module)
        self.virtual_ranks = virtual_ranks
        self._leaves = leaves_of(comm.rank, comm.size, virtual_ranks)
        self._done = 0  # of these, in the present step
        self._closing = False
        self._partial_sums = PartialSums(self._leaves, virtual_ranks)
        tree_sum = TreeSum(comm, virtual_ranks)
        self.launch_queue = _TreeLaunchQueue(
            comm,
            sharded=self.sharded,
            overlap=plan.overlap,
            partial_sums=self._partial_sums,
            tree_sum=tree_sum,
        )
        self.residuals = ResidualState(self.launch_queue)
        self.layout = Layout(align=NORM_BLOCK, in_parts=tree_sum.exchanges)
        self.weights = LossWeights(comm.rank, virtual_ranks)
        self._buffers = LeafBuffers(module, comm, virtual_ranks)
        self._shards.norms_vary = True
        self._used: set[int] = set()  # slots with a gradient of a leaf that is done

    @property
    def _is_last(self) -> bool:
        """Whether the next backward, or the running one, is this rank's last one of the step."""
        return self._done == len(self._leaves) - 1

    def _is_alone(self) -> bool:
        return False

    # ------------------------------------------------------------------ begin

    def before_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Prepare for a forward."""
        if torch.is_grad_enabled() and self._done == 0 and not self._in_backward:
            self._buffers.begin_step()
        return super().before_forward(args, kwargs)

    def begin(self, status: Status, samples: Factor = 0.0) -> None:
        """Open the backward of the next leaf.

        Raises: as `Reducer.begin`, and
            UsageError: a call without samples, or of another leaf than the loader has served.
            SyncError: gradients of the step before were not dropped.
        """
        self.recover()
        if self._in_backward:
            return
        self._check_call(status, samples)
        if self._reduced and not self.empty:
            raise SyncError(
                "backward with gradients of the step before, which virtual ranks can't add to",
                rank=self.comm.rank,
                step=self.step,
                remedy="call zero_grad() after every optimizer.step()",
            )
        before = self.weights.samples if self._done else 0.0
        losses = list(self.finite_check.losses) if self.finite_check is not None and self._done else []
        if self._done == 0:
            self._partial_sums.clear()
            self._used.clear()
        self.sync_enabled = self._is_last
        try:
            super().begin(status, samples)
        finally:
            self.sync_enabled = True
        self.weights.samples += before
        if self.finite_check is not None:
            self.finite_check.losses[:0] = losses
        for index in self._used:
            self.slots[index].used = True
        if self._is_last:
            self._partial_sums.begin_last()

    def _check_call(self, status: Status, samples: Factor) -> None:
        if not self.sync_enabled:
            problem = "accumulate() with virtual ranks, which accumulate the batches of a step themselves"
        elif status is not Status.SAMPLES:
            problem = "backward without samples= with virtual ranks"
        elif samples != int(samples):
            problem = f"{float(samples)} samples with virtual ranks (a loss of 16 bits rounds them: use loss.float())"
        elif (served := wait_counters.leaf) is not None and served[:2] != (
            self.virtual_ranks,
            self._leaves[self._done],
        ):
            problem = (
                f"backward of virtual rank {self._leaves[self._done]} of {self.virtual_ranks}, "
                f"but the loader has served virtual rank {served[1]} of {served[0]}"
            )
        else:
            return
        raise UsageError(problem, rank=self.comm.rank, step=self.step, remedy=_CALL)

    # ------------------------------------------------------------------ finish

    def finish(self, failed: bool = False) -> None:
        """Close the backward of a leaf; the last one, and one that failed, closes the round.

        Raises: as `Reducer.finish`.
        """
        if not self._in_backward:
            return
        if failed or self._is_last:
            self._will_sync = self._closing = True
            try:
                super().finish(failed)
            finally:
                self._closing = False
            return
        self._in_backward, self._local = False, True
        self.hooks.watching[:] = [True]
        if not self.has_buckets:  # every rank has a leaf, so all agree on its order here
            self._collect()
            if not self.weights.agreed:
                self._agree_weights()
            self.order = agree_order(self.comm, self.slots, self._firings)
            self._build_buckets()
        self._keep_late()
        self._refuse_late(len(self._late))
        self._collect()
        self._used |= {slot.index for slot in self.slots if slot.used or slot.fired > 0}
        self._partial_sums.keep(self.buckets, self._leaves[self._done])
        for slot in self.slots:
            slot.param.grad = slot.unbucketed = None
        self._buffers.end_leaf(self._leaf_samples())
        self._buffers.restore()
        self._done += 1
        step_state.enter_phase("outside")

    def synchronise(self, failed: bool = False) -> None:
        """Run a round over the gradients of all leaves.

        Raises: as `Reducer.synchronise`, and
            SyncError: there are batches of this step left, which ``optimizer.step()`` can't replace.
        """
        if not (self._closing or failed):
            raise SyncError(
                f"optimizer.step() or clipping after {plural(self._done, 'backward')} of the {len(self._leaves)} that "
                "this rank runs in a step",
                rank=self.comm.rank,
                step=self.step,
                remedy="call optimizer.step() where batch.ends_step is True",
            )
        if not failed:
            self._buffers.end_leaf(self._leaf_samples())
        try:
            super().synchronise(failed)
        finally:
            self._done = 0
        if not failed:
            self._buffers.average()
            if (served := wait_counters.leaf) is not None:
                seed_generators(served[2])

    def _leaf_samples(self) -> float:
        """Return the samples of the leaf that ends now."""
        total = self.weights.samples
        assert not isinstance(total, torch.Tensor), "the status is read in time"
        return float(total) - self._buffers.samples

    def _exchange(self, status: Status) -> RoundSummary | None:
        summary = super()._exchange(status)
        self._refuse_late(0 if summary is None else summary.late)
        return summary

    def _defers(self) -> bool:
        return False

    def _refuse_late(self, late: int) -> None:
        if late:
            raise SyncError(
                "a gradient came after its bucket was sent, which virtual ranks can't add in order",
                rank=self.comm.rank,
                step=self.step,
                remedy="give DataParallel sync=Sync(overlap=False)",
            )

    def drop(self) -> None:
        """Discard all gradients, of this step's earlier leaves too."""
        super().drop()
        if self._closing or self._done:
            self._buffers.restore()
        self._buffers.end_step()
        self._partial_sums.clear()
        self._used.clear()
        if not self._closing:
            self._done = 0

    # ------------------------------------------------------------------ what virtual ranks exclude

    def run_joined_round(self) -> None:
        """Refuse torch's join context."""
        raise UsageError("torch's Join with virtual ranks", rank=self.comm.rank, remedy=_CALL)

    def set_local_only(self, local: bool) -> None:
        """Refuse local training."""
        raise UsageError("local training with virtual ranks", rank=self.comm.rank, remedy=_CALL)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Refuse hooks, which reduce in an order of their own."""
        raise UsageError(
            "register_comm_hook with virtual ranks",
            rank=self.comm.rank,
            remedy="leave the hook out, or leave virtual_ranks out",
        )
