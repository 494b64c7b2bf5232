"""Where a rank's gradients are between and during rounds: held by autograd, in buckets, exposed or dropped.

[Note: carried gradients] A gradient that was reduced and not dropped by zero_grad() must count once in the next round,
not once per rank. So one rank carries it into that round and the others start from zero; when sharded, each rank
carries its shard, and of several replicas of a shard the first one does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_not

import torch

from paceline._core.step_state import wait_counters
from paceline.errors import SyncError, UsageError
from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.buckets.bucket_builder import DEFAULT_LAYOUT, build_buckets
from paceline.parallel.buckets.grad_slot import GradSlot, ShardPiece, storage_numel
from paceline.parallel.buckets.neighbour_exchange import NeighbourExchange
from paceline.parallel.buckets.sharded_gradient import GradientShards, ShardedGradient
from paceline.parallel.compression.compressed_bucket import ResidualState
from paceline.parallel.engine.engine_protocols import PlanController
from paceline.parallel.engine.grad_hooks import LateGradients
from paceline.parallel.engine.gradient_finite_check import FiniteCheck, NonFiniteReport
from paceline.parallel.engine.launch_queue import LaunchQueue, SyncTimings
from paceline.parallel.engine.loss_weights import Factor, LossWeights, multiply_by
from paceline.parallel.engine.round_status import KEPT, RoundSummary, vector_length
from paceline.parallel.engine.sparse_gradients import SparseGradients
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync
from paceline.world.accelerator import has_streams, is_capturing

__all__ = ["GradientState", "describe"]


_get_grad, _get_fired = attrgetter("grad"), attrgetter("fired")


def describe(tensor: torch.Tensor) -> str:
    """Return dtype, shape and device for a message."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} on {tensor.device}"


def _pieces_of(state: weakref.ref[GradientState]) -> Callable[[], list[ShardPiece]]:
    """Return a function that waits for a round's result and returns this rank's pieces; it holds no engine."""

    def pieces() -> list[ShardPiece]:
        alive = state()
        if alive is None:
            return []
        alive.note_waiting(alive.launch_queue.wait_all())
        return alive.pieces()

    return pieces


def _copied_pieces_of(state: weakref.ref[GradientState]) -> Callable[[], list[ShardPiece]]:
    """Return a function that returns the pieces of which this rank keeps a copy; it holds no engine."""
    return lambda: [] if (alive := state()) is None else alive.copied_pieces()


