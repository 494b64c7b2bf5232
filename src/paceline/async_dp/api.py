"""`AsyncDataParallel`: asynchronous training beside an ordinary loop.

    with paceline.AsyncDataParallel(model, optim, hub="tcp://192.168.1.5:7000", every=20, delay=5) as star:
        for batch in loader:
            loss_of(model, batch).backward()
            optim.step(); optim.zero_grad()

It hooks onto the optimizer: every ``step()`` is a local step. The training thread copies parameters at every k-th step
and adds what came d steps later; a thread for each hub packs, sends, waits and unpacks. If the hub is absent, training
goes on alone, and what was learnt is sent when it is back.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from paceline.async_dp.comm_thread import CommThread
from paceline.async_dp.optimizer_step_hooks import StepHookTarget, after_step, before_step, put_back
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.async_worker import AsyncWorker, WorkerCounts
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.selection_policy import SelectionPolicy
from paceline.async_dp.worker.worker_resources import (
    check_hub_address,
    choose_settings,
    auto_fragments,
    reserved_cores,
    link_rate,
    bandwidth_limit,
)
from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.engine.optimizer_ownership import check_optimizer_owned
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule, layers_of
from paceline.profiling import trace_file
from paceline.transport.zmq import SocketSettings, WorkerExchange
from paceline.transport.zmq.curve_keys import WorkerKeys

__all__ = ["AsyncDataParallel"]

log = logging.getLogger("paceline.async_dp")

_STEP_SMOOTHING = 0.9
_LEAVE_SECONDS = 60.0


class AsyncDataParallel:
    """Trains asynchronously with others, through a hub, as long as a with-statement lasts.

    Args:
        model: a module, or a `DataParallel` of one rank; its device may be any.
        optimizer: of the model, whose steps are counted.
        hub: address of the hub, such as ``"tcp://192.168.1.5:7000"``; several for a hub in shards, in their order.
        every: k, local steps from one sending to the next; ``"auto"``: as what is measured allows.
        delay: d, local steps from sending to taking in, below k; ``"auto"``: as soon as the network manages.
        fragments: parts of the model that are sent in turn, the same for all workers; ``"auto"``: by its size.
        compression: of what is sent: bf16, fp16, int8 or int4 (a name or a `Compression`), None for float32, or
            ``"auto"``: int8 where there is room for it, else int4.
        warmup: local steps at the beginning in which it exchanges at every other step, as far as the network manages;
            good where the hub's outer optimizer has a momentum, which should not begin before it is over.
        send, receive: ``"all"``, ``"better"`` or ``"best"``, by score.
        score: returns how good the model's parameters are, lower is better: the loss on held-out data that all
            workers have. Called by the training thread, in evaluation mode, without gradients.
        bandwidth: most that may be sent, and as much received: ``"40MB/s"``, ``"30%"`` of the link as the kernel knows
            it, ``"30% of 200Mbit/s"``; None: all.
        cores: CPU cores kept free for traffic, the last of those that the process may use.
        key: file that ``paceline hub keygen`` made for workers; needed unless the hub is on this machine.
        insecure: do without a key; everybody on the way can read and change what is sent.
        run: name of the run, to be sure that it is this one; empty: whichever the hub serves.
        name: of this worker, for people; else its host and process.
        folder: for what is not acknowledged yet, so that a process that is killed and started again sends it.

    Attributes:
        counts: steps, what was sent, taken in, withheld. lr_scale: what the hub had this worker multiply its learning
            rate by. loss: may be set, for the hub's table. unscaled: see `StepHookTarget`.

    Raises:
        UsageError: a value is out of range, the key is missing or no key, model and optimizer don't belong together.
            While it is in use, from a step: the hub turned this worker away, and why, such as the first tensor that
            differs from the hub's model.

    Example:
        >>> with AsyncDataParallel(model, optim, hub="tcp://127.0.0.1:7000", every=20, delay=5):
        ...     train_some_steps()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        hub: str | Sequence[str],
        every: int | str = 20,
        delay: int | str = 5,
        *,
        fragments: int | str = 1,
        compression: str | Compression | None = "int4",
        warmup: int = 0,
        send: str = "all",
        receive: str = "all",
        score: Callable[[], float] | None = None,
        bandwidth: str | float | None = None,
        cores: int = 0,
        key: str | Path | None = None,
        insecure: bool = False,
        run: str = "",
        name: str = "",
        folder: str | Path | None = None,
    ) -> None:
        check_optimizer_owned(type(self).__name__, model, optimizer, wrapped=False)
        _check_alone(model)
        self._model, self._optimizer = model, optimizer
        self.module: nn.Module = model.module if isinstance(model, DataParallel) else model
        self.hubs = [hub] if isinstance(hub, str) else list(hub)
        layers = len(layers_of(self.module))
        if fragments == "auto":
            numel = sum(param.numel() for param in self.module.parameters())
            fragments = max(len(self.hubs), auto_fragments(numel, layers))
        self._auto = every == "auto" or delay == "auto"
        self._auto_codec = compression == "auto"
        cadence = SyncSchedule(20 if every == "auto" else every, fragments, 5 if delay == "auto" else delay)  # type: ignore[arg-type]
        self._fixed = (None if every == "auto" else every, None if delay == "auto" else delay)
        policy = SelectionPolicy(send, receive, scored=score is not None)
        policy.check(score is not None, cadence.fragments)
        _check_numbers(warmup, len(self.hubs), cadence.fragments)
        self._cores = reserved_cores(cores)
        self._compression = Compression.of("int4" if compression == "auto" else compression)
        self._layout = ParameterLayout.of(self.module, cadence.fragments, self._compression)
        self._key = WorkerKeys.read(key) if key is not None else None
        self._places = [check_hub_address(each, self._key is not None or insecure) for each in self.hubs]
        self._rate = bandwidth_limit(bandwidth, link_rate(*self._places[0]) if bandwidth else None)
        self._run, self._warmup, self._policy, self._cadence = run, warmup, policy, cadence
        self._score, self._folder = score, folder
        self._name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.loss: float | None = None
        self.unscaled: list[float] | None = None
        self._worker: AsyncWorker | None = None
        self._last: AsyncWorker | None = None  # of the block before
        self._talks: list[CommThread] = []
        self._hooks: list[Any] = []
        self._step_seconds, self._stepped_at = 0.0, 0.0
        self._affinity: set[int] | None = None

    # ------------------------------------------------------------------ the block

    def __enter__(self) -> Self:
        """Get in touch with the hub, in the background, and count steps from now on."""
        if self._worker is not None:
            raise UsageError("this Star is in use", remedy="leave its with-statement first")
        self._outboxes: list[Outbox] = []
        try:
            self._open_outboxes()
            self._begin()
        except BaseException:
            self._close()
            raise
        return self

    def _open_outboxes(self) -> None:
        """Open one for each hub: a letter is safe with the hub that acknowledged it."""
        for index in range(len(self.hubs)):
            folder = None if self._folder is None else Path(self._folder, f"hub{index}")
            number = self._outboxes[0].worker if self._outboxes and folder is None else None
            self._outboxes.append(Outbox(folder, number))

    def _begin(self) -> None:
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        sides = [
            FragmentReplica(fragment, tensors, UpdateCodec.with_compression(fragment, self._compression))
            for fragment in self._layout.fragments
        ]
        facts: dict[str, Any] = {"every": self._cadence.every, "delay": self._cadence.delay}
        if self._rate is not None:
            facts["rate"] = self._rate / len(self.hubs)
        spokes = [
            HubSession(
                outbox.worker,
                self._name,
                self._layout,
                {number: side for number, side in enumerate(sides) if number % len(self.hubs) == index},
                outbox,
                run=self._run,
                facts=facts,
                new_session=lambda: secrets.randbits(48) + 1,
            )
            for index, outbox in enumerate(self._outboxes)
        ]
        self._worker = AsyncWorker(
            sides,
            spokes,
            self._cadence,
            self._policy,
            score=self._scored if self._score is not None else None,
            forget=self._optimizer.state.clear,
            warmup=self._warmup,
        )
        if self._cores and hasattr(os, "sched_setaffinity"):
            self._affinity = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._affinity - self._cores)
        for spoke, address in zip(spokes, self.hubs, strict=True):
            share = None if self._rate is None else self._rate / len(self.hubs)
            exchange = WorkerExchange(address, spoke.me, keys=self._key, settings=SocketSettings(rate=share))
            self._talks.append(CommThread(spoke, exchange, rate=share, beat=self._beat, cores=self._cores))
        me: weakref.ref[StepHookTarget] = weakref.ref(self)
        self._stepped_at = time.monotonic()
        self._hooks = [
            self._optimizer.register_step_pre_hook(before_step(me)),
            self._optimizer.register_step_post_hook(after_step(me)),
        ]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what was learnt last and take the centre; after an exception, only leave."""
        try:
            if kind is None:
                self.finish()
        finally:
            self._close()

    def finish(self, seconds: float = _LEAVE_SECONDS) -> bool:
        """Send what was learnt since the last sending, and take the centre as it then is.

        Args:
            seconds: to wait at most. If the hub can't be reached the model keeps its own parameters, and what was not
                acknowledged stays in the folder.

        Returns:
            whether the model holds the centre now.
        """
        worker, deadline = self._in_use(), time.monotonic() + seconds
        if not worker.finish_begin(time.monotonic()):
            log.warning("%s was never in touch with a hub: it keeps its own parameters", self._name)
            return False
        while not worker.finish_end(time.monotonic()):
            for talk in self._talks:
                talk.wake()
            self._check()
            if time.monotonic() > deadline:
                log.warning(
                    "the hub did not answer for %.0f s: %s keeps its own parameters", seconds, self._name
                )
                return False
            time.sleep(0.005)
        return True

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        put_back(self, self._optimizer)
        for talk in self._talks:
            talk.close()
        for outbox in self._outboxes:
            outbox.close()
        if self._affinity is not None:
            os.sched_setaffinity(0, self._affinity)
        self._hooks, self._talks, self._affinity = [], [], None
        self._last, self._worker = self._worker, None

    # ------------------------------------------------------------------ local steps

    def step_taken(self) -> None:
        """Count a local step and do what is due; the optimizer's hook calls it."""
        worker, now = self._in_use(), time.monotonic()
        self._check()
        seconds, self._stepped_at = max(0.0, now - self._stepped_at), now
        first = self._step_seconds == 0.0
        self._step_seconds = (
            seconds if first else (_STEP_SMOOTHING * self._step_seconds + (1 - _STEP_SMOOTHING) * seconds)
        )
        sent, taken = worker.counts.sent, worker.counts.taken
        started = time.perf_counter()
        lr = float(self._optimizer.param_groups[0]["lr"])
        worker.step(self._samples(), lr, now, self._step_seconds)
        for talk in self._talks:
            if talk.spoke.orders:
                talk.wake()
        if worker.counts.sent > sent or worker.counts.taken > taken:
            kind = "send" if worker.counts.sent > sent else "merge"
            trace_file.add(kind, started, time.perf_counter() - started, step=worker.counts.steps)
        if self._auto and worker.counts.taken > taken:
            self._choose(worker)

    def _samples(self) -> float:
        if isinstance(self._model, DataParallel) and self._model.engine.weights.counted:
            return self._model.samples
        return 1.0

    def _choose(self, worker: AsyncWorker) -> None:
        """Set k, d and bits as the last exchange suggests."""
        patience = self._talks[0].spoke.patience
        if not patience.update_seconds:
            return
        codec = worker.sides[0].packing.codec.name
        found = choose_settings(self._step_seconds, patience.update_seconds, patience.fetch_seconds, codec)
        every, delay = self._fixed
        every = found.every if every is None else int(every)
        delay = min(every - 1, found.delay if delay is None else int(delay))
        every = max(every, self._cadence.fragments)
        worker.cadence = SyncSchedule(every, self._cadence.fragments, delay)
        if self._auto_codec and found.codec != codec:
            for side in worker.sides:
                side.next_codec = found.codec

    def _scored(self) -> float:
        assert self._score is not None
        training = self.module.training
        self.module.eval()
        try:
            return float(self._score())
        finally:
            self.module.train(training)

    def _check(self) -> None:
        """Raise what a conversation ended with."""
        for talk in self._talks:
            if talk.error is not None:
                raise talk.error
            if talk.spoke.terms.refusal:
                raise UsageError(
                    f"the hub at {talk.exchange.address} does not take this worker: {talk.spoke.terms.refusal}",
                    remedy="start all workers with the same model, settings and run",
                )

    def _beat(self) -> dict[str, Any]:
        worker = self._worker
        if worker is None:
            return {}
        counts, seconds = worker.counts, self._step_seconds
        told: dict[str, Any] = {
            "steps": counts.steps,
            "samples": counts.samples,
            "speed": 1 / seconds if seconds else 0.0,
            "every": worker.cadence.every,
            "delay": worker.cadence.delay,
        }
        return told if self.loss is None else {**told, "loss": float(self.loss)}

    def _in_use(self) -> AsyncWorker:
        if self._worker is None:
            raise UsageError("this Star is not in use", remedy="use it in a with-statement")
        return self._worker

    # ------------------------------------------------------------------ what can be known

    @property
    def counts(self) -> WorkerCounts:
        """What this worker did."""
        worker = self._worker or self._last
        return worker.counts if worker is not None else WorkerCounts()

    @property
    def lr_scale(self) -> float:
        """What the hub had this worker multiply its learning rate by; it is applied within every step."""
        return self._worker.lr_scale if self._worker is not None else 1.0

    @property
    def samples(self) -> float:
        """What the centre was learnt from, by all workers, as far as this one knows."""
        return max((talk.spoke.terms.samples for talk in self._talks), default=0.0)

    @property
    def cadence(self) -> SyncSchedule:
        """k, fragments and d as they are now."""
        return self._worker.cadence if self._worker is not None else self._cadence


def _check_alone(model: nn.Module) -> None:
    if isinstance(model, DataParallel) and model.comm.size > 1:
        raise UsageError(
            f"Star with a DataParallel of {model.wire.size} ranks",
            remedy="give each rank a group of its own (group=), or run one worker for each GPU",
        )


def _check_numbers(warmup: int, hubs: int, fragments: int) -> None:
    if type(warmup) is not int or warmup < 0:
        raise UsageError(f"warmup={warmup!r}", remedy="give a whole number of local steps, 0 or more")
    if hubs > fragments or not hubs:
        raise UsageError(
            f"{hubs} hubs for {fragments} fragments",
            remedy="give at least as many fragments as hubs, and one hub or more",
        )
