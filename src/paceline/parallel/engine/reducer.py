"""The reducer: runs the rounds of synchronisation of every plan but full-shard.

A *round* is one synchronised backward. Every rank launches the same collectives in the same order and closes the round
with the round status, whatever happened on it in between, so ranks never drift apart.

    begin     attach gradients that were kept as views into the buckets
    (hooks)   copy new gradients into their buckets; launch full buckets, in bucket order
    finish    write the round status, launch the other buckets, read the status (on a GPU one step late), fix the
              weights; wait for all buckets, or if sharded for each bucket where it is used

[Note: the first round] Which gradient is ready when, and how often its hook fires, is learnt from the first backward.
Until then gradients stay where autograd puts them. At the end of that backward all ranks adopt rank 0's order, the
buckets are built, and the gradients move in.

[Note: late gradients] A launched bucket is being reduced, so nothing may write to it. Its parameters therefore lose
their views at launch (``param.grad = None``). If autograd still adds a gradient (a parameter shared by re-entrant
checkpoints that ran in a new order), it is put in other memory and reduced in a second pass, and the count of firings
that was too low is corrected on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from paceline._core.step_state import step_state, wait_counters
from paceline.errors import SyncError, UsageError
from paceline.parallel.buckets.bucket_builder import agree_order, return_freed_memory
from paceline.parallel.buckets.grad_slot import GradSlot, SlotBucket, storage_dtype
from paceline.parallel.buckets.sharded_gradient import ShardedGradient
from paceline.parallel.comm_hook import CommHook
from paceline.parallel.engine.grad_hooks import GradHooks, accumulates_nothing
from paceline.parallel.engine.gradient_consumers import GradientConsumers
from paceline.parallel.engine.loss_weights import Factor, LossWeights
from paceline.parallel.engine.parameter_gather import ParameterGather
from paceline.parallel.engine.round_closing import RoundClosing
from paceline.parallel.engine.round_status import RoundSummary, Status, missing_samples_error
from paceline.parallel.engine.sparse_gradients import SparseGradients
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync

__all__ = ["Reducer"]

_POLL_SECONDS = 1e-3
"""Between two polls for completed collectives in backward; each takes microseconds."""


class Reducer(RoundClosing):
    """Synchronises the gradients of a list of parameters.

    Args:
        named: the trainable parameters with their names, in registration order, each once.
        comm: the ranks.
        plan: any plan that does not shard parameters.
        reduce_dtype: dtype in which gradients of bf16 and fp16 parameters are accumulated and reduced; None: their own.
        frozen: parameters that required no gradient when the model was wrapped.
        module: the model; None: parameters that are added to it are not noticed.
        sparse: trainable parameters with sparse gradients; with them, every rank counts the same.

    Attributes:
        sync_enabled: whether a backward that begins now synchronises; `accumulate()` turns it off.
        follows_torch: whether what torch's DistributedDataParallel allows is a warning where it is an error otherwise.
        replicas_differ: whether parameters may differ between ranks, since an exception ended local training.
        virtual_ranks: over which gradients are summed in one order, whatever the number of ranks.
        block_order: of the norms of blocks with virtual ranks, see `grad_norm`; None: not used yet.
        hooks: of the parameters.
        consumers: the optimizers that update shards.
        parameter_gather: what they have updated and not yet received.
    """

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        comm: Comm,
        plan: Sync,
        reduce_dtype: torch.dtype | None = None,
        frozen: Sequence[tuple[str, torch.nn.Parameter]] = (),
        module: torch.nn.Module | None = None,
        sparse: Sequence[tuple[str, torch.nn.Parameter]] = (),
    ) -> None:
        super().__init__(named, comm, plan, reduce_dtype, frozen, module, sparse)
        self.sync_enabled = True
        self.follows_torch = False
        self.replicas_differ = False
        self.virtual_ranks: int | None = None
        self.block_order: torch.Tensor | None = None

        self._opening = threading.Lock()
        self._in_backward = False
        self._will_sync = False  # the present backward closes with a round
        self._firings: list[int] = []  # of the first backward
        self._buckets_new = False  # no forward has begun since they were built
        self._ids = {id(param) for _, param in [*named, *frozen, *sparse]}
        self.consumers = GradientConsumers(self.slots)
        note_waiting = weakref.WeakMethod(self.note_waiting)
        self.parameter_gather = ParameterGather(
            comm, module, lambda seconds: (note := note_waiting()) and note(seconds)
        )
        self.hooks = GradHooks(self, self.slots, Reducer.after_accumulate, Reducer.after_small)
        if sparse:
            self.sparse = SparseGradients(sparse, comm)
            self.sparse.watch(self.begin_in_backward)

    # ------------------------------------------------------------------ the model's parameters

    @property
    def unsynced(self) -> bool:
        """Whether there are gradients of this rank that no round has reduced."""
        return self._local or self._in_backward

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether `param` is one of the model's."""
        return id(param) in self._ids

    def refuse_replaced(self, params: Sequence[torch.Tensor]) -> None:
        """Do nothing: wrapping leaves parameters what they are."""

    def bucket_plan(self) -> list[tuple[int, list[str]]]:
        """Return (bytes, names of parameters) per collective, in launch order."""
        return [(bucket.flat.nbytes, [slot.name for slot in bucket.slots]) for bucket in self.buckets]

    def whole(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the parameters; every rank has them whole."""
        self.check_latest()
        return [param.detach().clone() for param in params]

    def trains(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the trainable parameters that the model has at present, with their names."""
        if self.module is None:
            return [(slot.name, slot.param) for slot in self.slots]
        return [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]

    def ignore(self, names: Collection[str]) -> None:
        """Leave parameters with these names alone, also when the program replaces them."""
        if self._watch is not None:
            self._watch.ignored = frozenset(names)

    def retire(self) -> None:
        """Leave the parameters to another engine."""
        self.remove_hooks()
        self.retired = True

    def abandon(self) -> None:
        """Leave the parameters, without gradients and in memory of their own; collectives may be broken."""
        self.retire()
        self.parameter_gather.abandon()
        for slot in self.slots:
            slot.param.grad = None
            if self.sharded and self.has_buckets:
                slot.param.data = slot.param.detach().clone()

    def remove_hooks(self) -> None:
        """Report no gradients any more."""
        self.hooks.remove()
        if self.sparse is not None:
            self.sparse.unwatch()

    def set_local_only(self, local: bool) -> None:
        """From now on, train each rank as in a world of one, or (False) synchronise again."""
        assert not self.splits_gradients, "each rank has whole gradients"
        self.drop()
        self.local_only = local
        self.weights = LossWeights(self.comm.rank, 1 if local else self.comm.size)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Reduce every bucket by ``hook(state, bucket)`` from now on; see `comm_hook`. All ranks call this.

        Raises:
            SyncError: there is one already, gradients wait for a round, or a sharded optimizer has the buckets.
            UsageError: `hook` can't be called, or the plan compresses, is tuned or reduces gradients itself.
        """
        if not callable(hook):
            raise UsageError(
                f"register_comm_hook({state!r}, {hook!r}): the hook can't be called",
                rank=self.comm.rank,
                remedy="pass a function of (state, bucket)",
            )
        if self.plan.compression is not None or self.plan.shard == "parameters" or self.tuner is not None:
            raise UsageError(
                f"register_comm_hook with {'sync=auto' if self.tuner is not None else self.plan}",
                rank=self.comm.rank,
                remedy='use a strategy that leaves the reduction to the engine, such as "bucketed"',
            )
        problem = ""
        if self.launch_queue.hook is not None:
            problem = "register_comm_hook or register_builtin_comm_hook can only be called once."
        elif self.unsynced:
            problem = "register_comm_hook while gradients of this rank wait to be synchronised"
        elif self.sharded and self.has_buckets:  # the optimizer updates parameters in these buckets
            problem = "register_comm_hook after the first backward with a sharded optimizer"
        if problem:
            raise SyncError(
                problem,
                rank=self.comm.rank,
                step=self.step,
                remedy="register the hook right after wrapping the model",
            )
        self.launch_queue.hook = CommHook(state, hook, self.comm.size)
        self.replica_check_every = 0  # a hook may let ranks differ
        if self.has_buckets:
            self.change_plan(self.plan)

    # ------------------------------------------------------------------ begin

    def before_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Prepare for a forward, which one rank may run alone; the result is passed to `backward_reached`."""
        if self._buckets_new:  # the first round has kept more at a time than those that follow
            self._buckets_new = False
            return_freed_memory(self.device)

    def apply_pending_plan(self, *, if_empty: bool = False) -> None:
        """Switch to the plan that the tuner has decided on; all ranks call this, in backward and after a step."""
        if self.tuner is not None and not self._local and not self.local_only:
            self.tuner.apply_pending_plan(if_empty=if_empty)

    def backward_reached(self, call: object) -> None:
        """Open the backward that has reached a forward's outputs; `call` is from `before_forward`."""
        if not self._in_backward and not self._only_computes():
            # Outputs on two devices are reached in two threads.
            with self._opening:
                self.begin_in_backward()

    def _only_computes(self) -> bool:
        """Return whether the running backward accumulates no gradient, as ``torch.autograd.grad``."""
        return accumulates_nothing(lambda: (slot.param for slot in self.slots))

    def contribute_nothing(self, loss: torch.Tensor | None) -> None:
        """Run no backward in this round: `finish` sends zeros."""

    def start_weights(self, samples: float) -> None:
        """Prepare the weight of a loss that is the mean over `samples`, more than 0."""
        self.weights.start(samples)

    def _agree_weights(self) -> None:
        """Give all ranks the same first reference; all take part. See [Note: the first reference] in `loss_weights`."""
        factor = self.weights.agree(self.comm.largest(self.weights.exponent, self.device))
        if factor != 1.0 and (results := self._results()):
            with torch.no_grad():
                torch._foreach_mul_(results, factor)

    def begin(self, status: Status, samples: Factor = 0.0) -> None:
        """Open a backward.

        Args:
            status: how this rank's gradient is weighted.
            samples: number of samples behind it, if they are counted.

        Raises:
            SyncError: two kinds of weights would be mixed in one gradient, or parameters differ between ranks.
            UsageError: a CUDA graph is being captured, and there are other ranks.
        """
        self.recover()
        if self._in_backward:
            return
        self.refuse_if_retired()
        self._refuse_capture()
        if self.replicas_differ and not self.local_only:
            raise SyncError(
                "parameters differ between ranks: an exception ended a block of local training",
                rank=self.comm.rank,
                step=self.step,
                remedy="load a checkpoint before training goes on",
            )
        if not self.local_only:
            self.refuse_after_failure()
        step_state.begin_phase(self.step, "backward")
        self.comm.note_step(self.step)
        self.parameter_gather.wait_all()
        self.launch_queue.wait_all()  # the result of the last round, if it was not used
        self.apply_pending_plan()
        kept = self._kept_slots()
        if not kept and not self._kept_elsewhere():
            self._forget()
        elif (self._local or self._reduced) and status is not self.weights.status:
            raise SyncError(
                "backward with samples=, backward without, and plain loss.backward() were mixed in one gradient",
                rank=self.comm.rank,
                step=self.step,
                remedy="call zero_grad() between them, or use the same call for every backward",
            )
        self._refuse_partly_dropped(kept, status)
        self._in_backward, self._will_sync, self.weights.status = True, self.sync_enabled, status
        if self.has_buckets:
            self._attach(kept)
        else:
            self._firings.clear()
            self.hooks.move_last()
            for slot in self.slots:
                self._attach_unbucketed(slot)
        if self._reduced:
            self._carry()
        self.weights.samples += samples
        self.launch_queue.begin_round(self.step)
        if self.has_buckets and not kept and step_state.recorder is None and self.ready_times is None:
            self.hooks.watching.clear()

    def _refuse_partly_dropped(self, kept: set[int], status: Status) -> None:
        """Raise if some gradients of a round were dropped and others kept, which would be means over other samples."""
        if not (kept and self._reduced and status is Status.SAMPLES and self.summary is not None):
            return
        dropped = [
            slot.name
            for slot, used in zip(self.slots, self.summary.used, strict=False)
            if used and slot.index not in kept
        ]
        if dropped:
            raise SyncError(
                f"backward(samples=) after some gradients were dropped ({dropped[0]!r}, …) and others kept "
                f"({self.slots[min(kept)].name!r}, …), so one number of samples does not fit both",
                rank=self.comm.rank,
                step=self.step,
                remedy="step and zero all optimizers of a model together, or use backward(loss) without samples",
            )

    def consume(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients that `optimizer` has used; all of them, unless another one has still to use some."""
        for slot in self.consumers.slots_of(optimizer):
            slot.param.grad, slot.unbucketed, slot.used, slot.fired = None, None, False, 0
        if not self.consumers.others_wait(optimizer):
            self.drop()

    def _build_buckets(self) -> None:
        super()._build_buckets()
        self._buckets_new, self.block_order = True, None
        self.hooks.skip_small(self.slots)

    def _is_alone(self) -> bool:
        """Return whether this rank's gradient is the result."""
        return self.comm.size == 1 or self.local_only

    def run_joined_round(self) -> None:
        """Take part in a round without a batch. See `Status.JOINED`.

        The result is exposed, since this rank may have to take the step: a sharded optimizer's, on its shard.
        """
        self.drop()
        self.sync_enabled = True
        self.begin(Status.JOINED)
        self.finish()

    # ------------------------------------------------------------------ hooks

    def after_accumulate(self, index: int) -> None:
        """Take over a gradient that autograd has added to slot `index`, and launch full buckets."""
        slot = self.slots[index]
        if not self._in_backward:
            self._begin_late(slot)
        grad = slot.param.grad
        if grad is None:  # a hook of the program has dropped it
            return
        slot.fired += 1
        if step_state.recorder is not None:
            self.launch_queue.poll(_POLL_SECONDS)
        if not self.launch_queue.buckets:
            self._refuse_sparse(slot)
            self._firings.append(index)
            if self.reduce_dtype is not None:
                slot.keep_unbucketed(storage_dtype(slot.param, self.reduce_dtype))
            return
        bucket = slot.bucket
        if bucket.launched:
            self._late.keep(slot)
            return
        if bucket.released:
            bucket.hold()
        if grad is not slot.view:
            self._move_in(slot)
        if bucket.writers is not None:
            bucket.note_writer()
        if slot.fired == slot.expected:
            bucket.pending -= 1
            self._slot_ready(slot)

    def after_small(self, index: int) -> None:
        """Count a gradient that autograd has left outside of the bucket of slot `index`; see `GradHooks`."""
        slot = self.slots[index]
        if not self._in_backward:
            self._begin_late(slot)
        bucket = slot.bucket
        if slot.param.grad is None:
            return
        slot.fired += 1
        if bucket.launched:
            self._late.keep(slot)
            return
        if step_state.recorder is not None:
            self.launch_queue.poll(_POLL_SECONDS)
        if bucket.writers is not None:
            bucket.note_writer()
        if slot is bucket.last_small:
            bucket.pending -= 1
        self._slot_ready(slot)

    def _slot_ready(self, slot: GradSlot) -> None:
        if self.ready_times is not None:
            self.ready_times[slot.index] = time.perf_counter()
        if slot.bucket.pending < 1:
            self._bucket_full(slot.bucket)

    def _bucket_full(self, bucket: SlotBucket) -> None:
        if (recorder := step_state.recorder_of(self.comm)) is not None:
            bucket.ready = time.perf_counter()
            if recorder.quiet:
                return
        if not (self._will_sync and self.plan.overlap and self.weights.agreed):
            return
        if not (self.local_only or self.inside_ddp):
            self.launch_queue.launch_full(self.weights.averaged, self.finite_check)

    def begin_in_backward(self) -> None:
        """Open the backward that is running, if it is not open, and close it at its end."""
        if not self._in_backward:
            self.begin(Status.EQUAL)
            if wait_counters.samples == 0:
                error = missing_samples_error(self.comm.rank, self.step)
                with contextlib.suppress(SyncError):
                    self.finish(failed=True)
                raise error
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _begin_late(self, slot: GradSlot) -> None:
        """Open a backward that bypassed the wrapped forward; `slot` has a gradient already."""
        fresh = slot.param.grad
        if isinstance(fresh, ShardedGradient):
            fresh, slot.added = slot.added, None
        moved = not (self.has_buckets and fresh is slot.view)
        if moved:  # or `begin` would take it for a kept one
            slot.param.grad = None
        self.begin_in_backward()
        if not moved or fresh is None:
            return
        if self.has_buckets and slot.param.grad is slot.view:
            slot.view.add_(fresh.detach())
        else:
            slot.param.grad = fresh

    def recover(self) -> bool:
        """Complete a backward that an exception interrupted, without a result; return whether there was one."""
        interrupted = self._in_backward and torch._C._current_graph_task_id() == -1
        if interrupted:
            self.finish(failed=True)
        return interrupted

    # ------------------------------------------------------------------ finish

    def finish(self, failed: bool = False) -> None:
        """Close the backward: with a round if it synchronises.

        Args:
            failed: this rank raised in backward; it completes the round without a result.

        Raises:
            BackwardFailed: another rank raised; gradients are dropped on all ranks.
            SyncError: ranks made different calls, or another rank is gone.
        """
        if not self._in_backward:
            return
        self._in_backward = False
        self._local = True
        self.hooks.watching[:] = [True]  # so that a gradient outside of a backward is reported
        if self._will_sync:
            self.synchronise(failed)
        elif failed:
            self.drop()
        else:
            step_state.enter_phase("outside")
            self._collect()
            for slot in self.slots:
                slot.used = slot.used or slot.fired > 0
                slot.expose(slot.used and not (self._converted and slot in self._converted))

    def synchronise(self, failed: bool = False) -> None:
        """Run a round over the gradients there are; all ranks take part.

        Raises: as `finish`.
        """
        self._in_backward = False
        step_state.begin_phase(self.step, "exchange")
        if self.weights.counted and (recorder := step_state.recorder_of(self.comm)) is not None:
            recorder.samples = float(self.weights.samples)
        started = time.perf_counter()
        status = Status.FAILED if failed else self.weights.status
        summary: RoundSummary | None
        if self.local_only or not self.weights.agreed:
            self._collect()
        if self._is_alone():
            used = tuple(slot.used or slot.fired > 0 for slot in self.slots)
            summary = RoundSummary((float(self.weights.samples),), (status,), used)
        else:
            if not self.weights.agreed:
                self._agree_weights()
            if not self.has_buckets:  # see [Note: the first round]
                self.order = agree_order(self.comm, self.slots, self._firings)
                self._build_buckets()
            summary = self._exchange(status)
        moments = self.launch_queue.moments
        moments.computed, moments.reduced = started, time.perf_counter()
        self.timings.exposed_seconds = 0.0
        self.note_waiting(moments.reduced - started)
        step_state.end_round(sees_waiting=self.sees_waiting)
        step_state.enter_phase("outside")
        self._local = False
        self.step += 1
        if summary is None:
            self._conclude_on_device(failed)
        else:
            self._conclude(summary, failed)
        # Not where a round failed: the other ranks have just raised, and the callback may run collectives.
        if self.on_round_end is not None and not (failed or self.local_only):
            self.on_round_end(self.step)
