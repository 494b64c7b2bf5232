"""The outer loop of training that synchronises parameters every H steps: it counts local steps, sends and merges.

It hooks onto the optimizer and wraps nothing: every ``optimizer.step()`` is a local step. What is exchanged when is
told in `staggering`, what one exchange does in `fragment`, and what becomes of its result in `outer`.

[Note: unequal numbers of steps] A rank that makes fewer steps than others comes to the end of the block earlier. It
then takes part in the synchronisations of those that still train, with the weight of what it had not sent yet and with
none after that, until all ranks have said that they are finished. Then each fragment is exchanged once more. So no
rank waits for one that has left, and the order of exchanges is the same on all ranks. What must be the same on all
depends on exchanges, not on a rank's own steps: the end of the warm-up; and in another block the cadence begins anew.
"""

from __future__ import annotations

import logging
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
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.engine.comm import Comm
from paceline.parallel.engine.module_sync import broadcast_tensors, model_signature
from paceline.parallel.engine.optimizer_ownership import check_optimizer_owned
from paceline.parallel.local_sgd.model_fragment import Arrival, ModelFragment
from paceline.parallel.local_sgd.outer_optimizers import Averaging, OuterOptimizer
from paceline.parallel.local_sgd.preconditions import check_numbers, check_synchronisable, engine_to_part
from paceline.parallel.local_sgd.state_averaging import average_state_before_next_step, cancel_state_averaging
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule, layers_of, split_into_fragments
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.profiling import trace_file
from paceline.world.object_collectives import verify_same

__all__ = ["OuterLoop"]

log = logging.getLogger("paceline.parallel")


