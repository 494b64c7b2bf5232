"""How a round is closed: the round status is exchanged, read, and decides what becomes of the sums.

Where the buckets are on an accelerator whose collectives run on streams, the status is read one step late; see
`deferred_status`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from paceline.errors import MismatchError, ReplicasDiverged, SyncError
from paceline.parallel.engine import round_status
from paceline.parallel.engine.deferred_status import DeferredStatus, StatusMemory, report_unread
from paceline.parallel.engine.grad_hooks import GradHooks
from paceline.parallel.engine.gradient_finite_check import (
    NonFiniteReport,
    find_non_finite,
    non_finite_ranks,
    surely_finite,
)
from paceline.parallel.engine.gradient_state import GradientState, describe
from paceline.parallel.engine.model_changes import HARMLESS, ModelWatch, digest_of, raise_for_changes
from paceline.parallel.engine.round_status import RoundSummary, Status
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.replica_digests import (
    check_interval,
    digest_of_all,
    digest_on_device,
    find_divergence,
    is_check_round,
    tensor_digest,
)
from paceline.parallel.strategy import Sync
from paceline.world.accelerator import has_streams
from paceline.world.control_collectives import gather_rows

__all__ = ["RoundClosing"]

_READ_ALIKE = 2
"""Rounds in a row with the same used parameters after which a status may be read late."""

_READ_IN_TIME = (
    "resume from the last checkpoint, with find_unused_parameters=True: then no status is read late"
)


class RoundClosing(GradientState):
    """Exchanges the round status of a list of parameters and draws the conclusions.

    Args:
        named, comm, plan, reduce_dtype, frozen, module, sparse: as for `Reducer`.

    Attributes:
        local_only: whether this rank trains as in a world of one; see `Reducer.set_local_only`.
        replica_check_every: rounds between two comparisons of the parameters of all ranks; 0: none.
        failure: of a round, known after its update; else empty. Until a checkpoint is loaded, no backward begins.
        usage_varies: which parameters are used may change from step to step, so every status is read in time.
    """

    hooks: GradHooks

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        comm: Comm,
        plan: Sync,
        reduce_dtype: torch.dtype | None,
        frozen: Sequence[tuple[str, torch.nn.Parameter]],
        module: torch.nn.Module | None,
        sparse: Sequence[tuple[str, torch.nn.Parameter]],
    ) -> None:
        super().__init__(named, comm, plan, reduce_dtype)
        self.frozen = list(frozen)
        self._sparse = list(sparse)
        self.module = module
        self._watch = ModelWatch(module) if module is not None and comm.size > 1 else None
        self.replica_check_every = check_interval(os.environ)
        self.local_only = False
        self.usage_varies = False
        self._changes: dict[str, str] = {}  # of the model on this rank, in the present round
        self._status_memory: StatusMemory | None = None
        self._unread: list[DeferredStatus] = []  # the status of the latest round, while it is on its way
        weakref.finalize(self, report_unread, self._unread, comm.rank, comm.size)
        self._fire_once = True  # every hook fires once in a backward
        self._read_alike = 0  # rounds in a row that were read in time and used the same parameters
        self.failure = ""

    @property
    def splits_gradients(self) -> bool:
        """Whether ranks hold different parts of the synchronised gradient."""
        return self.sharded

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return all parameters of the model with their names, as optimizers hold them."""
        return [*((slot.name, slot.param) for slot in self.slots), *self.frozen, *self._sparse]

    def _build_buckets(self) -> None:
        super()._build_buckets()
        self._status_memory = StatusMemory(self.buckets[-1].status)
        self._fire_once = all(slot.expected == 1 for slot in self.slots)

    # ------------------------------------------------------------------ exchange

    def _exchange(self, status: Status) -> RoundSummary | None:
        """Launch the other buckets with the round status and wait; return the summary if it is read in time."""
        weights = self.weights
        self.settle()
        self._keep_late()
        self.launch_queue.complete_rest(self.finite_check)
        self._write_status(status)
        self.launch_queue.launch_rest(weights.averaged)
        if self._defers():
            if not self.sharded:
                self.launch_queue.wait_all()
            return None
        summary = round_status.decode(self.launch_queue.read_status(weights.averaged), self.comm.size)
        if summary.late or not self.sharded:  # a sharded result is waited for where it is used
            self.launch_queue.wait_all()
        if summary.late:
            for bucket in self.buckets:
                bucket.hold()
            self._late.reduce(self.slots, self.comm, self.device, mean=weights.averaged)
            for bucket in self.buckets:
                bucket.keep_own()
            self._fire_once = False
            for bucket in self.buckets:
                bucket.classify()
            self.hooks.skip_small(self.slots)
        return summary

    def _write_status(self, status: Status) -> None:
        """Write this rank's status to where it is sent from."""
        weights, place = self.weights, self.buckets[-1].status
        rank, size = self.comm.rank, self.comm.size
        flags = self._used_flags()
        self._changes = self._find_changes(flags)
        digest, on_device = digest_of(self._changes), None
        if is_check_round(self.step, self.replica_check_every):
            params = [param for _, param in self._replicated()]
            if params and has_streams(place.device) and all(each.device == place.device for each in params):
                on_device = digest_on_device(params)
            else:
                digest ^= digest_of_all(params) & 0xFFFF
        samples = 0.0 if isinstance(weights.samples, torch.Tensor) else weights.samples
        mine = round_status.encode(rank, size, samples, status, flags, len(self._late), digest)
        assert self._status_memory is not None, "there are buckets"
        self.comm.write_status(mine, place, self._status_memory.sent)
        if isinstance(weights.samples, torch.Tensor):
            round_status.split_samples(place, rank, size, weights.samples)
        if on_device is not None:
            round_status.add_digest(place, rank, size, on_device)
        if self.finite_check is not None:
            self.finite_check.write_peak(place[round_status.peak_index(rank, size)])

    def _defers(self) -> bool:
        """Return whether the status of the present round is read one step late; alike on all ranks."""
        return (
            self._read_alike >= _READ_ALIKE
            and self.comm.stream_ordered
            and has_streams(self.buckets[-1].status.device)
            and not self.usage_varies
            and self.tuner is None
            and self.sparse is None  # whose rows are counted on the host
            and self._fire_once
        )

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

    def _conclude_on_device(self, failed: bool) -> None:
        """Turn the sums into means by what is on the device; the host reads the status later."""
        weights, known, memory = self.weights, self.summary, self._status_memory
        assert memory is not None, "there are buckets"
        assert known is not None, "rounds before were read in time"
        summed = self.launch_queue.status_on_device(weights.averaged)
        total, valid = round_status.totals(summed, self.comm.size, weights.status)
        own = isinstance(weights.samples, torch.Tensor) or weights.samples > 0
        factor = weights.end_round_on_device(total, valid)
        self._unread.append(memory.defer(summed, self.step - 1, known.used, self._changes))
        if failed:  # this rank's own exception is being raised; the others know nothing of it yet
            self.drop()
            self._inspect_on_device()
            if self.splits_gradients:  # they gather this rank's part of an update that it does not make
                self.failure = f"backward failed on this rank in step {self.step - 1}, and the others went on"
            return
        if weights.counted and not own and self._unread[-1].read(self.comm.size).total == 0:
            self._unread.clear()  # no rank has samples, and all read that in time
            weights.total = 0.0
            self.drop()
            return
        self._scale(factor)
        self._attach_result(known)
        self._reduced = True
        self._inspect_on_device()

    def settle(self) -> None:
        """Read the status of the latest round, if it is on its way; all ranks call this.

        Raises:
            BackwardFailed, SyncError, MismatchError: as `finish`, for the step of that round.
        """
        self.refuse_after_failure()
        self.settle_result()
        if not self._unread:
            return
        deferred = self._unread.pop()
        summary = deferred.read(self.comm.size)
        self._changes = dict(deferred.changes)
        self.weights.total = summary.total
        try:
            self._judge(summary, deferred.step)
            self._refuse_surprise(summary, deferred)
        except (SyncError, MismatchError) as error:
            self.failure = f"the update of step {deferred.step} was wrong: {str(error).splitlines()[0]}"
            self._local = False
            self.drop()
            raise
        self.summary = summary

    def refuse_after_failure(self) -> None:
        """Raise if an update was wrong."""
        if self.failure:
            remedy = "resume from the last checkpoint"
            raise SyncError(self.failure, rank=self.comm.rank, step=self.step, remedy=remedy)

    def check_latest(self) -> None:
        """Raise if the latest round, whose status is on its way, has no result; one rank may call this alone.

        Raises:
            BackwardFailed, SyncError: as `settle`, which raises it again, with the names of what differs.
        """
        if not self._unread:
            return
        deferred = self._unread[-1]
        summary = deferred.read(self.comm.size)
        self.weights.total = summary.total
        summary.raise_for_status(self.comm.rank, deferred.step)
        self._refuse_surprise(summary, deferred)

    def _refuse_surprise(self, summary: RoundSummary, deferred: DeferredStatus) -> None:
        """Raise if the engine went by something else than the status of a round says."""
        if summary.used == deferred.used and not summary.late:
            return
        names = [name for name, _ in self._reported()]
        changed = [
            name
            for name, now, before in zip(names, summary.used, deferred.used, strict=True)
            if now != before
        ]
        found = ", ".join(map(repr, changed[:3])) or "a parameter that came late"
        raise SyncError(
            f"the parameters that got a gradient are others than in the steps before: {found}",
            rank=self.comm.rank,
            step=deferred.step,
            remedy=_READ_IN_TIME,
        )

    def _judge(self, summary: RoundSummary, step: int) -> None:
        """Raise if the round has no result or ranks differ; all ranks call this."""
        summary.raise_for_status(self.comm.rank, step)
        # Parameters that all ranks froze need no further message. Ranks that have joined update theirs no more.
        differ = len(set(summary.digests)) > 1 or set(self._changes.values()) - {HARMLESS}
        if differ and Status.JOINED not in summary.status:
            names = [name for name, _ in self.named_parameters()]
            raise_for_changes(self._changes, names, self.comm, step)
            self._compare_replicas(step)

    def _conclude(self, summary: RoundSummary, failed: bool) -> None:
        """Turn the sums into means and attach them, or drop them all and raise."""
        try:
            self._judge(summary, self.step - 1)
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
        alike = self.summary is not None and self.summary.used == summary.used
        if self.summary is not None and not alike:
            self.usage_varies = True
        self._read_alike = self._read_alike + 1 if alike and Status.JOINED not in summary.status else 0
        self._reduced, self.summary = True, summary
        if self.finite_check is not None:
            self.finite_check.norm = None
            if (self.local_only or self.comm.size == 1) and has_streams(self.device):
                self.settle_result()
                self._inspect_on_device((self.comm.rank,))
            elif self.finite_check.measures and self.non_finite is None:
                self._check_finite(summary, float(factor))
        if self.tuner is not None and not self.local_only:
            self.tuner.round_ended()

    def _replicated(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that must be equal on all ranks, with their names."""
        return [(name, param) for name, param in self.named_parameters() if not isinstance(param, DTensor)]

    def _compare_replicas(self, step: int) -> None:
        """Raise if parameters differ between ranks; all ranks call this."""
        named = self._replicated()
        digests = torch.stack([tensor_digest(param).to(self.device) for _, param in named])
        rows = [row.tolist() for row in gather_rows(digests, self.comm.group)]
        divergence = find_divergence([f"parameter {name!r}" for name, _ in named], rows)
        if divergence is not None:
            raise ReplicasDiverged(
                str(divergence),
                rank=divergence.ranks[0],
                step=step,
                remedy="resume from the last checkpoint, and look for code that changes parameters or gradients on one "
                "rank only (clipping, a skipped step, loading); if there is none, suspect that rank's memory. "
                "PACELINE_REPLICA_CHECK=0 turns this comparison off",
            )

    def _check_finite(self, summary: RoundSummary, factor: float) -> None:
        """Inspect the result unless the peaks show that it is finite; see [Note: peaks] in `finite_check`."""
        assert self.finite_check is not None, "a finite check is installed"
        if summary.late or not surely_finite(summary.peaks, factor, self.finite_check.largest):
            self.inspect_result(non_finite_ranks(summary.peaks))

    def _inspect_on_device(self, ranks: tuple[int, ...] | None = None) -> None:
        """Inspect the result on the device, if a check is installed; all ranks call this, also without a result."""
        if self.finite_check is not None:
            comm = self.comm if self.splits_gradients else None
            self.finite_check.inspect(self.parts_by_name(), self.device, comm, self.step - 1, ranks)

    def unread_report(self) -> NonFiniteReport | None:
        """Return the report on the result that is on its way to the host; one rank may call this alone."""
        assert self.finite_check is not None, "a finite check is installed"
        late, report = self.finite_check.unread, self.finite_check.read()
        if report is None or late is None or late.ranks is not None:
            return report
        return replace(report, ranks=non_finite_ranks(self._unread[-1].read(self.comm.size).peaks))

    def settle_result(self) -> None:
        """Read what was found on the device; if the gradients are still there, `non_finite` is the report."""
        check = self.finite_check
        if check is not None and check.unread is not None:
            report = self.unread_report()
            if check.settle(report):
                self.non_finite = report

    def inspect_result(self, ranks: tuple[int, ...]) -> None:
        """Set `non_finite` by inspecting every parameter's gradient; all ranks call this.

        Args:
            ranks: ranks whose own gradient was not finite.
        """
        if self.local_only or self.comm.size == 1:  # no peaks were measured
            ranks = (self.comm.rank,)
        parts, split = self.parts_by_name(), self.splits_gradients
        self.non_finite = find_non_finite(parts, self.comm, self.step - 1, ranks, split=split)
