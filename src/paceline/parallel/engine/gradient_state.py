"""Where gradients are while rounds come and go: in autograd's hands, in the buckets, shown or dropped.

[Note: carried gradients] A gradient that was already reduced and not dropped by zero_grad() must count once,
not once per rank. So one rank carries it into the next round and the others start from zero; when sharded,
each rank carries its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline._core.step_state import wait_counters
from paceline.errors import SyncError, UsageError
from paceline.parallel.compression.compressed_bucket import ResidualState
from paceline.parallel.engine.bucket import Bucket, GradSlot, ShardPiece
from paceline.parallel.engine.bucket_builder import build_buckets
from paceline.parallel.engine.comm import Comm
from paceline.parallel.engine.finite_check import FiniteCheck, NonFiniteReport
from paceline.parallel.engine.grad_hooks import LateGradients
from paceline.parallel.engine.launch_queue import LaunchQueue, SyncTimings
from paceline.parallel.engine.loss_weights import LossWeights
from paceline.parallel.engine.round_status import RoundSummary
from paceline.parallel.strategy import Sync

if TYPE_CHECKING:
    from paceline.parallel.tuning.tuner import Tuner

__all__ = ["GradientState"]


class GradientState:
    """The gradients of a list of parameters on one rank.

    Args:
        named: the trainable parameters with their names, in registration order, each once.
        comm: the ranks.
        plan: how gradients are synchronised.
        reduce_dtype: dtype in which gradients of bf16 and fp16 parameters are accumulated and reduced;
            None: their own.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        comm: Comm,
        plan: Sync,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.comm, self.plan, self.reduce_dtype = comm, plan, reduce_dtype
        self.sharded = plan.shard == "optimizer" and comm.size > 1
        self.slots = [GradSlot(index, name, param) for index, (name, param) in enumerate(named)]
        self.launch_queue = LaunchQueue(comm, sharded=self.sharded, overlap=plan.overlap)
        self.leftovers = ResidualState(self.launch_queue)
        self.order: list[int] = []
        """The order in which gradients become ready, as all ranks adopted it; empty before there are buckets."""
        self.weights = LossWeights(comm.rank, comm.size)
        self.tuner: Tuner | None = None
        """Changes the plan between steps, where that is asked."""
        self.arrivals: dict[int, float] | None = None
        """When the gradients of slots were complete in the latest backward (`time.perf_counter`), while asked for."""
        self.round_ended: Callable[[int], None] | None = None
        """Is told of every round that no rank failed in, on all ranks together, with how many rounds there were."""
        self.step = 0
        """Rounds so far: optimizer steps, where every step has one."""
        self.finite_check: FiniteCheck | None = None
        """Measures what this rank brings, where somebody asks whether gradients are finite."""
        self.broken: NonFiniteReport | None = None
        """What is wrong with the latest result, where it is known to be not finite."""

        self._local = False  # there are gradients of this rank that no round has seen
        self._reduced = False  # there is the result of a round
        self._late = LateGradients()

    # ------------------------------------------------------------------ what they are

    @property
    def settled(self) -> bool:
        """Whether the buckets exist (see [Note: the first round])."""
        return bool(self.buckets)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in launch order; none before the first round."""
        return self.launch_queue.buckets

    @property
    def timings(self) -> SyncTimings:
        """What the latest round cost this rank."""
        return self.launch_queue.timings

    @property
    def device(self) -> torch.device:
        """Where gradients are, as far as they are on one device."""
        return self.slots[0].param.device if self.slots else torch.device("cpu")

    @property
    def sees_waiting(self) -> bool:
        """Whether the host's clock tells computing from waiting for others: not on a GPU, which works on its own."""
        return self.device.type == "cpu"

    def note_waiting(self, seconds: float) -> None:
        """Count `seconds` in which this rank did nothing but wait for collectives or complete them."""
        self.timings.exposed_seconds += seconds
        if self.sees_waiting:
            wait_counters.add(seconds)

    def pieces(self) -> list[ShardPiece]:
        """Return this rank's parts of the parameters, in bucket order; sharded plans, after the first round."""
        return [
            piece
            for bucket in self.buckets
            if bucket.slots
            for piece in bucket.pieces(self.comm.rank, self.comm.size)
        ]

    def local_grads(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients of which this rank holds a shard, and those that every rank holds whole."""
        if self.sharded:
            self.note_waiting(self.launch_queue.arrive_all())
            return [piece.grad for piece in self.pieces() if piece.slot.used] if self._reduced else [], []
        return [], [slot.param.grad for slot in self.slots if slot.param.grad is not None]

    def parts_by_name(self) -> dict[str, list[torch.Tensor]]:
        """Return this rank's part of the result, by parameter."""
        parts: dict[str, list[torch.Tensor]] = {slot.name: [] for slot in self.slots}
        if self.sharded:
            self.launch_queue.arrive_all()
            for piece in self.pieces():
                parts[piece.slot.name] += [piece.grad] if piece.slot.used else []
            return parts
        for slot in self.slots:
            parts[slot.name] += [slot.param.grad] if slot.param.grad is not None else []
        return parts

    # ------------------------------------------------------------------ their places

    def _lay_out(self) -> None:
        self.launch_queue.buckets = build_buckets(
            self.slots,
            self.order,
            self.plan,
            self.comm,
            flags=len(self._used_flags()),
            sharded=self.sharded,
            reduce_dtype=self.reduce_dtype,
        )
        self.leftovers.resume()

    def change_plan(self, plan: Sync) -> None:
        """Lay out the buckets anew, between two steps; kept gradients move along. Every rank does the same.

        To a plan that shards, or from one, only without kept gradients. Not for plans that compress, whose buckets
        have a memory.
        """
        assert self.settled, "there are buckets"
        assert not self._local, "nothing waits for a round"
        self.launch_queue.arrive_all()
        kept = [slot.param.grad is not None for slot in self.slots]
        for slot, has in zip(self.slots, kept, strict=True):
            slot.early = slot.view if has and slot.staged else None
        self.plan, self.launch_queue.buckets = plan, []
        before, self.sharded = self.sharded, plan.shard == "optimizer" and self.comm.size > 1
        self.launch_queue.sharded = self.sharded
        if before and not self.sharded:
            # out of the buffers, whose memory may be shared, and slower to compute with
            for slot in self.slots:
                slot.param.data = slot.param.detach().clone()
        self.launch_queue.overlap = plan.overlap
        self._lay_out()
        for slot, has in zip(self.slots, kept, strict=True):
            slot.show(has)

    # ------------------------------------------------------------------ before backward

    @property
    def dropped(self) -> bool:
        """Whether there are no gradients, of this rank or reduced."""
        return not self._kept()

    def _kept(self) -> set[int]:
        """Return the slots whose gradients were not dropped by zero_grad()."""
        if self.sharded and self._reduced:  # a sharded result is not in param.grad
            return {slot.index for slot in self.slots if slot.used}
        return {slot.index for slot in self.slots if slot.param.grad is not None}

    def _kept_elsewhere(self) -> bool:
        """Tell whether gradients outside the slots were kept."""
        return False

    def _attach(self, kept: set[int]) -> None:
        """Make every gradient a view into its bucket, stale where nothing was kept."""
        for bucket in self.buckets:
            bucket.pending, bucket.launched, bucket.ready = len(bucket.slots), False, None
            for slot in bucket.slots:
                slot.fired = 0
                slot.used = slot.index in kept
                slot.stale = not slot.used
                if slot.used:
                    self._restore(slot)
                slot.param.grad = None if slot.staged else slot.view

    def _attach_early(self, slot: GradSlot) -> None:
        """Before there are buckets: keep what was not dropped, in the dtype of the reduction."""
        slot.fired, slot.used = 0, slot.param.grad is not None
        if not slot.used:
            slot.early = None
        elif slot.early is not None:
            slot.param.grad = None

    @staticmethod
    def _restore(slot: GradSlot) -> None:
        """Bring a view that is kept up to date with what the program did to ``param.grad``."""
        grad = slot.param.grad
        if grad is not None and grad is not slot.view and not slot.staged:
            slot.view.copy_(grad.detach())

    def _carry(self) -> None:
        """Take reduced gradients into this round, so that they count once; see [Note: carried gradients]."""
        self._reduced = False
        self._carry_results(self.weights.carry())

    def _carry_results(self, factor: float) -> None:
        if self.sharded:
            for bucket, low, high in self.launch_queue.own_parts():
                bucket.flat[:low].zero_()
                bucket.flat[high:].zero_()
                bucket.flat[low:high].mul_(factor)
        elif not self.weights.averaged and self._results():  # an average of the result is the result
            torch._foreach_mul_(self._results(), factor if self.weights.carries else 0.0)

    def _refuse_capture(self) -> None:
        """Raise where this backward would go into a CUDA graph: a round reads its ledger, which a graph can't."""
        if self.comm.size == 1 or self.device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"backward is captured into a CUDA graph in a world of {self.comm.size} ranks",
                rank=self.comm.rank,
                step=self.step,
                remedy="capture the module alone, with torch.cuda.make_graphed_callables, and wrap that",
            )

    # ------------------------------------------------------------------ in backward

    def _move_in(self, slot: GradSlot) -> None:
        """Take a gradient that autograd put elsewhere (staged dtype, create_graph, set by the program)."""
        grad = slot.param.grad
        assert grad is not None, "the hook runs after accumulation"
        if slot.staged:
            slot.view.add_(grad.detach())
            slot.param.grad = None
        else:
            slot.view.copy_(grad.detach())
            slot.param.grad = slot.view

    def _refuse_sparse(self, slot: GradSlot) -> None:
        if slot.param.grad is not None and slot.param.grad.is_sparse:
            slot.param.grad = None
            raise SyncError(
                f"parameter {slot.name!r} has a sparse gradient",
                rank=self.comm.rank,
                step=self.step,
                remedy="build the embedding with sparse=False",
            )

    # ------------------------------------------------------------------ after it

    def _used_flags(self) -> list[bool]:
        """Return for every parameter whether this rank has a gradient."""
        return [slot.used or slot.fired > 0 for slot in self.slots]

    def _results(self) -> list[torch.Tensor]:
        """Return the memory of this rank's part of the result."""
        if self.settled:
            return [bucket.flat[low:high] for bucket, low, high in self.launch_queue.own_parts()]
        held = (slot.param.grad if slot.early is None else slot.early for slot in self.slots)
        return [grad for grad in held if grad is not None]

    def _scale(self, factor: float) -> None:
        """Multiply the result, where that changes it."""
        if self.settled:
            self.launch_queue.scale(factor)
        elif factor != 1.0 and (results := self._results()):
            torch._foreach_mul_(results, factor)

    def _attach_result(self, page: RoundSummary) -> None:
        """Show the result as ``param.grad`` where any rank has a gradient."""
        for slot, used in zip(self.slots, page.used, strict=False):
            slot.used = used
            slot.show(used and not self.sharded)  # of a shard nothing is shown rather than a wrong number

    def drop(self) -> None:
        """Forget all gradients, as zero_grad() does."""
        self.launch_queue.arrive_all()
        for slot in self.slots:
            slot.param.grad, slot.early, slot.used, slot.fired = None, None, False, 0
        self._late.clear()
        self._forget()

    def _forget(self) -> None:
        """Begin from nothing: what there was has been dropped."""
        self._local, self._reduced, self.weights.samples, self.broken = False, False, 0.0, None
        if self.finite_check is not None:
            self.finite_check.clear()
