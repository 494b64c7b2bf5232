"""`AsyncDataParallel`: asynchronous data-parallel training over a hub, around an ordinary training loop.

    with paceline.AsyncDataParallel(model, optim, hub="tcp://192.168.1.5:7000", every=20, delay=5):
        for batch in loader:
            loss_of(model, batch).backward()
            optim.step(); optim.zero_grad()

It hooks into the optimizer: every ``step()`` is a local step. The training thread copies parameters at every k-th step
and applies the global parameters d steps later; one thread per hub packs, sends, waits and unpacks. Without a hub
training continues alone, and the update is sent when the hub is back.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from paceline.async_dp.comm_thread import CommThread
from paceline.async_dp.optimizer_step_hooks import StepHooks
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.async_worker import AsyncWorker, WorkerCounts
from paceline.async_dp.worker.auto_settings import auto_fragments, choose_settings
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.hub_access import HubAccess
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.async_dp.worker.worker_resources import (
    bandwidth_limit,
    link_rate,
    reserved_cores,
)
from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule, layers_of
from paceline.profiling import trace_file
from paceline.transport.zmq import SocketSettings, WorkerExchange

__all__ = ["AsyncDataParallel"]

log = logging.getLogger("paceline.async_dp")

_STEP_SMOOTHING = 0.9
_FINISH_SECONDS = 60.0


class AsyncDataParallel:
    """Trains with other workers through a hub, without waiting for them, for the length of a with-statement.

    Each worker sends its update after every k-th local step and applies the hub's global parameters d steps later,
    keeping its own steps since. A slow or absent worker delays no other.

    Args:
        model: a module on any device, or a `DataParallel` of one rank.
        optimizer: of the model; its steps are counted.
        hub: address of the hub, such as ``"tcp://192.168.1.5:7000"``, or its folder, where processes of the same user
            find address and key; several for a sharded hub, in their order.
        every: k, local steps between two updates; ``"auto"``: chosen from measured times.
        delay: d, local steps from sending an update to applying global parameters, below k; ``"auto"``: as soon as
            the network manages.
        fragments: parts of the model that are sent in turn, the same for all workers; ``"auto"``: by model size.
        compression: of updates: bf16, fp16, int8 or int4 (a name or a `Compression`), None for float32, or
            ``"auto"``: int8 where there is bandwidth for it, else int4.
        warmup: initial local steps during which it exchanges at every other step, as far as the network manages; good
            where the hub's outer optimizer has a momentum, which should not start before they are over.
        send: which updates are sent, by score: ``"all"``, ``"better"`` or ``"best"``.
        receive: which global parameters are applied, by score: ``"all"``, ``"better"`` or ``"best"``.
        score: returns the score of the model's parameters, lower is better: the loss on held-out data that all
            workers share. Called by the training thread, in evaluation mode, without gradients.
        bandwidth: limit in each direction: ``"40MB/s"``, ``"30%"`` of the link's rate according to the kernel,
            ``"30% of 200Mbit/s"``; None: no limit.
        cores: CPU cores reserved for communication, the last of those that the process may use.
        key: file made for workers by ``paceline hub keygen``; default: that in the hub's folder, else derived from
            ``PACELINE_JOB_KEY`` or ``PACELINE_JOB_KEY_FILE``.
        insecure: connect without a key; anybody who reaches the hub can read and change what is sent.
        run: name of the run that the hub must serve; empty: any.
        name: of this worker, for people; default: host and process.
        folder: stores updates that are not acknowledged yet, so that a process that is killed and restarted sends them.

    Attributes:
        counts: steps, and updates sent, applied or withheld.
        lr_scale: factor that the hub assigned to this worker's learning rate.
        loss: may be set, for the hub's table.

    Raises:
        UsageError: a value is out of range, the key is missing or invalid, or model and optimizer don't belong
            together. From a step, while in use: the hub refused this worker; the message has the reason, such as the
            first tensor that differs from the hub's model.

    Example:
        >>> with AsyncDataParallel(model, optim, hub="ipc:///run/hub/socket", every=20, delay=5):
        ...     train_some_steps()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        hub: str | Path | Sequence[str | Path],
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
        if isinstance(model, DataParallel) and model.comm.size > 1:
            raise UsageError(
                f"AsyncDataParallel with a DataParallel of {model.comm.size} ranks",
                remedy="give each rank its own group (group=), or run one worker per GPU",
            )
        self._model, self._optimizer = model, optimizer
        self.module: nn.Module = model.module if isinstance(model, DataParallel) else model
        self.hubs = [hub] if isinstance(hub, str | Path) else list(hub)
        if fragments == "auto":
            numel = sum(param.numel() for param in self.module.parameters())
            fragments = max(len(self.hubs), auto_fragments(numel, len(layers_of(self.module))))
        self._auto = every == "auto" or delay == "auto"
        self._auto_codec = compression == "auto"
        k, d = 20 if every == "auto" else every, 5 if delay == "auto" else delay
        self._schedule = SyncSchedule(k, fragments, d)  # type: ignore[arg-type] # checks the types
        self._fixed = (None if every == "auto" else every, None if delay == "auto" else delay)
        self._policy = SelectionPolicy(send, receive, scored=score is not None)
        self._policy.check(score is not None, self._schedule.fragments)
        _check_numbers(warmup, len(self.hubs), self._schedule.fragments)
        self._cores = reserved_cores(cores)
        self._compression = Compression.of("int4" if compression == "auto" else compression)
        self._layout = ParameterLayout.of(self.module, self._schedule.fragments, self._compression)
        self._accesses = [HubAccess.find(each, key, insecure) for each in self.hubs]
        first = self._accesses[0].parsed
        rate = bandwidth_limit(bandwidth, link_rate(first.host, first.port or 0) if bandwidth else None)
        self._hub_rate = None if rate is None else rate / len(self.hubs)
        self._run, self._warmup, self._score, self._folder = run, warmup, score, folder
        self._name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.loss: float | None = None
        self._worker: AsyncWorker | None = None
        self._last_worker: AsyncWorker | None = None  # of the previous with-statement
        self._outboxes: list[Outbox] = []
        self._comm_threads: list[CommThread] = []
        self._hooks: StepHooks | None = None
        self._step_seconds, self._stepped_at = 0.0, 0.0
        self._affinity: set[int] | None = None

    # ------------------------------------------------------------------ the with-statement

    def __enter__(self) -> Self:
        """Connect to the hub in the background, and count steps from now on."""
        if self._worker is not None:
            raise UsageError("this AsyncDataParallel is in use", remedy="leave its with-statement first")
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def _open(self) -> None:
        for index in range(len(self.hubs)):  # one outbox per hub, since each acknowledges its own updates
            folder = None if self._folder is None else Path(self._folder, f"hub{index}")
            number = self._outboxes[0].worker if self._outboxes and folder is None else None
            self._outboxes.append(Outbox(folder, number))
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        replicas = [
            FragmentReplica(fragment, tensors, UpdateCodec.with_compression(fragment, self._compression))
            for fragment in self._layout.fragments
        ]
        hello_meta: dict[str, Any] = {"every": self._schedule.every, "delay": self._schedule.delay}
        if self._hub_rate is not None:
            hello_meta["rate"] = self._hub_rate
        sessions = [
            HubSession(
                outbox.worker,
                self._name,
                self._layout,
                dict(list(enumerate(replicas))[index :: len(self.hubs)]),
                outbox,
                run=self._run,
                hello_meta=hello_meta,
                new_session_id=lambda: secrets.randbits(48) + 1,
            )
            for index, outbox in enumerate(self._outboxes)
        ]
        self._worker = AsyncWorker(
            replicas,
            sessions,
            self._schedule,
            self._policy,
            score=self._score_in_eval_mode if self._score is not None else None,
            reset_optimizer=self._optimizer.state.clear,
            warmup=self._warmup,
        )
        if self._cores and hasattr(os, "sched_setaffinity"):
            self._affinity = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._affinity - self._cores)
        rate, settings = self._hub_rate, SocketSettings(rate=self._hub_rate)
        for session, access in zip(sessions, self._accesses, strict=True):
            exchange = WorkerExchange(access.address, session.worker, keys=access.keys, settings=settings)
            self._comm_threads.append(
                CommThread(session, exchange, rate=rate, heartbeat=self._heartbeat, cores=self._cores)
            )
        self._stepped_at = time.monotonic()
        self._hooks = StepHooks(self._optimizer, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the last update and apply the global parameters; after an exception, only leave."""
        try:
            if kind is None:
                self.finish()
        finally:
            self._close()

    def finish(self, seconds: float = _FINISH_SECONDS) -> bool:
        """Send what was learnt since the last update, and apply the global parameters that result.

        Args:
            seconds: to wait at most. If the hub can't be reached the model keeps its own parameters, and the updates
                that were not acknowledged stay in the folder.

        Returns:
            whether the model holds the global parameters now.
        """
        worker, deadline = self._in_use(), time.monotonic() + seconds
        if not worker.begin_finish():
            log.warning("%s never reached a hub: it keeps its own parameters", self._name)
            return False
        while not worker.poll_finish(time.monotonic()):
            for thread in self._comm_threads:
                thread.wake()
            self._raise_errors()
            if time.monotonic() > deadline:
                log.warning(
                    "no answer from the hub for %.0f s: %s keeps its own parameters", seconds, self._name
                )
                return False
            time.sleep(0.005)
        return True

    def _close(self) -> None:
        if self._hooks is not None:
            self._hooks.remove(self._optimizer)
        for thread in self._comm_threads:
            thread.close()
        for outbox in self._outboxes:
            outbox.close()
        if self._affinity is not None:
            os.sched_setaffinity(0, self._affinity)
        self._hooks, self._comm_threads, self._outboxes, self._affinity = None, [], [], None
        self._last_worker, self._worker = self._worker, None

    # ------------------------------------------------------------------ local steps

    def step_taken(self) -> None:
        """Count a local step and do what is due; called by the optimizer's hook."""
        worker, now = self._in_use(), time.monotonic()
        self._raise_errors()
        seconds, self._stepped_at = max(0.0, now - self._stepped_at), now
        if self._step_seconds:
            seconds = _STEP_SMOOTHING * self._step_seconds + (1 - _STEP_SMOOTHING) * seconds
        self._step_seconds = seconds
        sent, taken = worker.counts.sent, worker.counts.taken
        started = time.perf_counter()
        lr = float(self._optimizer.param_groups[0]["lr"])
        worker.step(self._samples_of_step(), lr, now, self._step_seconds)
        for thread in self._comm_threads:
            if thread.session.requests:
                thread.wake()
        if worker.counts.sent > sent or worker.counts.taken > taken:
            kind = "send" if worker.counts.sent > sent else "merge"
            trace_file.add(kind, started, time.perf_counter() - started, step=worker.counts.steps)
        if self._auto and worker.counts.taken > taken:
            self._choose_settings(worker)

    def _samples_of_step(self) -> float:
        if isinstance(self._model, DataParallel) and self._model.engine.weights.counted:
            return self._model.samples
        return 1.0

    def _choose_settings(self, worker: AsyncWorker) -> None:
        """Set k, d and the codec from the last exchange."""
        measured = self._comm_threads[0].session.reply_timeout
        if not measured.update_seconds:
            return
        codec = worker.replicas[0].codec.codec.name
        chosen = choose_settings(self._step_seconds, measured.update_seconds, measured.fetch_seconds, codec)
        every, delay = self._fixed
        every = chosen.every if every is None else int(every)
        delay = min(every - 1, chosen.delay if delay is None else int(delay))
        every = max(every, self._schedule.fragments)
        worker.schedule = SyncSchedule(every, self._schedule.fragments, delay)
        if self._auto_codec and chosen.codec != codec:
            for replica in worker.replicas:
                replica.next_codec = chosen.codec

    def _score_in_eval_mode(self) -> float:
        assert self._score is not None
        training = self.module.training
        self.module.eval()
        try:
            return float(self._score())
        finally:
            self.module.train(training)

    def _raise_errors(self) -> None:
        for thread in self._comm_threads:
            if thread.error is not None:
                raise thread.error
            refusal = thread.session.hub_status.refusal
            if refusal:
                raise UsageError(
                    f"the hub at {thread.exchange.address} refused this worker: {refusal}",
                    remedy="start all workers with the same model, settings and run",
                )

    def _heartbeat(self) -> dict[str, Any]:
        worker = self._worker
        if worker is None:
            return {}
        values: dict[str, Any] = {
            "steps": worker.counts.steps,
            "samples": worker.counts.samples,
            "speed": 1 / self._step_seconds if self._step_seconds else 0.0,
            "every": worker.schedule.every,
            "delay": worker.schedule.delay,
        }
        return values if self.loss is None else {**values, "loss": float(self.loss)}

    def _in_use(self) -> AsyncWorker:
        if self._worker is None:
            raise UsageError("this AsyncDataParallel is not in use", remedy="use it in a with-statement")
        return self._worker

    # ------------------------------------------------------------------ state

    @property
    def counts(self) -> WorkerCounts:
        """Counters of this worker."""
        worker = self._worker or self._last_worker
        return worker.counts if worker is not None else WorkerCounts()

    @property
    def lr_scale(self) -> float:
        """Factor that the hub assigned to this worker's learning rate; applied within every step."""
        return self._worker.lr_scale if self._worker is not None else 1.0

    @property
    def samples(self) -> float:
        """Samples that the global parameters were trained on, by all workers, as far as this one knows."""
        return max((thread.session.hub_status.samples for thread in self._comm_threads), default=0.0)

    @property
    def cadence(self) -> SyncSchedule:
        """Current k, fragments and d."""
        return self._worker.schedule if self._worker is not None else self._schedule


def _check_numbers(warmup: int, hubs: int, fragments: int) -> None:
    if type(warmup) is not int or warmup < 0:
        raise UsageError(f"warmup={warmup!r}", remedy="give a whole number of local steps, 0 or more")
    if hubs > fragments or not hubs:
        raise UsageError(
            f"{hubs} hubs for {fragments} fragments",
            remedy="give at least as many fragments as hubs, and one hub or more",
        )