class OuterLoop:
    """Local steps on every rank, and an exchange every so many of them, as long as a with-statement lasts.

    Args:
        model: `DataParallel`, or a bare module. A `DataParallel` over the same ranks keeps its gradients to each rank
            in the block; one over other ranks (those of a host, say) goes on synchronising among them.
        optimizer: the inner one, whose steps are counted.
        cadence: when fragments are sent and merged.
        outer: what becomes of the mean pseudo-gradient.
        warmup: local steps before which `outer` only averages.
        mix: α, the share of local parameters that a merge leaves, from 0 to below 1.
        compression: of pseudo-gradients; None: as they are.
        piece_mib: MiB of float32 that are compressed and sent together.
        group: the ranks, as a process group; None: all.

    Attributes:
        steps: local steps of this rank so far. syncs: fragments merged so far.
        rejected: how often which rank's pseudo-gradient was not finite.
        sent_nbytes: what this rank has sent so far, headers of the network aside.
        exposed_seconds: time in which this rank did nothing but wait for exchanges or complete them, so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        cadence: SyncSchedule,
        outer: OuterOptimizer,
        warmup: int = 0,
        mix: float = 0.0,
        compression: Compression | None = None,
        piece_mib: float = 8.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_numbers(warmup, mix, piece_mib)
        check_optimizer_owned(type(self).__name__, model, optimizer, wrapped=False)
        self.cadence, self.outer, self.warmup, self.mix = cadence, outer, warmup, mix
        self.compression = compression
        self.steps, self.syncs, self.sent_nbytes = 0, 0, 0
        self.exposed_seconds = 0.0
        self.rejected: dict[int, int] = {}
        self._model, self._optimizer = model, optimizer
        self._comm = Comm(group)
        self._engine = engine_to_part(model, self._comm)
        self.module = model.module if isinstance(model, DataParallel) else model
        self._agree(group)
        self._fragments = self._make_fragments(piece_mib)
        self._samples = [0.0] * cadence.fragments  # of this rank, since each fragment was sent
        self._lap = 0  # local steps in this block, and in those before it that were resumed
        self._next = 0  # the fragment that is sent next
        self._flying: deque[int] = deque()  # those that are under way, in the order in which they were sent
        self._hook: Any = None
        self._resumed = self._broken = False

    # ------------------------------------------------------------------ setting up

    def _agree(self, group: dist.ProcessGroup | None) -> None:
        """Check that all ranks ask for the same."""
        told = [
            f"{type(self).__name__}: {self.cadence}, {self.outer}, warmup={self.warmup}, mix={self.mix}",
            f"compression: {self.compression}",
            *model_signature(self.module, "its own"),
        ]
        verify_same(told, type(self).__name__, self._comm.group, remedy="pass the same on every rank")

    def _make_fragments(self, piece_mib: float) -> list[ModelFragment]:
        named = dict(self.module.named_parameters())
        compression = self.compression
        exempt = check_synchronisable(type(self).__name__, named, compression)
        parts = split_into_fragments(layers_of(self.module), self.cadence.fragments)
        buffers = [(name, each) for name, each in self.module.named_buffers() if each.is_floating_point()]
        device = next(iter(named.values())).device
        courier = ExchangeThread(device, on_stream=self._comm.orders_itself)
        return [
            ModelFragment(
                [(name, named[name]) for name in part],
                self._comm,
                courier,
                None if compression is None else compression.codec(rank=self._comm.rank),
                exempt=exempt,
                averaged=buffers if number == len(parts) - 1 else [],
                feedback=compression is not None and bool(compression.feedback),
                outer=self.outer,
                keeps_local=self.cadence.delay > 0,
                piece_numel=max(1, int(piece_mib * 2**20 / 4)),
            )
            for number, part in enumerate(parts)
        ]

    # ------------------------------------------------------------------ the block

    def __enter__(self) -> Self:
        """Begin to train apart, from parameters that are the same on all ranks."""
        name = type(self).__name__
        if self._hook is not None:
            raise UsageError(f"this {name} is in use", remedy="leave its with-statement first")
        if self._broken and not self._resumed:
            raise UsageError(
                f"this {name} was left by an exception, so parameters differ between ranks",
                remedy="load a checkpoint that has its state, or begin anew",
            )
        cancel_state_averaging(self._optimizer)
        if self._engine is not None:
            reference = self._engine.weights.reference if self._resumed else None
            self._engine.train_apart(True)
            if reference is not None:
                self._engine.weights.reference = reference
        if not self._resumed:
            self._begin_alike()
        self._resumed = False
        self._hook = self._optimizer.register_step_post_hook(_counting(weakref.ref(self)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Synchronise all parameters, unless an exception ends the block; from here on gradients are again."""
        self._hook.remove()
        self._hook = None
        self._broken = True
        try:
            if kind is None:
                self._finish()
                self._broken = False
        finally:
            if self._engine is not None:
                self._engine.train_apart(False)
                self._engine.parted = self._broken
        if self._engine is not None and not self._broken:
            average_state_before_next_step(self._optimizer, self._comm)

    def _begin_alike(self) -> None:
        """Give all ranks rank 0's parameters, where gradients have not kept them the same, and buffers; these are θ."""
        may_differ = self._engine is None or self._engine.parted
        params = self.module.parameters() if may_differ else ()
        broadcast_tensors(self._comm, [*params, *self.module.buffers()])
        for fragment in self._fragments:
            fragment.adopt()

    def step_taken(self) -> None:
        """Count a local step; merge and send what is due."""
        self.steps += 1
        samples = self._samples_of_step()
        self._samples = [before + samples for before in self._samples]
        self._lap += 1
        if self._flying and self._flying[0] == self.cadence.fragment_merged_at(self._lap):
            self._merge()
        due = self.cadence.fragment_sent_at(self._lap)
        if due is not None:
            self._send(due)
            if not self.cadence.delay:
                self._merge()

    def _samples_of_step(self) -> float:
        """Return what the latest step counts: its samples, where they were told."""
        if isinstance(self._model, DataParallel) and self._model.engine.weights.counted:
            return self._model.samples
        return 1.0

    def _send(self, number: int, *, finished: bool = False) -> None:
        fragment = self._fragments[number]
        weight, self._samples[number] = self._samples[number], 0.0
        started = time.perf_counter()
        if not fragment.send(weight, float(self._optimizer.param_groups[0]["lr"]), finished=finished):
            self._recover(fragment)
        self.sent_nbytes += fragment.sent_nbytes
        self._next = (number + 1) % self.cadence.fragments
        self._flying.append(number)
        trace_file.add("send", started, time.perf_counter() - started, step=self.steps, fragment=number)

    def _merge(self, *, finished: bool = False) -> Arrival:
        """Take in the fragment that was sent first of those under way, all of it if this rank is finished."""
        number = self._flying.popleft()
        started = time.perf_counter()
        step_state.enter_phase("exchange")
        with step_state.waiting_for_peers():
            last = self._fragments[number].arrive().finished
        self.exposed_seconds += time.perf_counter() - started
        turn = self.syncs - (self.cadence.fragments if last else 0)  # at the end: as the time before
        outer = (
            self.outer if self.cadence.send_step(turn) + self.cadence.delay >= self.warmup else Averaging()
        )
        mix = 0.0 if finished else self.mix
        arrival = self._fragments[number].merge(outer, mix)
        step_state.enter_phase("outside")
        trace_file.add("merge", started, time.perf_counter() - started, step=self.steps, fragment=number)
        self.syncs += 1
        for rank in arrival.rejected:
            self.rejected[rank] = self.rejected.get(rank, 0) + 1
        if arrival.rejected and self._comm.rank == 0:
            ranks = ", ".join(map(str, arrival.rejected))
            log.warning(
                "step %d: the pseudo-gradient of rank %s is NaN or infinite, and was left out",
                self.steps,
                ranks,
            )
        return arrival

    def _recover(self, fragment: ModelFragment) -> None:
        """Say what of this rank is not finite, and forget the state that the optimizer has made of it."""
        bad = [name for name, param in fragment.params if not torch.isfinite(param).all()]
        log.warning(
            "rank %d, step %d: %s is NaN or infinite; this rank takes the other ranks' parameters",
            self._comm.rank,
            self.steps,
            ", ".join(map(repr, bad[:3])) + (", …" if len(bad) > 3 else ""),
        )
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.forget_state()
        for _, param in fragment.params:
            self._optimizer.state.pop(param, None)

    def _finish(self) -> None:
        """Take part until all ranks are finished; see [Note: unequal numbers of steps]."""
        while self._flying:
            self._merge()
        agreed = 0
        while agreed < self.cadence.fragments:
            self._send(self._next, finished=True)
            agreed = agreed + 1 if self._merge(finished=True).finished else 0
        self._lap = self._next = 0

    @property
    def round_nbytes(self) -> int:
        """What this rank sends while every fragment is synchronised once, headers of the network aside."""
        return sum(fragment.sent_nbytes for fragment in self._fragments)

    # ------------------------------------------------------------------ what all ranks share

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Have the model hold what all ranks share in this block: the parameters of the latest synchronisation.

        That is what to evaluate and to export: between two synchronisations each rank's own are different ones.
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
        """Return the parameters that all ranks share, by name, in the precision in which they are kept."""
        return {name: part for fragment in self._fragments for name, part in fragment.shared().items()}

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what is the same on all ranks: θ, the outer momentum, where the cycle stands."""
        return {
            "steps": self.steps,
            "lap": self._lap,
            "syncs": self.syncs,
            "next": self._next,
            "flying": list(self._flying),
            "fragments": [fragment.state() for fragment in self._fragments],
        }

    def rank_state_dict(self) -> dict[str, Any]:
        """Return what this rank alone has: its own parameters and its inner optimizer's state, among others."""
        return {
            "steps": self.steps,
            "lap": self._lap,
            "samples": list(self._samples),
            "reference": self._engine.weights.reference if self._engine is not None else 1.0,
            "optimizer": self._optimizer.state_dict(),
            "fragments": [fragment.rank_state() for fragment in self._fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Go on from a state.

        Args:
            state: what `state_dict` returned.
            own: what `rank_state_dict` returned on this rank. None: the number of ranks has changed; then every rank
                begins from θ, with what its optimizer has, and local steps since the latest synchronisation are lost.

        Raises:
            UsageError: it is of other fragments.
        """
        here_are = [sorted(fragment.by_name(fragment.theta)) for fragment in self._fragments]
        were = [sorted(fragment["theta"]) for fragment in state["fragments"]]
        if here_are != were:
            raise UsageError(
                f"the state has {len(were)} fragments, this {type(self).__name__} {len(here_are)}, or other parameters",
                remedy="build the same model, and give as many fragments as the run that wrote the state",
            )
        for number, fragment in enumerate(self._fragments):
            fragment.load(state["fragments"][number], None if own is None else own["fragments"][number])
        self.syncs, self._next = state["syncs"], state["next"]
        self._flying = deque(state["flying"])
        counts = state if own is None else own
        self.steps, self._lap = counts["steps"], counts["lap"]
        self._samples = [0.0] * self.cadence.fragments if own is None else list(own["samples"])
        if own is not None:
            self._optimizer.load_state_dict(own["optimizer"])
            if self._engine is not None:
                self._engine.weights.reference = own["reference"]
        self._resumed = True


def _counting(loop: weakref.ref[OuterLoop]) -> Any:
    """Return the hook that counts the steps of an optimizer; it keeps nothing alive."""

    def count(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive = loop()
        if alive is not None:
            alive.step_taken()

    return count
