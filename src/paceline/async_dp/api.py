"""`AsyncDataParallel`: asynchronous data-parallel training over a hub, around an ordinary training loop.

    with paceline.AsyncDataParallel(model, optim, hub="tcp://192.168.1.5:7000", every=20, delay=5):
        for batch in loader:
            loss_of(model, batch).backward()
            optim.step(); optim.zero_grad()

It hooks into the optimizer: every ``step()`` is a local step. The training thread copies parameters at every k-th step
and applies the global parameters d steps later; one thread per hub packs, sends, waits and unpacks. Without a hub
training continues alone, and the update is sent when the hub is back.

A worker may be a `DataParallel` of several ranks: rank 0 alone talks to the hub, see `worker/rank_group.py`.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from paceline.async_dp.hub_client import HubClient, WorkerSettings
from paceline.async_dp.optimizer_step_hooks import StepHooks
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.worker.async_worker import WorkerCounts
from paceline.async_dp.worker.auto_settings import auto_fragments
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.group_tensors import GroupTensors
from paceline.async_dp.worker.hub_access import HubAccess
from paceline.async_dp.worker.rank_group import GroupReplica, RankGroup, WorkerState
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.async_dp.worker.worker_resources import (
    bandwidth_limit,
    link_rate,
    reserved_cores,
)
from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.parallel.ddp import DistributedDataParallel
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule, layers_of
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.world.control_collectives import verify_same

__all__ = ["AsyncDataParallel"]

_FINISH_SECONDS = 60.0
_MAX_DOUBLINGS = 16


class AsyncDataParallel:
    """Trains with other workers through a hub, without waiting for them, for the length of a with-statement.

    Each worker sends its update after every k-th local step and applies the hub's global parameters d steps later,
    keeping its own steps since. A slow or absent worker delays no other.

    A worker is one process, or the ranks of a `DataParallel` (the GPUs of a host, say), with one number and one folder.
    Then all ranks make this object and run the same loop. Rank 0 alone talks to the hub and decides; the others do the
    same in the same step, so replicas stay equal to the bit. Ranks communicate about it only after steps at which
    something may be due: one broadcast of 512 bytes where an update is sent, and the parameters where they are applied
    (``worker/rank_group.py`` has the reasons). Samples are those of all ranks, a score is the mean of all ranks'
    scores, and running statistics (BatchNorm) are rank 0's: it sends its own, and where global parameters are applied,
    all ranks take the same. Everything that is raised is raised on all ranks.

    Args:
        model: a module on any device, or a `DataParallel` with any strategy.
        optimizer: of the model; its steps are counted.
        hub: address of the hub, such as ``"tcp://192.168.1.5:7000"`` (with a standby, which takes over:
            ``"tcp://192.168.1.5:7000|tcp://192.168.1.6:7000"``), or its folder, where processes of the same user
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
            workers share. Called by the training thread, in evaluation mode, without gradients; of several ranks on
            all at the same time, so each may use its part of the data.
        bandwidth: limit in each direction: ``"40MB/s"``, ``"30%"`` of the link's rate according to the kernel,
            ``"30% of 200Mbit/s"``; None: no limit.
        cores: CPU cores reserved for communication, the last of those that the process (rank 0's) may use.
        key: file made for workers by ``paceline hub keygen``; default: that in the hub's folder, else derived from
            ``PACELINE_JOB_KEY`` or ``PACELINE_JOB_KEY_FILE``. Only rank 0 reads it, and opens `folder`.
        insecure: connect without a key; anybody who reaches the hub can read and change what is sent.
        run: name of the run that the hub must serve; empty: any.
        name: of this worker, for people; default: host and process.
        folder: stores updates that are not acknowledged yet, so that a process that is killed and restarted sends them.

    Attributes:
        counts: steps, and updates sent, applied or withheld.
        lr_scale: factor that the hub assigned to this worker's learning rate.
        loss: may be set, for the hub's table; of several ranks rank 0's is reported.

    Raises:
        UsageError: a value is out of range, the key is missing or invalid, or model and optimizer don't belong
            together. From a step, while in use: the hub refused this worker; the message has the reason, such as the
            first tensor that differs from the hub's model.
        MismatchError: ranks of the `DataParallel` have different arguments.

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
        self._wrapped = model if isinstance(model, DataParallel | DistributedDataParallel) else None
        self._optimizer = optimizer
        self.module: nn.Module = model if self._wrapped is None else self._wrapped.module
        self.hubs = [hub] if isinstance(hub, str | Path) else list(hub)
        self.loss: float | None = None
        if fragments == "auto":
            numel = sum(param.numel() for param in self.module.parameters())
            fragments = max(len(self.hubs), auto_fragments(numel, len(layers_of(self.module))))
        k, d = 20 if every == "auto" else every, 5 if delay == "auto" else delay
        schedule = SyncSchedule(k, fragments, d)  # type: ignore[arg-type] # checks the types
        policy = SelectionPolicy(send, receive, scored=score is not None)
        policy.check(score is not None, schedule.fragments)
        _check_numbers(warmup, len(self.hubs), schedule.fragments)
        self._settings = WorkerSettings(
            hubs=self.hubs,
            schedule=schedule,
            every=None if every == "auto" else schedule.every,
            delay=None if delay == "auto" else schedule.delay,
            policy=policy,
            warmup=warmup,
            compression=Compression.of("int4" if compression == "auto" else compression),
            choose_codec=compression == "auto",
            run=run,
            name=name or f"{socket.gethostname()}-{os.getpid()}",
            folder=folder,
        )
        sharded = isinstance(model, DataParallel) and model.plan.shard == "parameters"
        self._layout = ParameterLayout.of(
            self.module, schedule.fragments, self._settings.compression, sharded=sharded
        )
        self._score = score
        self._client: HubClient | None = None
        self._in_use = False
        self._steps, self._samples = 0, 0.0  # since the last meeting
        self._state = WorkerState(every=schedule.every, delay=schedule.delay)
        self._overdue = 0  # consecutive meetings at which an answer of the hub was overdue
        self._finished_at = -1  # step
        self._hooks: StepHooks | None = None
        self._group: RankGroup | None = None
        if self._wrapped is not None and self._wrapped.comm.size > 1:
            self._group = self._group_of(self._wrapped)
        self._meet(lambda: self._set_resources(key, insecure, bandwidth, cores))

    def _group_of(self, model: DataParallel | DistributedDataParallel) -> RankGroup:
        settings = dataclasses.replace(self._settings, name="", folder=None)
        facts = [f"{field.name}={getattr(settings, field.name)}" for field in dataclasses.fields(settings)]
        facts += [f"layout {self._layout.hash}", f"score: {'yes' if self._score else 'no'}"]
        verify_same(facts, type(self).__name__, model.comm.group)
        return RankGroup(
            model.comm,
            GroupTensors(model.comm, self.module, self._layout.fragments),
            score=self._score_in_eval_mode,
            reset_optimizer=self._reset_optimizer,
        )

    def _set_resources(
        self, key: str | Path | None, insecure: bool, bandwidth: str | float | None, cores: int
    ) -> None:
        """Check and store what depends on this machine."""
        settings = self._settings
        settings.cores = frozenset(reserved_cores(cores))
        settings.accesses = [HubAccess.find(each, key, insecure) for each in self.hubs]
        first = settings.accesses[0].parsed
        rate = bandwidth_limit(bandwidth, link_rate(first.host, first.port or 0) if bandwidth else None)
        settings.rate = None if rate is None else rate / len(self.hubs)

    # ------------------------------------------------------------------ the with-statement

    def __enter__(self) -> Self:
        """Connect to the hub in the background, and count steps from now on."""
        if self._in_use:
            raise UsageError("this AsyncDataParallel is in use", remedy="leave its with-statement first")
        schedule = self._settings.schedule
        self._state = WorkerState(every=schedule.every, delay=schedule.delay)
        self._steps, self._samples, self._finished_at, self._overdue = 0, 0.0, -1, 0
        self._meet(self._open)
        self._in_use = True
        self._hooks = StepHooks(self._optimizer, self)
        return self

    def _open(self) -> None:
        fragments, group = self._layout.fragments, self._group
        codecs = [UpdateCodec.with_compression(each, self._settings.compression) for each in fragments]
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        replicas = [
            FragmentReplica(fragment, tensors, codec)
            if group is None
            else GroupReplica(number, group, fragment, codec)
            for number, (fragment, codec) in enumerate(zip(fragments, codecs, strict=True))
        ]
        score = self._score_in_eval_mode if group is None else group.score
        self._client = HubClient(
            self._settings,
            self._layout,
            replicas,
            score=None if self._score is None else score,
            reset_optimizer=self._reset_optimizer if group is None else group.reset_optimizer,
            heartbeat=self._heartbeat,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the last update and apply the global parameters; after an exception, only leave."""
        try:
            if kind is None and self._finished_at != self.counts.steps:
                self.finish()
        finally:
            if self._hooks is not None:
                self._hooks.remove(self._optimizer)
            if self._client is not None:
                self._updated_state()
                self._client.close()
            self._hooks, self._client, self._in_use = None, None, False

    def finish(self, seconds: float = _FINISH_SECONDS) -> bool:
        """Send what was learnt since the last update, and apply the global parameters that result.

        All ranks of the worker call this.

        Args:
            seconds: to wait at most, for the answer of the hub or for a hub that was never reached. If there is none
                the model keeps its own parameters, and the updates that were not acknowledged stay in the folder.

        Returns:
            whether the model holds the global parameters now.
        """
        self._check_in_use()
        self._meet(lambda: self._lead_finish(seconds))
        self._finished_at = self.counts.steps
        return self._state.finished

    def _lead_finish(self, seconds: float) -> None:
        assert self._client is not None
        self._lead_step()
        keep_waiting = self._group.keep_waiting if self._group is not None else lambda: None
        self._state.finished = self._client.finish(seconds, keep_waiting)

    # ------------------------------------------------------------------ local steps

    def step_taken(self) -> None:
        """Count a local step and do what is due; called by the optimizer's hook."""
        self._check_in_use()
        self._steps += 1
        self._samples += self._samples_of_step()
        if self._steps >= self._state.next:
            self._meet(self._lead_step)

    def _samples_of_step(self) -> float:
        """Return the samples of a step, of all ranks; if they are not counted, every rank's are 1."""
        model = self._wrapped
        if isinstance(model, DataParallel) and model.engine.weights.counted:
            return model.samples
        return 1.0 if self._group is None else float(self._group.size)

    def _lead_step(self) -> None:
        """Do what is due after the steps since the last meeting."""
        assert self._client is not None
        if self._steps:
            lr = float(self._optimizer.param_groups[0]["lr"])
            self._client.step(self._samples, lr, self._steps)

    def _meet(self, lead: Callable[[], object]) -> None:
        """Run `lead` on rank 0, while the other ranks do what it decides; then all know the worker's state."""
        if self._group is None:
            lead()
        elif self._group.leads:
            with self._group.lead(self._updated_state):
                lead()
        else:
            self._state = self._group.follow()
        self._steps, self._samples = 0, 0.0

    def _updated_state(self) -> WorkerState:
        """Return the state of the worker, on the rank that decides."""
        state = self._state
        if self._client is not None:
            worker = self._client.worker
            state.counts, state.lr_scale, state.samples = worker.counts, worker.lr_scale, self._client.samples
            state.every, state.delay = worker.schedule.every, worker.schedule.delay
            state.next, late = worker.steps_until_check(min(2**self._overdue, state.every))
            self._overdue = min(self._overdue + 1, _MAX_DOUBLINGS) if late else 0
        return state

    def _score_in_eval_mode(self) -> float:
        assert self._score is not None
        training = self.module.training
        self.module.eval()
        try:
            return float(self._score())
        finally:
            self.module.train(training)

    def _reset_optimizer(self) -> None:
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.forget_state()
        else:
            self._optimizer.state.clear()

    def _heartbeat(self) -> dict[str, Any]:
        client = self._client
        if client is None:
            return {}
        seconds, schedule, counts = client.step_seconds, client.worker.schedule, self.counts
        values: dict[str, Any] = {
            "steps": counts.steps,
            "samples": counts.samples,
            "speed": 1 / seconds if seconds else 0.0,
            "every": schedule.every,
            "delay": schedule.delay,
        }
        return values if self.loss is None else {**values, "loss": float(self.loss)}

    def _check_in_use(self) -> None:
        if not self._in_use:
            raise UsageError("this AsyncDataParallel is not in use", remedy="use it in a with-statement")
        if self._group is not None and self._wrapped is not None and self._wrapped.engine.local_only:
            raise UsageError(
                f"AsyncDataParallel of {self._group.size} ranks inside LocalSGD, where each rank's parameters differ",
                remedy="use one of both, or give each rank's model a group of its own",
            )

    # ------------------------------------------------------------------ state

    @property
    def counts(self) -> WorkerCounts:
        """Counters of this worker."""
        counts = self._state.counts if self._client is None else self._client.worker.counts
        if not self._steps:
            return counts
        steps, samples = counts.steps + self._steps, counts.samples + self._samples
        return dataclasses.replace(counts, steps=steps, samples=samples)

    @property
    def lr_scale(self) -> float:
        """Factor that the hub assigned to this worker's learning rate; applied within every step."""
        return self._state.lr_scale if self._client is None else self._client.worker.lr_scale

    @property
    def samples(self) -> float:
        """Samples that the global parameters were trained on, by all workers, as far as this one knows."""
        return (
            self._state.samples if self._group is not None or self._client is None else self._client.samples
        )

    @property
    def cadence(self) -> SyncSchedule:
        """Current k, fragments and d."""
        if self._client is not None:
            return self._client.worker.schedule
        return SyncSchedule(self._state.every, self._settings.schedule.fragments, self._state.delay)


def _check_numbers(warmup: int, hubs: int, fragments: int) -> None:
    if type(warmup) is not int or warmup < 0:
        raise UsageError(f"warmup={warmup!r}", remedy="give a whole number of local steps, 0 or more")
    if hubs > fragments or not hubs:
        raise UsageError(
            f"{hubs} hubs for {fragments} fragments",
            remedy="give at least as many fragments as hubs, and one hub or more",
        )