class GradientState:
    """The gradients of a list of parameters on one rank.

    Args:
        named: the trainable parameters with their names, in registration order, each once.
        comm: the ranks.
        plan: how gradients are synchronised.
        reduce_dtype: dtype in which gradients of bf16 and fp16 parameters are accumulated and reduced; None: their own.

    Attributes:
        order: the order in which gradients become ready, the same on all ranks; empty before there are buckets.
        tuner: changes the plan between steps.
        ready_times: when each slot's gradient was complete in the latest backward (`time.perf_counter`); None: not
            recorded.
        on_round_end: called on all ranks after every round in which no rank failed, with the number of rounds so far.
        step: rounds so far, which are optimizer steps if each step has one.
        finite_check: measures this rank's gradients before they are reduced.
        non_finite: the report on the latest result if it is known to be not finite.
        sparse: parameters with sparse gradients, which are in no bucket.
        summary: of the latest round.
        inside_ddp: whether torch's DDP wraps the wrapped model too. Its hooks read and write gradients, so no bucket is
            launched before the end of backward, and shards are not exposed.
        retired: the model was wrapped again, so another engine synchronises its gradients.
        layout: of the buckets.
        keeps_copies: whether ranks keep copies of their neighbours' shards, where they hold shards.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        comm: Comm,
        plan: Sync,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.comm, self.plan, self.reduce_dtype = comm, plan, reduce_dtype
        self.sharded = plan.shards_buckets and comm.size > 1
        self._converted: list[GradSlot] = []
        self.slots = [
            GradSlot(index, name, param, converted=self._converted)
            for index, (name, param) in enumerate(named)
        ]
        self._params = [slot.param for slot in self.slots]
        self.launch_queue = LaunchQueue(comm, sharded=self.sharded, overlap=plan.overlap)
        self.residuals = ResidualState(self.launch_queue)
        self.order: list[int] = []
        self.weights = LossWeights(comm.rank, comm.size)
        self.tuner: PlanController | None = None
        self.ready_times: dict[int, float] | None = None
        self.on_round_end: Callable[[int], None] | None = None
        self.step = 0
        self.finite_check: FiniteCheck | None = None
        self.non_finite: NonFiniteReport | None = None
        self.sparse: SparseGradients | None = None
        self.summary: RoundSummary | None = None
        self.inside_ddp = False
        self.retired = False
        self.layout = DEFAULT_LAYOUT
        self.keeps_copies = False

        self._local = False  # there are gradients of this rank that no round has seen
        self._reduced = False  # there is the result of a round
        self._late = LateGradients()
        me: weakref.ref[GradientState] = weakref.ref(self)
        self._shards = GradientShards(comm, len(self.slots), _pieces_of(me), _copied_pieces_of(me))

    # ------------------------------------------------------------------ properties

    @property
    def has_buckets(self) -> bool:
        """Whether the buckets are built (see [Note: the first round])."""
        return bool(self.buckets)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in launch order; none before the first round."""
        return self.launch_queue.buckets

    @property
    def timings(self) -> SyncTimings:
        """The cost of the latest round on this rank."""
        return self.launch_queue.timings

    @property
    def device(self) -> torch.device:
        """The device of the (first) gradient."""
        return self.slots[0].param.device if self.slots else torch.device("cpu")

    @property
    def sees_waiting(self) -> bool:
        """Whether the host's clock can separate computing from waiting; not on a GPU, which runs asynchronously."""
        return self.device.type == "cpu"

    @property
    def empty(self) -> bool:
        """Whether there are no gradients, local or reduced."""
        return not self._kept_slots()

    def note_waiting(self, seconds: float) -> None:
        """Count `seconds` in which this rank only waited for collectives or completed them."""
        self.timings.exposed_seconds += seconds
        if self.sees_waiting:
            wait_counters.add(seconds)

    # ------------------------------------------------------------------ this rank's part of the result

    def pieces(self) -> list[ShardPiece]:
        """Return this rank's parts of the parameters, in bucket order; sharded plans, after the first round."""
        return [
            piece
            for bucket in self.buckets
            if bucket.slots
            for piece in bucket.pieces(self.comm.shard, self.comm.shards)
        ]

    @property
    def has_result(self) -> bool:
        """Whether there is the result of a round, and no newer gradient of this rank."""
        return self._reduced and not self._local

    @property
    def neighbours(self) -> NeighbourExchange | None:
        """The exchanges of ranks that keep copies of their neighbours' shards."""
        return self.launch_queue.neighbours

    def keep_copies(self) -> None:
        """From the next round on, hold the gradients of the right neighbour's shard too, if there are shards.

        All ranks call this, without gradients of a round.
        """
        self.keeps_copies = True
        if self.sharded and self.neighbours is None:
            self.launch_queue.neighbours = NeighbourExchange(self.comm)

    def copied_pieces(self) -> list[ShardPiece]:
        """Return the right neighbour's parts of the parameters, if this rank keeps a copy of them; as `pieces`."""
        if self.neighbours is None:
            return []
        right = self.neighbours.right
        return [p for bucket in self.buckets if bucket.slots for p in bucket.pieces(right, self.comm.shards)]

    def copied_grads(self) -> list[torch.Tensor]:
        """Return the gradients of the right neighbour's shard, which are scaled like those of this rank's."""
        return [piece.grad for piece in self.copied_pieces() if piece.slot.used] if self._reduced else []

    def local_grads(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients of which this rank holds a shard, and those that every rank holds whole."""
        if self.sharded:
            self.note_waiting(self.launch_queue.wait_all())
            self._shards.clear()
            return [piece.grad for piece in self.pieces() if piece.slot.used] if self._reduced else [], []
        return [], [slot.param.grad for slot in self.slots if slot.param.grad is not None]

    def local_grads_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients of `params`, some of the model's, and those of its copy."""
        if not self.sharded:
            return [param.grad for param in params if param.grad is not None]
        self.note_waiting(self.launch_queue.wait_all())
        self._shards.clear()
        held = {id(param) for param in params}
        pieces = [*self.pieces(), *self.copied_pieces()] if self._reduced else []
        return [piece.grad for piece in pieces if piece.slot.used and id(piece.slot.param) in held]

    def parts_by_name(self) -> dict[str, list[torch.Tensor]]:
        """Return this rank's part of the result, by parameter."""
        parts: dict[str, list[torch.Tensor]] = {slot.name: [] for slot in self.slots}
        if self.sharded:
            self.launch_queue.wait_all()
            for piece in self.pieces():
                parts[piece.slot.name] += [piece.grad] if piece.slot.used else []
            return parts
        for slot in self.slots:
            parts[slot.name] += [slot.param.grad] if slot.param.grad is not None else []
        return parts

    def _results(self) -> list[torch.Tensor]:
        """Return the memory of this rank's part of the result."""
        if self.has_buckets:
            return [bucket.result(low, high) for bucket, low, high in self.launch_queue.owned_ranges()]
        held = (slot.param.grad if slot.unbucketed is None else slot.unbucketed for slot in self.slots)
        return [grad for grad in held if grad is not None]

    # ------------------------------------------------------------------ layout

    def _build_buckets(self) -> None:
        self.launch_queue.buckets = build_buckets(
            self.slots,
            self.order,
            self.plan,
            self.comm,
            status_length=vector_length(self.comm.size, len(self._used_flags())),
            status_device=self.device if self.comm.stream_ordered else torch.device("cpu"),
            sharded=self.sharded,
            reduce_dtype=self.reduce_dtype,
            hooked=self.launch_queue.hook is not None,
            layout=self.layout,
        )
        self.residuals.resume()

    def change_plan(self, plan: Sync) -> None:
        """Rebuild the buckets between two steps; kept gradients move along. All ranks call this.

        Changing from or to a plan that shards requires that no gradients are kept, so no result is in flight. Plans
        that compress can't change, since their buckets hold residuals.
        """
        assert self.has_buckets, "there are buckets"
        assert not self._local, "no gradient waits for a round"
        kept = [slot.param.grad is not None for slot in self.slots]
        for slot, has in zip(self.slots, kept, strict=True):
            slot.unbucketed = slot.view if has and slot.upcast else None
        self.plan, self.launch_queue.buckets = plan, []
        before, self.sharded = self.sharded, plan.shards_buckets and self.comm.size > 1
        self.launch_queue.sharded = self.sharded
        if before and not self.sharded:
            # out of the buffers, whose memory may be shared, and slower to compute with
            for slot in self.slots:
                slot.param.data = slot.param.detach().clone()
        self.launch_queue.overlap = plan.overlap
        self._build_buckets()
        for slot, has in zip(self.slots, kept, strict=True):
            slot.expose(has)

    def readopt_parameters(self) -> bool:
        """Move parameters that the program has moved elsewhere (``param.data = ...``) into buffers again; if sharded.

        Buckets get new buffers, since the program may hold the old memory, such as after an exchange with an average.

        Returns:
            Whether there were such parameters.

        Raises:
            UsageError: a parameter now has another dtype, device or shape, or the model was wrapped again.
        """
        self.refuse_if_retired()
        moved = [slot for bucket in self.buckets if bucket.slots for slot in bucket.moved]
        for slot in moved:
            params, param = slot.bucket.params, slot.param
            assert params is not None, "sharded buckets hold parameters"
            real = param.dtype.to_real() if param.is_complex() else param.dtype
            if (real, param.device, storage_numel(param)) != (params.dtype, params.device, slot.numel):
                raise UsageError(
                    f"parameter {slot.name!r} is {describe(param)} since its memory was replaced",
                    rank=self.comm.rank,
                    step=self.step,
                    remedy="convert a model before wrapping it, or wrap it again",
                )
        for bucket in {slot.bucket: None for slot in moved}:
            bucket.adopt_parameters()
        return bool(moved)

    # ------------------------------------------------------------------ before backward

    def _kept_slots(self) -> set[int]:
        """Return the slots whose gradients were not dropped by zero_grad()."""
        if self.sharded and self._reduced:  # a sharded result is not in param.grad
            return {slot.index for slot in self.slots if slot.used}
        kept = map(is_not, map(_get_grad, self._params), repeat(None))
        return {index for index, has in enumerate(kept) if has}

    def _kept_elsewhere(self) -> bool:
        """Return whether gradients outside the slots were kept."""
        return False

    def _attach(self, kept: set[int]) -> None:
        """Make every kept gradient a view into its bucket; the others are computed anew, outside."""
        self._converted.clear()
        for bucket in self.buckets:
            bucket.begin_backward(kept)
            self._converted += bucket.converted
        for slot in map(self.slots.__getitem__, kept):
            slot.used, slot.needs_zero = True, False
            self._restore(slot)
            if slot not in self._converted:
                slot.param.grad = None if slot.upcast else slot.view

    def _collect(self) -> None:
        """Move all gradients into the buckets, if there are any."""
        for bucket in self.buckets:
            bucket.collect()

    @staticmethod
    def _restore(slot: GradSlot) -> None:
        """Copy a kept gradient into its view if the program has replaced or moved ``param.grad``."""
        slot.return_to_bucket()
        grad = slot.param.grad
        if grad is not None and grad is not slot.view and grad is not slot.stand_in and not slot.upcast:
            slot.view.copy_(grad.detach())

    @staticmethod
    def _attach_unbucketed(slot: GradSlot) -> None:
        """Before there are buckets, keep a gradient that was not dropped, in the reduction's dtype."""
        slot.fired, slot.used = 0, slot.param.grad is not None
        if not slot.used:
            slot.unbucketed = None
        elif slot.unbucketed is not None:
            slot.param.grad = None

    def _carry(self) -> None:
        """Carry reduced gradients into this round; see [Note: carried gradients]."""
        self._reduced = False
        self._carry_results(self.weights.carry())

    def _carry_results(self, factor: Factor) -> None:
        if self.sharded:
            for bucket, low, high in self.launch_queue.owned_ranges():
                bucket.flat[:low].zero_()
                bucket.flat[high:].zero_()
                if self.comm.replica == 0:
                    multiply_by([bucket.flat[low:high]], factor)
                else:
                    bucket.flat[low:high].zero_()
        elif not self.weights.averaged and self._results():  # an average of the result is the result
            multiply_by(self._results(), factor if self.weights.carries_result else 0.0)

    def refuse_if_retired(self) -> None:
        """Raise if the model was wrapped again."""
        if self.retired:
            raise UsageError(
                "the model was wrapped again since, and another DataParallel synchronises its gradients",
                rank=self.comm.rank,
                step=self.step,
                remedy="use the new wrapper, and build the optimizer from it",
            )

    def _refuse_capture(self) -> None:
        """Raise if this backward is captured into a CUDA graph: a graph can't read the round status."""
        if self.comm.size > 1 and has_streams(self.device) and is_capturing(self.device):
            raise UsageError(
                f"backward is captured into a CUDA graph in a world of {self.comm.size} ranks",
                rank=self.comm.rank,
                step=self.step,
                remedy="capture the module alone, with torch.cuda.make_graphed_callables, and wrap that",
            )

    # ------------------------------------------------------------------ in backward

    def _move_in(self, slot: GradSlot) -> None:
        """Move a gradient that is outside its view into it."""
        grad = slot.param.grad
        assert grad is not None, "the hook runs after accumulation"
        if slot.upcast:
            slot.take(grad)
            slot.param.grad = None
        elif not (self._converted and slot in self._converted):
            slot.replace_by(grad)

    def _refuse_sparse(self, slot: GradSlot) -> None:
        if slot.param.grad is not None and slot.param.grad.is_sparse:
            slot.param.grad = None
            raise SyncError(
                f"parameter {slot.name!r} has a sparse gradient",
                rank=self.comm.rank,
                step=self.step,
                remedy="build the embedding with sparse=False",
            )

    # ------------------------------------------------------------------ after backward

    def _used_flags(self) -> list[float]:
        """Return, per parameter, whether this rank has a gradient; see `round_status`."""
        if 0 not in map(_get_fired, self.slots):  # as a rule
            return [1.0] * len(self.slots)
        return [1.0 if slot.fired else KEPT if slot.used else 0.0 for slot in self.slots]

    def _scale(self, factor: Factor) -> None:
        """Multiply the result."""
        if self.has_buckets:
            self.launch_queue.scale(factor)
        else:
            multiply_by(self._results(), factor)

    def _attach_result(self, summary: RoundSummary) -> None:
        """Expose the result as ``param.grad`` where any rank has a gradient; where sharded, a `ShardedGradient`."""
        if self.sharded:
            self._shards.clear()
        whole, in_shards = not self.sharded, self.sharded and not self.inside_ddp
        if whole and self.has_buckets and all(summary.used) and all(each.attached for each in self.buckets):
            for slot in self.slots:
                slot.used = True
            return
        for slot, used in zip(self.slots, summary.used, strict=False):
            slot.used = used
            if used and in_shards:
                if slot.stand_in is None:
                    slot.stand_in = ShardedGradient(slot, self._shards)
                slot.param.grad = slot.stand_in
            else:
                slot.expose(used and whole)

    def drop(self) -> None:
        """Discard all gradients, as zero_grad() does."""
        self.launch_queue.wait_all()
        for slot in self.slots:
            slot.param.grad, slot.unbucketed, slot.used, slot.fired = None, None, False, 0
        if self.sparse is not None:
            self.sparse.drop()
        self._late.clear()
        self._forget()

    def _forget(self) -> None:
        """Reset the bookkeeping of dropped gradients."""
        self._local, self._reduced, self.weights.samples, self.non_finite = False, False, 0.0, None
        if self.finite_check is not None:
            self.finite_check.clear()
