"""The rounds of synchronisation: one engine for every plan but full-shard.

A *round* is one synchronised backward. Every rank launches the same collectives in the same order and
closes the round with the ledger, whatever happened to it in between; so ranks never drift apart.

    begin     attach the gradients as views into the buckets
    (hooks)   a gradient arrives: zero its view, if zero_grad() dropped what was there
              a parameter's gradient is complete: count it; a full bucket is launched, in bucket order
    finish    write the ledger, launch what is left, read the ledger, fix the weights; wait for everything,
              or when sharded for each bucket where it is used

[Note: the first round] Which gradient is ready when, and how often its hook fires, is learnt from the first
backward. Until then gradients stay where autograd puts them; at the end of that backward all ranks adopt
rank 0's order, the buckets are built once, and the gradients move in. No later step moves them.

[Note: late gradients] A launched bucket is being reduced, so nothing may write to it. Its parameters are
therefore detached from their views at launch (``param.grad = None``). Should autograd bring another gradient
all the same (a parameter shared by re-entrant checkpoints that ran in a new order), it arrives in memory of
its own, is reduced in a second pass, and the count that was too low is mended on all ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from paceline._core.step_state import step_state, wait_counters
from paceline.errors import SyncError
from paceline.parallel.engine import round_status
from paceline.parallel.engine.bucket import Bucket, GradSlot, storage_dtype
from paceline.parallel.engine.bucket_builder import agree_order
from paceline.parallel.engine.comm import Comm
from paceline.parallel.engine.finite_check import find_non_finite, non_finite_ranks, surely_finite
from paceline.parallel.engine.grad_hooks import register_grad_hooks
from paceline.parallel.engine.gradient_state import GradientState
from paceline.parallel.engine.loss_weights import LossWeights, missing_samples_error
from paceline.parallel.engine.round_status import Status
from paceline.parallel.strategy import Sync

__all__ = ["Reducer"]

_LOOK_SECONDS = 1e-3
"""Between two looks, in backward, at what has ended: each look takes microseconds."""


class Reducer(GradientState):
    """Synchronises the gradients of a list of parameters.

    Args:
        named: the trainable parameters with their names, in registration order, each once.
        comm: the ranks.
        plan: any plan that does not shard parameters.
        reduce_dtype: dtype in which gradients of bf16 and fp16 parameters are accumulated and reduced;
            None: their own.
        frozen: parameters that required no gradient when the model was wrapped.
    """

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        comm: Comm,
        plan: Sync,
        reduce_dtype: torch.dtype | None = None,
        frozen: Sequence[tuple[str, torch.nn.Parameter]] = (),
    ) -> None:
        super().__init__(named, comm, plan, reduce_dtype)
        self.frozen: Sequence[tuple[str, torch.nn.Parameter]] = tuple(frozen)
        self.sync_enabled = True
        """Whether a backward that begins now synchronises; `accumulate()` turns it off."""
        self.local_only = False
        """Whether this rank trains as in a world of one; `set_local_only` decides."""
        self.replicas_differ = False
        """Whether parameters may differ between ranks: training apart was broken off."""

        self._in_backward = False  # a backward is under way
        self._will_sync = False  # ... and closes with a round
        self._firings: list[int] = []  # firings of the first backward
        self._ids = {id(param) for _, param in [*named, *frozen]}
        self._handles = register_grad_hooks(
            self, self.slots, Reducer.arriving if comm.size > 1 else None, Reducer.accumulated
        )

    # ------------------------------------------------------------------ what the rest of Paceline asks

    @property
    def splits_gradients(self) -> bool:
        """Whether ranks hold different parts of the synchronised gradient."""
        return self.sharded

    @property
    def unsynced(self) -> bool:
        """Whether gradients of this rank alone wait for a round."""
        return self._local or self._in_backward

    @property
    def interrupted(self) -> bool:
        """Whether a backward began, never ended, and is not running now."""
        return self._in_backward and torch._C._current_graph_task_id() == -1

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return all parameters of the model with their names, as optimizers hold them."""
        return [*((slot.name, slot.param) for slot in self.slots), *self.frozen]

    def holds(self, param: torch.Tensor) -> bool:
        """Tell whether `param` is one of the model's."""
        return id(param) in self._ids

    def bucket_plan(self) -> list[tuple[int, list[str]]]:
        """Return (bytes, names of parameters) per collective, in launch order."""
        return [(bucket.flat.nbytes, [slot.name for slot in bucket.slots]) for bucket in self.buckets]

    def whole(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the parameters; every rank has them whole."""
        return [param.detach().clone() for param in params]

    def set_local_only(self, apart: bool) -> None:
        """From now on keep every round to this rank, as in a world of one; or no longer."""
        assert not self.splits_gradients, "where ranks hold parts, none can train on its own"
        self.drop()
        self.local_only = apart
        self.weights = LossWeights(self.comm.rank, 1 if apart else self.comm.size)

    # ------------------------------------------------------------------ begin

    def before_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return what `backward_reached` is told when backward comes to this forward: nothing here."""
        self._let_tune()

    def _let_tune(self) -> None:
        """Let the plan change where nothing waits for a round."""
        if self.tuner is not None and not self._local and not self.local_only:
            self.tuner.apply_pending_plan()

    def backward_reached(self, call: object) -> None:
        """Open the backward that has come to the outputs of a forward; `before_forward` returned `call`."""
        self.begin_in_backward()

    def contribute_nothing(self, loss: torch.Tensor | None) -> None:
        """Bring nothing to this round: `finish` sends zeros."""

    def begin(self, status: Status, samples: float = 0.0) -> None:
        """Open a backward.

        Args:
            status: how this rank's gradient is weighted.
            samples: that it is the mean of, where they count.

        Raises:
            SyncError: two kinds of weights would be mixed in one gradient.
            UsageError: a CUDA graph is being captured, and there are other ranks.
        """
        self.recover()
        if self._in_backward:
            return
        self._refuse_capture()
        if self.replicas_differ and not self.local_only:
            raise SyncError(
                "parameters differ between ranks: a block in which they trained apart ended in an exception",
                rank=self.comm.rank,
                step=self.step,
                remedy="load a checkpoint before training goes on",
            )
        step_state.begin_phase(self.step, "backward")
        self.comm.note_step(self.step)
        self.launch_queue.wait_all()  # the result of the last round, if nobody used it
        self._let_tune()
        kept = self._kept()
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
        if not self.has_buckets:
            self._firings.clear()
            for slot in self.slots:
                self._attach_early(slot)
        else:
            self._attach(kept)
        if self._reduced:
            self._carry()
        self.weights.samples += samples
        self.launch_queue.open(self.step)

    # ------------------------------------------------------------------ hooks

    def arriving(self, index: int) -> None:
        """Prepare for autograd to add to the gradient of slot `index`."""
        if self._in_backward and self.has_buckets:
            self.slots[index].zero_if_needed()

    def accumulated(self, index: int) -> None:
        """Take note that autograd has added to the gradient of slot `index`."""
        slot = self.slots[index]
        if not self._in_backward:
            self._begin_late(slot)
        slot.fired += 1
        if step_state.recorder is not None:
            self.launch_queue.poll(_LOOK_SECONDS)
        if not self.has_buckets:
            self._refuse_sparse(slot)
            self._firings.append(index)
            if self.reduce_dtype is not None:
                slot.keep_unbucketed(storage_dtype(slot.param, self.reduce_dtype))
            return
        bucket = slot.bucket
        if bucket.launched:
            self._late.keep(slot)
            return
        if slot.param.grad is not slot.view:
            self._move_in(slot)
        bucket.note_writer()
        if slot.fired == slot.expected:
            bucket.pending -= 1
            if self.arrivals is not None:
                self.arrivals[index] = time.perf_counter()
            if bucket.pending == 0:
                self._full(bucket)

    def _full(self, bucket: Bucket) -> None:
        """Launch what is full, where that is done in backward."""
        if (recorder := step_state.recorder_of(self.comm)) is not None:
            bucket.ready = time.perf_counter()
            if recorder.quiet:
                return
        if self._will_sync and self.plan.overlap and not self.local_only:
            self.launch_queue.launch_full(self.weights.averaged, self.finite_check)

    def begin_in_backward(self) -> None:
        """Open the backward that is running, if nobody has, and have it closed at its end."""
        if not self._in_backward:
            self.begin(Status.EQUAL)
            if wait_counters.samples == 0:
                refusal = missing_samples_error(self.comm.rank, self.step)
                with contextlib.suppress(SyncError):
                    self.finish(failed=True)
                raise refusal
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _begin_late(self, slot: GradSlot) -> None:
        """Open a backward that came by no output of the wrapped forward: one gradient is here already."""
        fresh = slot.param.grad
        moved = not (self.has_buckets and fresh is slot.view)
        if moved:  # or `begin` would take it for one that was kept
            slot.param.grad = None
        self.begin_in_backward()
        if not moved or fresh is None:
            return
        if not self.has_buckets or slot.upcast:
            slot.param.grad = fresh
        else:
            slot.zero_if_needed()
            slot.param.grad = slot.view.add_(fresh.detach())

    def recover(self) -> bool:
        """Complete a backward that an exception cut short, without a result; tell whether there was one."""
        if not self.interrupted:
            return False
        self.finish(failed=True)
        return True

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
        if self._will_sync:
            self.synchronise(failed)
        elif failed:
            self.drop()
        else:
            step_state.enter_phase("outside")
            for slot in self.slots:
                slot.used = slot.used or slot.fired > 0
                slot.expose(slot.used)

    def synchronise(self, failed: bool = False) -> None:
        """Run a round over what is in the buckets: all ranks take part, whatever they hold.

        Raises: as `finish`.
        """
        self._in_backward = False
        step_state.begin_phase(self.step, "exchange")
        if self.weights.counted and (recorder := step_state.recorder_of(self.comm)) is not None:
            recorder.samples = self.weights.samples
        ended = time.perf_counter()
        if self.comm.size == 1 or self.local_only:
            summary = self._alone(failed)
        else:
            if not self.has_buckets:
                self._settle()
            summary = self._exchange(failed)
        self.timings.exposed_seconds = 0.0
        self.note_waiting(time.perf_counter() - ended)
        step_state.end_round(sees_waiting=self.sees_waiting)
        step_state.enter_phase("outside")
        self._local = False
        self.step += 1
        self._conclude(summary, failed)
        # Not where a round failed: there the other ranks have just raised, and what is told may ask for them all.
        if self.round_ended is not None and not (failed or self.local_only):
            self.round_ended(self.step)

    def _settle(self) -> None:
        """Build the buckets; see [Note: the first round]."""
        self.order = agree_order(self.comm, self.slots, self._firings)
        self._lay_out()

    def _alone(self, failed: bool) -> round_status.RoundSummary:
        """Return the page of a world of one, where this rank's own gradients are the result."""
        used = tuple(slot.used or slot.fired > 0 for slot in self.slots)
        status = Status.FAILED if failed else self.weights.status
        return round_status.RoundSummary((self.weights.samples,), (status,), used)

    def _exchange(self, failed: bool) -> round_status.RoundSummary:
        """Launch what is left with the ledger, wait for everything, return the page."""
        weights, last = self.weights, self.buckets[-1]
        status = Status.FAILED if failed else weights.status
        mine = round_status.encode(
            self.comm.rank, self.comm.size, weights.samples, status, self._used_flags(), len(self._late)
        )
        self.comm.write_status(mine, last.ledger)
        if self.finite_check is not None:
            self.launch_queue.measure_rest(self.finite_check)
            self.finite_check.write_status(
                last.ledger[round_status.peak_index(self.comm.rank, self.comm.size)]
            )
        self.launch_queue.launch_rest(weights.averaged)
        summary = round_status.decode(self.launch_queue.read_ledger(weights.averaged), self.comm.size)
        if summary.late or not self.sharded:  # a sharded result is waited for where it is used
            self.launch_queue.wait_all()
        if summary.late:
            self._late.reduce(self.slots, self.comm, self.device, mean=weights.averaged)
        return summary

    # ------------------------------------------------------------------ conclude

    def _conclude(self, summary: round_status.RoundSummary, failed: bool) -> None:
        """Turn the sums into means and attach them, or drop them all and say why."""
        try:
            summary.raise_for_status(self.comm.rank, self.step - 1)
        except SyncError:
            self.drop()
            if failed:  # this rank's own exception is on its way
                return
            raise
        if self.weights.counted and summary.total == 0:
            self.weights.total = 0.0
            self.drop()
            return
        factor = self.weights.close(summary)
        self._scale(factor)
        self._attach_result(summary)
        self._reduced = True
        if self.finite_check is not None:
            self.finite_check.norm = None
            if self.finite_check.measures and self.non_finite is None:
                self._check_finite(summary, factor)
        if self.tuner is not None and not self.local_only:
            self.tuner.round_ended()

    def _check_finite(self, summary: round_status.RoundSummary, factor: float) -> None:
        """Find out whether the result is finite; see [Note: peaks] in `finite_check`."""
        assert self.finite_check is not None, "somebody asks"
        if summary.late or not surely_finite(summary.peaks, factor, self.finite_check.largest):
            self.look_closely(non_finite_ranks(summary.peaks))  # nobody measures where a rank is alone

    def look_closely(self, ranks: tuple[int, ...]) -> None:
        """Look at every parameter's gradient; `ranks` brought what is not finite. All ranks call this."""
        if self.local_only or self.comm.size == 1:
            ranks = (self.comm.rank,)
        parts, split = self.parts_by_name(), self.splits_gradients
        self.non_finite = find_non_finite(parts, self.comm, self.step - 1, ranks, split=split)
