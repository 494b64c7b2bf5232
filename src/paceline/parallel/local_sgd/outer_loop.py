"""Outer loop of training that synchronises parameters every H steps: counts local steps, sends and merges fragments.

It hooks onto the optimizer and wraps nothing: every ``optimizer.step()`` is a local step. `sync_schedule` decides what
is exchanged when, `model_fragment` does one exchange, and `outer_optimizers` apply its result.

[Note: unequal numbers of steps] A rank that makes fewer steps than others reaches the end of the block earlier. It then
takes part in the synchronisations of those that still train, first with the weight of what it had not sent yet, then
with weight 0, until all ranks have announced that they are finished. Then each fragment is exchanged once more. So no
rank waits for one that has left, and the order of exchanges is the same on all ranks. What must be the same everywhere
depends on exchanges, not on a rank's own steps: the end of the warm-up; and each block starts the schedule anew.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline._core.step_state import step_state
from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.parallel.engine.model_checks import model_signature
from paceline.parallel.gradient_collectives import Comm, broadcast_tensors
from paceline.parallel.local_sgd.merge_results import MergeResults
from paceline.parallel.local_sgd.model_fragment import ModelFragment
from paceline.parallel.local_sgd.optimizer_state_averaging import (
    average_state_before_next_step,
    cancel_state_averaging,
)
from paceline.parallel.local_sgd.outer_optimizers import Averaging, OuterOptimizer
from paceline.parallel.local_sgd.sync_result import SyncResult
from paceline.parallel.local_sgd.sync_schedule import (
    SyncSchedule,
    check_synchronisable,
    layers_of,
    split_into_fragments,
)
from paceline.parallel.local_sgd.synchronised_model import (
    find_change,
    local_engine,
    refuse_changes,
)
from paceline.profiling import trace_file
from paceline.world.accelerator import has_streams
from paceline.world.control_collectives import verify_same

__all__ = ["OuterLoop"]


class OuterLoop:
    """Trains locally on every rank, with an exchange every so many steps, inside a with-statement.

    Args:
        model: `DataParallel`, or a bare module. In the block, a `DataParallel` over the same ranks synchronises no
            gradients; one over other ranks (those of a host, say) continues to synchronise among them.
        optimizer: the inner one, whose steps are counted.
        schedule: when fragments are sent and merged.
        outer: applies the mean pseudo-gradient.
        warmup: local steps before which parameters are averaged instead.
        mix: α, the share of local parameters that a merge keeps, from 0 to 1.
        keep_local_steps: keep what was learnt between sending and merging (the delta rule).
        compression: of pseudo-gradients; None: uncompressed.
        piece_mib: MiB of float32 that are compressed and sent together.
        group: the ranks, as a process group; None: all.

    Attributes:
        steps: local steps of this rank so far.
        syncs: fragments merged so far.
        sent_nbytes: bytes this rank has sent so far, network headers excluded.
        exposed_seconds: time so far in which this rank only waited for exchanges.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: SyncSchedule,
        outer: OuterOptimizer,
        warmup: int = 0,
        mix: float = 0.0,
        keep_local_steps: bool = False,
        compression: str | Compression | None = None,
        piece_mib: float = 8.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        name = type(self).__name__
        if type(warmup) is not int or warmup < 0:
            raise UsageError(f"warmup={warmup!r}", remedy="give a number of local steps, 0 or more")
        if not isinstance(mix, int | float) or isinstance(mix, bool) or not 0 <= mix <= 1:
            raise UsageError(
                f"mix={mix!r}",
                remedy="give the share of its own parameters that a rank keeps: a number from 0 to 1",
            )
        if not isinstance(piece_mib, int | float) or not piece_mib > 0:
            raise UsageError(f"piece_mib={piece_mib!r}", remedy="give MiB above 0, such as 8")
        check_optimizer_owned(name, model, optimizer, wrapped=False)
        self.schedule, self.outer, self.warmup, self.mix = schedule, outer, warmup, mix
        self.keep_local_steps = keep_local_steps and schedule.delay > 0
        self.compression = Compression.of(compression)
        self.steps, self.syncs, self.sent_nbytes = 0, 0, 0
        self.exposed_seconds = 0.0
        self._model, self._optimizer = model, optimizer
        self._comm = Comm(group)
        self._engine = local_engine(model, self._comm)
        self.module = model.module if isinstance(model, DataParallel) else model
        settings = [
            f"{name}: {schedule}, {outer}, {warmup=}, {mix=}, {keep_local_steps=}",
            f"compression: {self.compression}",
            *model_signature(self.module, "its own"),
        ]
        verify_same(settings, name, self._comm.group, remedy="pass the same on every rank")
        self._fragments = self._make_fragments(piece_mib)
        self._results = MergeResults(name, self._comm, optimizer, self._fragments)
        self._refuse_changes()
        # Of this rank, since each fragment was sent; on its device while a GradScaler decides which count.
        self._samples: list[float | Tensor] = [0.0] * schedule.fragments
        self._block_steps = 0  # local steps in this block, and before it if it was resumed
        self._next = schedule.first_sent  # the fragment to send next
        # Fragments being synchronised, in the order in which they were sent.
        self._pending: deque[int] = deque()
        self._hook: Any = None
        self._resumed = self._broken = False

    def _make_fragments(self, piece_mib: float) -> list[ModelFragment]:
        named = dict(self.module.named_parameters())
        compression = self.compression
        exempt = check_synchronisable(type(self).__name__, named, compression)
        parts = split_into_fragments(layers_of(self.module), self.schedule.fragments)
        buffers = [(name, each) for name, each in self.module.named_buffers() if each.is_floating_point()]
        device = next(iter(named.values())).device
        exchange_thread = ExchangeThread(device, on_stream=self._comm.stream_ordered and has_streams(device))
        return [
            ModelFragment(
                [(name, named[name]) for name in part],
                self._comm,
                exchange_thread,
                None if compression is None else compression.codec(rank=self._comm.rank),
                exempt=exempt,
                averaged=buffers if number == len(parts) - 1 else [],
                feedback=compression is not None and bool(compression.feedback),
                decay=1.0 if compression is None else compression.feedback_decay,
                outer=self.outer,
                delta_rule=self.keep_local_steps,
                piece_numel=max(1, int(piece_mib * 2**20 / 4)),
            )
            for number, part in enumerate(parts)
        ]

    def _refuse_changes(self) -> None:
        change = find_change(self.module, self._optimizer, self._fragments)
        refuse_changes(type(self).__name__, change, self._comm)

    # ------------------------------------------------------------------ the block

    def __enter__(self) -> Self:
        """Start local training from parameters that are the same on all ranks."""
        name = type(self).__name__
        if self._hook is not None:
            raise UsageError(f"this {name} is in use", remedy="leave its with-statement first")
        if self._broken and not self._resumed:
            raise UsageError(
                f"this {name} was left by an exception, so parameters differ between ranks",
                remedy="load a checkpoint with its state, or create a new one",
            )
        self._refuse_changes()
        cancel_state_averaging(self._optimizer)
        if self._engine is not None:
            reference = self._engine.weights.reference if self._resumed else None
            self._engine.set_local_only(True)
            if reference is not None:
                self._engine.weights.reference = reference
        if not self._resumed:
            # Gradients keep parameters equal, unless there is no engine or an earlier block was broken off.
            may_differ = self._engine is None or self._engine.replicas_differ
            params = self.module.parameters() if may_differ else ()
            broadcast_tensors(self._comm, [*params, *self.module.buffers()])
            for fragment in self._fragments:
                fragment.reset_shared()
        self._resumed = False
        self._results.forget_unread()
        self._hook = self._optimizer.register_step_post_hook(_step_hook(weakref.ref(self)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Synchronise all parameters, unless an exception ends the block; then return to synchronous gradients."""
        self._hook.remove()
        self._hook = None
        self._broken = True
        try:
            if kind is None:
                self._finish()
                self._broken = False
        finally:
            if self._engine is not None:
                self._engine.set_local_only(False)
                self._engine.replicas_differ = self._broken
        if self._engine is not None and not self._broken:
            average_state_before_next_step(self._optimizer, self._comm)

    def on_step(self) -> None:
        """Count a local step; merge and send what is due."""
        self.steps += 1
        counted = isinstance(self._model, DataParallel) and self._model.engine.weights.counted
        samples = self._model.samples if isinstance(self._model, DataParallel) and counted else 1.0
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None:
            # Set by a GradScaler whose optimizer itself skips the update; on an accelerator it stays there.
            samples = (found_inf == 0) * samples
        self._samples = [before + samples for before in self._samples]
        self._block_steps += 1
        self._read_results()
        if self._pending and self._pending[0] == self.schedule.fragment_due_at(self._block_steps):
            self._merge()
        sent = self.schedule.fragment_sent_at(self._block_steps)
        if sent is not None:
            # It is pending still if the run was resumed with another schedule.
            while sent in self._pending:
                self._merge()
            self._send(sent)
            if not self.schedule.delay:
                self._merge()

    def _send(self, number: int, *, finished: bool = False) -> None:
        fragment = self._fragments[number]
        weight, self._samples[number] = self._samples[number], 0.0
        started = time.perf_counter()
        change = find_change(self.module, self._optimizer, self._fragments)
        if finished and not self._block_steps and not change and fragment.has_moved:
            change = "the parameters have changed, but the optimizer made no step; is another one in use?"
        self._results.change = change
        lr = self._optimizer.param_groups[0]["lr"]
        fragment.send(weight, lr, finished=finished, changed=bool(change))
        self.sent_nbytes += fragment.sent_nbytes
        self._next = (number + 1) % self.schedule.fragments
        self._pending.append(number)
        trace_file.add("send", started, time.perf_counter() - started, step=self.steps, fragment=number)

    def _merge(self, *, read: bool = False, finished: bool = False) -> SyncResult | None:
        """Merge the pending fragment that was sent first.

        Args:
            read: return the result, for which the host waits. Otherwise it may be None: it is read after the next step.
            finished: this rank is finished, so merge without any local share.
        """
        number = self._pending.popleft()
        fragment = self._fragments[number]
        started = time.perf_counter()
        step_state.enter_phase("exchange")
        with step_state.waiting_for_peers():
            result = fragment.wait(read=read)
        self.exposed_seconds += time.perf_counter() - started
        if result is not None:
            self._results.raise_if_changed(result, self.steps)
        # At the end it is as the time before. A result that is not known is not the end.
        turn = self.syncs - (self.schedule.fragments if result is not None and result.finished else 0)
        warm = self.schedule.merge_step(turn) >= self.warmup
        fragment.merge(self.outer if warm else Averaging(), 0.0 if finished else self.mix)
        # Steps since the send count in the next one as far as they are kept.
        self._samples[number] *= 1.0 if self.keep_local_steps else self.mix
        step_state.enter_phase("outside")
        trace_file.add("merge", started, time.perf_counter() - started, step=self.steps, fragment=number)
        self.syncs += 1
        if result is None:
            self._results.read_later(number, self.steps)
        elif self._results.note(result, number, self.steps):
            self._samples[number] = 0.0
        return result

    def _read_results(self) -> None:
        """Read what earlier merges on an accelerator brought; see [Note: results of an accelerator]."""
        for number in self._results.read():
            self._samples[number] = 0.0

    def _finish(self) -> None:
        """Take part until all ranks are finished; see [Note: unequal numbers of steps]."""
        self._read_results()
        while self._pending:
            self._merge(read=True)
        agreed = 0
        while agreed < self.schedule.fragments:
            self._send(self._next, finished=True)
            result = self._merge(read=True, finished=True)
            agreed = agreed + 1 if result is not None and result.finished else 0
        self._block_steps, self._next = 0, self.schedule.first_sent

    @property
    def rejected(self) -> dict[int, int]:
        """Per rank, how often its pseudo-gradient was not finite."""
        return self._results.rejected

    @property
    def round_nbytes(self) -> int:
        """Bytes this rank sends to synchronise every fragment once, network headers excluded."""
        return sum(fragment.sent_nbytes for fragment in self._fragments)

    # ------------------------------------------------------------------ shared parameters

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Let the model hold the shared parameters, those of the latest synchronisation, in this block.

        Evaluate and export these: between two synchronisations the parameters of the ranks differ.
        """
        params = dict(self.module.named_parameters())
        before = {name: param.detach().clone() for name, param in params.items()}
        try:
            with torch.no_grad():
                for name, theta in self.shared().items():
                    params[name].copy_(theta)
            yield
        finally:
            with torch.no_grad():
                for name, param in params.items():
                    param.copy_(before[name])

    def shared(self) -> dict[str, Tensor]:
        """Return the shared parameters by name, in the precision in which they are kept."""
        return {name: part for fragment in self._fragments for name, part in fragment.shared().items()}

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what is the same on all ranks: θ, the outer momentum, the position in the schedule."""
        return {
            "steps": self.steps,
            "lap": self._block_steps,
            "syncs": self.syncs,
            "next": self._next,
            "flying": list(self._pending),
            "fragments": [fragment.state() for fragment in self._fragments],
        }

    def rank_state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: its parameters and its inner optimizer's state, among others."""
        self._read_results()
        return {
            "steps": self.steps,
            "lap": self._block_steps,
            "samples": [float(each) for each in self._samples],
            "reference": self._engine.weights.reference if self._engine is not None else 1.0,
            "optimizer": self._optimizer.state_dict(),
            "fragments": [fragment.rank_state() for fragment in self._fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Load a state.

        Args:
            state: returned by `state_dict`.
            own: returned by `rank_state_dict` on this rank. None: the number of ranks has changed; then every rank
                starts from θ and its optimizer's present state, and local steps since the latest synchronisation are
                lost.

        Raises:
            UsageError: it has other fragments.
        """
        mine = [sorted(fragment.by_name(fragment.theta)) for fragment in self._fragments]
        saved = [sorted(fragment["theta"]) for fragment in state["fragments"]]
        if mine != saved:
            raise UsageError(
                f"the state has {len(saved)} fragments, this {type(self).__name__} {len(mine)}, or other parameters",
                remedy="build the same model, with as many fragments as in the run that wrote the state",
            )
        for number, fragment in enumerate(self._fragments):
            fragment.load(state["fragments"][number], None if own is None else own["fragments"][number])
        self.syncs, self._next = state["syncs"], state["next"]
        self._pending = deque(state["flying"])
        counts = state if own is None else own
        self.steps, self._block_steps = counts["steps"], counts["lap"]
        self._samples = [0.0] * self.schedule.fragments if own is None else list(own["samples"])
        if own is not None:
            self._optimizer.load_state_dict(own["optimizer"])
            if self._engine is not None:
                self._engine.weights.reference = own["reference"]
        self._resumed = True


def _step_hook(loop: weakref.ref[OuterLoop]) -> Any:
    """Return an optimizer hook that counts its steps; it keeps nothing alive."""

    def count(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive = loop()
        if alive is not None:
            alive.on_step()

    return count
