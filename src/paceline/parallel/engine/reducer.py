"""The reducer: runs the rounds of synchronisation of every plan but full-shard.

A *round* is one synchronised backward. Every rank launches the same collectives in the same order and closes the round
with the round status, whatever happened on it in between, so ranks never drift apart.

    begin     attach the gradients as views into the buckets
    (hooks)   before autograd adds to a gradient: zero its view if zero_grad() dropped it
              after a parameter's gradient is complete: count it; launch full buckets, in bucket order
    finish    write the round status, launch the other buckets, read the status, fix the weights; wait for all buckets,
              or if sharded for each bucket where it is used

[Note: the first round] Which gradient is ready when, and how often its hook fires, is learnt from the first backward.
Until then gradients stay where autograd puts them. At the end of that backward all ranks adopt rank 0's order, the
buckets are built, and the gradients move in. They do not move in later steps.

[Note: late gradients] A launched bucket is being reduced, so nothing may write to it. Its parameters therefore lose
their views at launch (``param.grad = None``). If autograd still adds a gradient (a parameter shared by re-entrant
checkpoints that ran in a new order), it is put in other memory and reduced in a second pass, and the count of firings
that was too low is corrected on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline._core.step_state import step_state, wait_counters
from paceline.errors import MismatchError, ReplicasDiverged, SyncError, UsageError
from paceline.parallel.buckets.bucket_builder import agree_order
from paceline.parallel.buckets.grad_slot import GradSlot, SlotBucket, storage_dtype
from paceline.parallel.buckets.sharded_gradient import ShardedGradient
from paceline.parallel.comm_hook import CommHook
from paceline.parallel.engine import round_status
from paceline.parallel.engine.grad_hooks import GradHooks, accumulates_nothing
from paceline.parallel.engine.gradient_finite_check import find_non_finite, non_finite_ranks, surely_finite
from paceline.parallel.engine.gradient_state import GradientState, describe
from paceline.parallel.engine.loss_weights import LossWeights
from paceline.parallel.engine.model_changes import HARMLESS, ModelWatch, digest_of, raise_for_changes
from paceline.parallel.engine.round_status import RoundSummary, Status, missing_samples_error
from paceline.parallel.engine.sparse_gradients import SparseGradients
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.replica_digests import (
    check_interval,
    digest_of_all,
    find_divergence,
    is_check_round,
    tensor_digest,
)
from paceline.parallel.strategy import Sync
from paceline.world.control_collectives import gather_rows

__all__ = ["Reducer"]

_POLL_SECONDS = 1e-3
"""Between two polls for completed collectives in backward; each takes microseconds."""


class Reducer(GradientState):
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
        local_only: whether this rank trains as in a world of one; see `set_local_only`.
        follows_torch: whether what torch's DistributedDataParallel allows is a warning where it is an error otherwise.
        replica_check_every: rounds between two comparisons of the parameters of all ranks; 0: none.
        replicas_differ: whether parameters may differ between ranks, since an exception ended local training.
        hooks: of the parameters.
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
        super().__init__(named, comm, plan, reduce_dtype)
        self.frozen = list(frozen)
        self._sparse = list(sparse)
        self.module = module
        self._watch = ModelWatch(module) if module is not None and comm.size > 1 else None
        self.replica_check_every = check_interval(os.environ)
        self._changes: dict[str, str] = {}  # of the model on this rank, in the present round
        self.sync_enabled = True
        self.local_only = False
        self.follows_torch = False
        self.replicas_differ = False

        self._opening = threading.Lock()
        self._in_backward = False
        self._will_sync = False  # the present backward closes with a round
        self._firings: list[int] = []  # of the first backward
        self._ids = {id(param) for _, param in [*named, *frozen, *sparse]}
        self.hooks = GradHooks(self, self.slots, Reducer.after_accumulate, Reducer.after_small)
        if sparse:
            self.sparse = SparseGradients(sparse, comm)
            self.sparse.watch(self.begin_in_backward)

    # ------------------------------------------------------------------ the model's parameters

    @property
    def splits_gradients(self) -> bool:
        """Whether ranks hold different parts of the synchronised gradient."""
        return self.sharded

    @property
    def unsynced(self) -> bool:
        """Whether there are gradients of this rank that no round has reduced."""
        return self._local or self._in_backward

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return all parameters of the model with their names, as optimizers hold them."""
        return [*((slot.name, slot.param) for slot in self.slots), *self.frozen, *self._sparse]

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
            SyncError: there is one already, or gradients wait for a round.
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
        if self.launch_queue.hook is not None or self.unsynced:
            raise SyncError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
                if self.launch_queue.hook is not None
                else "register_comm_hook while gradients of this rank wait to be synchronised",
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

    def begin(self, status: Status, samples: float = 0.0) -> None:
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
        step_state.begin_phase(self.step, "backward")
        self.comm.note_step(self.step)
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

    def _build_buckets(self) -> None:
        super()._build_buckets()
        self.hooks.skip_small(self.slots)

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
            recorder.samples = self.weights.samples
        started = time.perf_counter()
        status = Status.FAILED if failed else self.weights.status
        if self.local_only or not self.weights.agreed:
            self._collect()
        if self.comm.size == 1 or self.local_only:
            used = tuple(slot.used or slot.fired > 0 for slot in self.slots)
            summary = RoundSummary((self.weights.samples,), (status,), used)
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
        self._conclude(summary, failed)
        # Not where a round failed: the other ranks have just raised, and the callback may run collectives.
        if self.on_round_end is not None and not (failed or self.local_only):
            self.on_round_end(self.step)

    def _exchange(self, status: Status) -> RoundSummary:
        """Launch the remaining buckets with the round status, wait for them, return the summary."""
        weights, last, rank, size = self.weights, self.buckets[-1], self.comm.rank, self.comm.size
        self._keep_late()
        self.launch_queue.complete_rest(self.finite_check)
        flags = self._used_flags()
        self._changes = self._find_changes(flags)
        digest = digest_of(self._changes)
        if is_check_round(self.step, self.replica_check_every):
            digest ^= digest_of_all(param for _, param in self._replicated()) & 0xFFFF
        mine = round_status.encode(rank, size, weights.samples, status, flags, len(self._late), digest)
        self.comm.write_status(mine, last.status)
        if self.finite_check is not None:
            self.finite_check.write_peak(last.status[round_status.peak_index(rank, size)])
        self.launch_queue.launch_rest(weights.averaged)
        summary = round_status.decode(self.launch_queue.read_status(weights.averaged), size)
        if summary.late or not self.sharded:  # a sharded result is waited for where it is used
            self.launch_queue.wait_all()
        if summary.late:
            self._late.reduce(self.slots, self.comm, self.device, mean=weights.averaged)
            for bucket in self.buckets:
                bucket.classify()
            self.hooks.skip_small(self.slots)
        return summary

    def _keep_late(self) -> None:
        """Take the small gradients that have come, unreported, after their bucket was launched."""
        for bucket in self.buckets:
            if bucket.launched and any([param.grad is not None for param in bucket.members]):
                for slot in bucket.small:
                    if slot.param.grad is not None:
                        slot.fired += 1
                        self._late.keep(slot)

    def _reported(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters on which the round status reports, with their names."""
        return [(slot.name, slot.param) for slot in self.slots]

    def _passing_ids(self) -> frozenset[int]:
        """Return ids of parameters that stand in the module for others for a while."""
        return frozenset()

    def _find_changes(self, flags: Sequence[float]) -> dict[str, str]:
        """Return what happened to parameters since the model was wrapped; `flags`: which ones have a gradient."""
        idle = []
        if not all(flags):
            idle = [named for named, used in zip(self._reported(), flags, strict=True) if not used]
        changes = {name: HARMLESS for name, param in idle if not param.requires_grad}
        changes |= {name: "thawed" for name, param in self.frozen if param.grad is not None}
        if self._converted:
            changes |= {slot.name: f"converted to {describe(slot.param)}" for slot in self._converted}
        if self._watch is not None:
            self._watch.find((param for _, param in idle), self._passing_ids)
            self.frozen += self._watch.added_frozen
            self._watch.added_frozen.clear()
            changes |= self._watch.added
        return changes

    # ------------------------------------------------------------------ conclude

    def _conclude(self, summary: RoundSummary, failed: bool) -> None:
        """Turn the sums into means and attach them, or drop them all and raise."""
        try:
            summary.raise_for_status(self.comm.rank, self.step - 1)
            # Parameters that all ranks froze need no further message. Ranks that have joined update theirs no more.
            differ = len(set(summary.digests)) > 1 or set(self._changes.values()) - {HARMLESS}
            if differ and Status.JOINED not in summary.status:
                names = [name for name, _ in self.named_parameters()]
                raise_for_changes(self._changes, names, self.comm, self.step - 1)
                if Status.JOINED not in summary.status:  # a rank without batches takes no steps
                    self._compare_replicas()
        except (SyncError, MismatchError):
            self.drop()
            if failed:  # this rank's own exception is being raised
                return
            raise
        if self.weights.counted and summary.total == 0:
            self.weights.total = 0.0
            self.drop()
            return
        factor = self.weights.end_round(summary)
        self._scale(factor)
        self._attach_result(summary)
        if self.sparse is not None and self.comm.size > 1:
            self.sparse.reduce(self.launch_queue.hook, len(self.buckets), factor)
        self._reduced, self.summary = True, summary
        if self.finite_check is not None:
            self.finite_check.norm = None
            if self.finite_check.measures and self.non_finite is None:
                self._check_finite(summary, factor)
        if self.tuner is not None and not self.local_only:
            self.tuner.round_ended()

    def _replicated(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that must be equal on all ranks, with their names."""
        return [(name, param) for name, param in self.named_parameters() if not isinstance(param, DTensor)]

    def _compare_replicas(self) -> None:
        """Raise if parameters differ between ranks; all ranks call this."""
        named = self._replicated()
        digests = torch.stack([tensor_digest(param).to(self.device) for _, param in named])
        rows = [row.tolist() for row in gather_rows(digests, self.comm.group)]
        divergence = find_divergence([f"parameter {name!r}" for name, _ in named], rows)
        if divergence is not None:
            raise ReplicasDiverged(
                str(divergence),
                rank=divergence.ranks[0],
                step=self.step - 1,
                remedy="resume from the last checkpoint, and look for code that changes parameters or gradients on one "
                "rank only (clipping, a skipped step, loading); if there is none, suspect that rank's memory. "
                "PACELINE_REPLICA_CHECK=0 turns this comparison off",
            )

    def _check_finite(self, summary: RoundSummary, factor: float) -> None:
        """Inspect the result unless the peaks show that it is finite; see [Note: peaks] in `finite_check`."""
        assert self.finite_check is not None, "a finite check is installed"
        if summary.late or not surely_finite(summary.peaks, factor, self.finite_check.largest):
            self.inspect_result(non_finite_ranks(summary.peaks))

    def inspect_result(self, ranks: tuple[int, ...]) -> None:
        """Set `non_finite` by inspecting every parameter's gradient; all ranks call this.

        Args:
            ranks: ranks whose own gradient was not finite.
        """
        if self.local_only or self.comm.size == 1:  # no peaks were measured
            ranks = (self.comm.rank,)
        parts, split = self.parts_by_name(), self.splits_gradients
        self.non_finite = find_non_finite(parts, self.comm, self.step - 1, ranks, split=split)
