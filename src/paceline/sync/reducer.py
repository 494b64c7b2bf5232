"""The rounds of synchronisation: one engine for every plan but full-shard.

A *round* is one synchronised backward. Every rank launches the same collectives in the same order and
closes the round with the ledger, whatever happened to it in between; so ranks never drift apart.

    begin     attach the gradients as views into the buckets; zero what zero_grad() dropped
    (hooks)   a parameter's gradient is complete: count it; a full bucket is launched, in bucket order
    finish    write the ledger, launch what is left, wait for everything, read the ledger, fix the weights

[Note: the first round] Which gradient is ready when, and how often its hook fires, is learnt from the first
backward. Until then gradients stay where autograd puts them; at the end of that backward all ranks adopt
rank 0's order, the buckets are built once, and the gradients move in. No later step moves them.

[Note: late gradients] A launched bucket is being reduced, so nothing may write to it. Its parameters are
therefore detached from their views at launch (``param.grad = None``). Should autograd bring another
gradient all the same (a parameter shared by re-entrant checkpoints that ran in a new order), it arrives in
memory of its own, is reduced in a second pass, and the count that was too low is mended on all ranks.

[Note: weights] A rank's gradient is weighted by samples / reference inside its own backward, which costs
nothing. The reference is the total of the previous round, so if the total has not changed, the sum over
ranks already is the mean over samples. If it has, one multiplication by reference / total mends it.

[Note: carried gradients] A gradient that was already reduced and not dropped by zero_grad() must count once,
not once per rank. So one rank carries it into the next round and the others start from zero; when sharded,
each rank carries its own shard.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline import trace
from paceline.errors import BackwardFailed, SyncError
from paceline.sync import ledger
from paceline.sync.bucket import Bucket, Piece, Slot
from paceline.sync.ledger import Status
from paceline.sync.plan import Sync
from paceline.sync.settle import agree_order, build_buckets
from paceline.sync.timings import SyncTimings
from paceline.sync.wire import Pending, Wire

__all__ = ["Reducer"]


class Reducer:
    """Synchronises the gradients of a list of parameters.

    Args:
        named: the trainable parameters with their names, in registration order, each once.
        wire: the ranks.
        plan: any plan that does not shard parameters.
        reduce_dtype: dtype in which gradients of bf16 and fp16 parameters are accumulated and reduced;
            None: their own.
        frozen: parameters that required no gradient when the model was wrapped.
    """

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        wire: Wire,
        plan: Sync,
        reduce_dtype: torch.dtype | None = None,
        frozen: Sequence[tuple[str, torch.nn.Parameter]] = (),
    ) -> None:
        self.wire, self.plan, self.reduce_dtype = wire, plan, reduce_dtype
        self.sharded = plan.shard == "optimizer" and wire.size > 1
        self.frozen = tuple(frozen)
        self.slots = [Slot(index, name, param) for index, (name, param) in enumerate(named)]
        self.buckets: list[Bucket] = []
        self.timings = SyncTimings()
        self.sync_enabled = True
        """Whether a backward that begins now synchronises; `accumulate()` turns it off."""
        self.step = 0
        """Rounds so far: optimizer steps, where every step has one."""
        self.total_samples = 0.0
        """Samples of all ranks in the latest round."""

        self._open = False  # a backward is under way
        self._syncing = False  # ... and closes with a round
        self._status = Status.EQUAL
        self._local = False  # the views hold gradients of this rank that no round has seen
        self._reduced = False  # the views hold the result of a round
        self._samples = 0.0  # samples of this rank behind the local gradients
        self._reference = float(wire.size)  # see [Note: weights]
        self._next = 0  # the bucket to be launched next
        self._under_way: list[tuple[Bucket, Pending, float]] = []
        self._order: list[int] = []  # firings of the first backward
        self._late: dict[int, torch.Tensor] = {}
        self._ids = {id(param) for _, param in [*named, *frozen]}
        self._handles = [
            slot.param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), slot.index))
            for slot in self.slots
        ]
        weakref.finalize(self, _remove, self._handles)

    # ------------------------------------------------------------------ what the rest of Paceline asks

    @property
    def settled(self) -> bool:
        """Whether the buckets exist (see [Note: the first round])."""
        return bool(self.buckets)

    @property
    def device(self) -> torch.device:
        """Where gradients are, as far as they are on one device."""
        return self.slots[0].param.device if self.slots else torch.device("cpu")

    @property
    def splits_gradients(self) -> bool:
        """Whether ranks hold different parts of the synchronised gradient."""
        return self.sharded

    @property
    def unsynced(self) -> bool:
        """Whether gradients of this rank alone wait for a round."""
        return self._local or self._open

    @property
    def interrupted(self) -> bool:
        """Whether a backward began, never ended, and is not running now."""
        return self._open and torch._C._current_graph_task_id() == -1

    def holds(self, param: torch.Tensor) -> bool:
        """Tell whether `param` is one of the model's."""
        return id(param) in self._ids

    def bucket_plan(self) -> list[tuple[int, list[str]]]:
        """Return (bytes, names of parameters) per collective, in launch order."""
        return [(bucket.flat.nbytes, [slot.name for slot in bucket.slots]) for bucket in self.buckets]

    def weight(self, samples: float) -> float:
        """Return the factor for the loss of `samples` samples (see [Note: weights])."""
        return samples / self._reference

    def pieces(self) -> list[Piece]:
        """Return this rank's parts of the parameters, in bucket order; sharded plans, after the first round."""
        return [
            piece
            for bucket in self.buckets
            if bucket.slots
            for piece in bucket.pieces(self.wire.rank, self.wire.size)
        ]

    def local_grads(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients of which this rank holds a shard, and those that every rank holds whole."""
        if self.sharded:
            return [piece.grad for piece in self.pieces() if piece.slot.used] if self._reduced else [], []
        return [], [slot.param.grad for slot in self.slots if slot.param.grad is not None]

    def whole(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the parameters; every rank has them whole."""
        return [param.detach().clone() for param in params]

    # ------------------------------------------------------------------ begin

    def before_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Nothing to do: this engine works in backward."""

    def take_part(self, loss: torch.Tensor | None) -> None:
        """Bring nothing to this round: `finish` sends zeros."""

    def begin(self, samples: float | None = None) -> None:
        """Open a backward: of `samples` samples, or (None) of a rank that counts as any other.

        Raises:
            SyncError: both kinds would be mixed in one gradient.
        """
        self.recover()
        if self._open:
            return
        status = Status.EQUAL if samples is None else Status.SAMPLES
        kept = self._kept()
        if not kept and not self._kept_elsewhere():
            self._local, self._reduced, self._samples = False, False, 0.0
        elif (self._local or self._reduced) and status is not self._status:
            raise SyncError(
                "backward(loss, samples=...) and plain backward() were mixed in one gradient",
                rank=self.wire.rank,
                step=self.step,
                remedy="call zero_grad() between them, or pass samples= to every backward",
            )
        self._open, self._syncing, self._status = True, self.sync_enabled, status
        if not self.settled:
            self._order.clear()
            for slot in self.slots:
                slot.fired, slot.used = 0, slot.param.grad is not None
        else:
            self._attach(kept)
        if self._reduced:
            self._carry()
        self._samples += samples or 0.0
        self._next = 0

    def _kept(self) -> set[int]:
        """Return the slots whose gradients were not dropped by zero_grad()."""
        if self.sharded and self._reduced:  # a sharded result is not in param.grad
            return {slot.index for slot in self.slots if slot.used}
        return {slot.index for slot in self.slots if slot.param.grad is not None}

    def _kept_elsewhere(self) -> bool:
        """Tell whether gradients outside the slots were kept."""
        return False

    def _attach(self, kept: set[int]) -> None:
        """Make every gradient a view into its bucket, zeroed where nothing was kept."""
        for bucket in self.buckets:
            bucket.pending, bucket.launched = len(bucket.slots), False
            fresh = not any(slot.index in kept for slot in bucket.slots)
            if fresh:
                bucket.flat.zero_()
            for slot in bucket.slots:
                slot.fired = 0
                if not fresh:
                    self._restore(slot, slot.index in kept)
                else:
                    slot.used = False
                slot.param.grad = None if slot.staged else slot.view

    def _restore(self, slot: Slot, keep: bool) -> None:
        """Bring a slot's view up to date with what the program did to ``param.grad``."""
        slot.used = keep
        grad = slot.param.grad
        if not keep:
            slot.view.zero_()
        elif grad is not None and grad is not slot.view and not slot.staged:
            slot.view.copy_(grad.detach())

    def _carry(self) -> None:
        """Let one rank carry the reduced gradients into this round; see [Note: carried gradients]."""
        equal = self._status is Status.EQUAL
        scale = self.wire.size if equal else self.total_samples / self._reference
        if self.sharded:
            for bucket in self.buckets:
                low, high = bucket.span(self.wire.rank, self.wire.size)
                bucket.flat[:low].zero_()
                bucket.flat[high:].zero_()
                bucket.flat[low:high].mul_(scale)
        elif not equal:  # the mean of equal gradients is that gradient: nothing to do for EQUAL
            for flat in self._storage():
                flat.mul_(scale if self.wire.rank == 0 else 0.0)
        self._samples = self.total_samples if self.wire.rank == 0 and not equal else 0.0
        self._reduced = False

    def _storage(self) -> list[torch.Tensor]:
        """Return the memory of the gradients: the buckets, or before they exist the gradients."""
        if self.settled:
            return [bucket.flat for bucket in self.buckets]
        return [slot.param.grad for slot in self.slots if slot.param.grad is not None]

    # ------------------------------------------------------------------ hooks

    def accumulated(self, index: int) -> None:
        """Take note that autograd has added to the gradient of slot `index`."""
        slot = self.slots[index]
        if not self._open:
            self._begin_late(slot)
        slot.fired += 1
        if not self.settled:
            self._refuse_sparse(slot)
            self._order.append(index)
            return
        bucket = slot.bucket
        if bucket.launched:
            self._keep_late(slot)
            return
        if slot.param.grad is not slot.view:
            self._move_in(slot)
        if slot.fired == slot.expected:
            bucket.pending -= 1
            if bucket.pending == 0 and self._syncing and self.plan.overlap:
                self._launch_full()

    def begin_in_backward(self) -> None:
        """Open the backward that is running, if nobody has, and have it closed at its end."""
        if not self._open:
            self.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _begin_late(self, slot: Slot) -> None:
        """Open a backward that came by no output of the wrapped forward: one gradient is here already."""
        fresh = slot.param.grad
        moved = self.settled and fresh is not slot.view
        if moved:
            slot.param.grad = None
        self.begin_in_backward()
        if moved and fresh is not None:
            slot.param.grad = fresh if slot.staged else slot.view.add_(fresh.detach())

    def recover(self) -> bool:
        """Complete a backward that an exception cut short; tell whether there was one.

        Raises:
            BackwardFailed: another rank raised too.
        """
        if not self.interrupted:
            return False
        self.finish(failed=True)
        return True

    def _refuse_sparse(self, slot: Slot) -> None:
        if slot.param.grad is not None and slot.param.grad.is_sparse:
            slot.param.grad = None
            raise SyncError(
                f"parameter {slot.name!r} has a sparse gradient",
                rank=self.wire.rank,
                step=self.step,
                remedy="build the embedding with sparse=False",
            )

    def _move_in(self, slot: Slot) -> None:
        """Take a gradient that autograd put elsewhere (staged dtype, create_graph, set by the program)."""
        grad = slot.param.grad
        assert grad is not None, "the hook runs after accumulation"
        if slot.staged:
            slot.view.add_(grad.detach())
            slot.param.grad = None
        else:
            slot.view.copy_(grad.detach())
            slot.param.grad = slot.view

    def _keep_late(self, slot: Slot) -> None:
        grad = slot.param.grad
        assert grad is not None, "the hook runs after accumulation"
        late = grad.detach().to(slot.view.dtype)
        self._late[slot.index] = self._late[slot.index] + late if slot.index in self._late else late
        slot.param.grad = None

    # ------------------------------------------------------------------ launch

    def _launch_full(self) -> None:
        """Launch the buckets that are full, in order; the last waits for the ledger."""
        while self._next < len(self.buckets) - 1 and self.buckets[self._next].pending == 0:
            bucket = self.buckets[self._next]
            for slot in bucket.slots:
                slot.param.grad = None  # see [Note: late gradients]
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        started = time.perf_counter()
        bucket.launched = True
        if self.sharded and bucket.slots:
            pending = self.wire.reduce_scatter(bucket.flat)
        else:
            pending = self.wire.all_reduce(bucket.flat, mean=self._takes_mean(bucket))
        self._under_way.append((bucket, pending, started))
        self._next = bucket.index + 1
        self.timings.calls += 1
        self.timings.nbytes += bucket.flat.nbytes

    def _takes_mean(self, bucket: Bucket) -> bool:
        return self._status is Status.EQUAL and bool(bucket.slots) and bucket.flat.dtype.is_floating_point

    # ------------------------------------------------------------------ finish

    def finish(self, failed: bool = False) -> None:
        """Close the backward: with a round if it synchronises.

        Args:
            failed: this rank raised in backward; it completes the round without a result.

        Raises:
            BackwardFailed: another rank raised; gradients are dropped on all ranks.
            SyncError: some ranks passed samples and others did not.
        """
        if not self._open:
            return
        self._open = False
        self._local = True
        if self._syncing:
            self.synchronise(failed)
        elif failed:
            self.drop()
        elif self.settled:
            for slot in self.slots:
                slot.used = slot.used or slot.fired > 0
                slot.param.grad = _visible_grad(slot) if slot.used else None

    def synchronise(self, failed: bool = False) -> None:
        """Run a round over what is in the buckets: all ranks take part, whatever they hold.

        Raises: as `finish`.
        """
        self._open = False
        self.timings = SyncTimings(
            calls=len(self._under_way), nbytes=sum(b.nbytes for b, _, _ in self._under_way)
        )
        ended = time.perf_counter()
        if self.wire.size == 1:
            page = self._alone(failed)
        else:
            if not self.settled:
                order = agree_order(self.wire, self.slots, self._order)
                self.buckets = build_buckets(
                    self.slots,
                    order,
                    self.plan,
                    self.wire.size,
                    flags=len(self._used_flags()),
                    sharded=self.sharded,
                    reduce_dtype=self.reduce_dtype,
                )
            page = self._exchange(failed)
        self.timings.exposed_seconds = time.perf_counter() - ended
        trace.add("exchange", ended, self.timings.exposed_seconds, step=self.step, calls=self.timings.calls)
        self._local = False
        self.step += 1
        self._conclude(page, failed)

    def _alone(self, failed: bool) -> ledger.Page:
        """Return the page of a world of one, where autograd's own gradients are the result."""
        used = [slot.param.grad is not None for slot in self.slots]
        status = Status.FAILED if failed else self._status
        return ledger.decode(ledger.encode(0, 1, self._samples, status, used), 1)

    def _exchange(self, failed: bool) -> ledger.Page:
        """Launch what is left, wait for everything, return the page."""
        last = self.buckets[-1]
        status = Status.FAILED if failed else self._status
        used, late = self._used_flags(), len(self._late)
        mine = ledger.encode(self.wire.rank, self.wire.size, self._samples, status, used, late)
        last.ledger.copy_(torch.tensor(mine, dtype=last.ledger.dtype))
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
            if not self.plan.overlap:
                self._wait()
        self._wait()
        self._next = 0
        summed = last.ledger.tolist()
        if self._takes_mean(last):
            summed = [value * self.wire.size for value in summed]
        page = ledger.decode(summed, self.wire.size)
        if page.late:
            self._reduce_late()
        return page

    def _used_flags(self) -> list[bool]:
        """Return for every parameter whether this rank has a gradient."""
        return [slot.used or slot.fired > 0 for slot in self.slots]

    def _wait(self) -> None:
        for _, pending, started in self._under_way:
            pending.wait()
            self.timings.call_seconds.append(time.perf_counter() - started)
        self._under_way.clear()

    def _reduce_late(self) -> None:
        """Reduce the gradients that came after their bucket had left; see [Note: late gradients]."""
        counts = torch.tensor(
            [[slot.fired, slot.index in self._late] for slot in self.slots],
            dtype=torch.int64,
            device=self.device,
        )
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.wire.group)
        for slot, (fired, late) in zip(self.slots, counts.tolist(), strict=True):
            slot.expected = max(slot.expected, fired)
            if late:
                grad = self._late.get(slot.index)
                grad = torch.zeros_like(slot.view) if grad is None else grad.contiguous()
                real = torch.view_as_real(grad) if grad.is_complex() else grad
                self.wire.all_reduce(real, mean=self._status is Status.EQUAL and not self.sharded).wait()
                slot.view.add_(grad)
        self._late.clear()

    # ------------------------------------------------------------------ conclude

    def _conclude(self, page: ledger.Page, failed: bool) -> None:
        """Turn the sums into means and attach them, or drop them all and say why."""
        if bad := page.ranks(Status.FAILED):
            self.drop()
            if not failed:
                raise BackwardFailed(
                    f"backward raised an exception on rank {', '.join(map(str, bad))}; no rank has a gradient",
                    rank=bad[0],
                    step=self.step,
                    remedy="see that rank's own error; training can go on with the next step",
                )
            return
        if (equal := page.ranks(Status.EQUAL)) and (weighted := page.ranks(Status.SAMPLES)):
            self.drop()
            raise SyncError(
                f"ranks {weighted} called model.backward(loss, samples=...) and ranks {equal} plain backward()",
                rank=self.wire.rank,
                step=self.step,
                remedy="use the same call on every rank",
            )
        self.total_samples = page.total
        if self._status is Status.SAMPLES and page.total == 0:
            self.drop()
            return
        self._scale(page)
        self._attach_result(page)
        self._reduced = True

    def _attach_result(self, page: ledger.Page) -> None:
        """Show the result as ``param.grad`` where any rank has a gradient."""
        for slot, used in zip(self.slots, page.used, strict=False):
            slot.used = used
            if self.settled:  # a sharded result is no whole gradient: better none than a wrong one
                slot.param.grad = _visible_grad(slot) if used and not self.sharded else None

    def _scale(self, page: ledger.Page) -> None:
        """Mend the weights where the total changed; finish the mean where the collective only summed."""
        factor = 1.0
        if self._status is Status.SAMPLES:
            factor, self._reference = self._reference / page.total, page.total
        elif self.sharded:
            factor = 1 / self.wire.size
        if factor == 1.0:
            return
        if not self.sharded:
            torch._foreach_mul_(self._storage(), factor)
            return
        for bucket in self.buckets:
            low, high = bucket.span(self.wire.rank, self.wire.size)
            bucket.flat[low:high].mul_(factor)

    def drop(self) -> None:
        """Forget all gradients, as zero_grad() does."""
        for slot in self.slots:
            slot.param.grad, slot.used, slot.fired = None, False, 0
        self._late.clear()
        self._local, self._reduced, self._samples = False, False, 0.0


def _visible_grad(slot: Slot) -> torch.Tensor:
    """Return what ``param.grad`` shows: the view, or its rounded copy where the bucket is more precise."""
    return slot.view.to(slot.param.dtype) if slot.staged else slot.view


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    """Return the post-accumulate hook of slot `index`; it keeps nothing alive."""

    def accumulated(_param: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.accumulated(index)

    return accumulated


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
