"""`HubClient`: the connections of a worker to its hubs, and the object that decides what is sent and applied when."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.async_dp.comm_thread import CommThread
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.async_worker import AsyncWorker
from paceline.async_dp.worker.auto_settings import choose_settings
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.hub_access import HubAccess
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.profiling import trace_file
from paceline.transport.zmq import SocketSettings, WorkerExchange

__all__ = ["HubClient", "WorkerSettings"]

log = logging.getLogger("paceline.async_dp")

_STEP_SMOOTHING = 0.9
_KEEP_WAITING_SECONDS = 1.0


@dataclass(kw_only=True)
class WorkerSettings:
    """Checked arguments of a worker.

    Attributes:
        hubs: their addresses or folders.
        schedule: k, d and the number of fragments, to begin with.
        every: k; None: chosen from measured times.
        delay: d; None: chosen from measured times.
        policy: selects updates and global parameters by score.
        warmup: local steps.
        compression: of updates; None: float32.
        choose_codec: choose int8 or int4 from measured times.
        rate: most bytes per second to and from each hub; None: no limit.
        accesses: address and keys of each hub.
        run: that the hubs must serve; empty: any.
        name: for people.
        folder: of the outboxes; None: in memory.
        cores: CPU cores reserved for communication.
    """

    hubs: Sequence[str | Path]
    schedule: SyncSchedule
    every: int | None
    delay: int | None
    policy: SelectionPolicy
    warmup: int
    compression: Compression | None
    choose_codec: bool
    run: str
    name: str
    folder: str | Path | None
    rate: float | None = None
    accesses: Sequence[HubAccess] = ()
    cores: frozenset[int] = frozenset()


class HubClient:
    """Outboxes, sessions and communication threads of a worker, until it is closed.

    Args:
        settings: of the worker.
        layout: of its model.
        replicas: of all fragments.
        score: returns the score of the model; None: no scores.
        reset_optimizer: drops the optimizer's state.
        heartbeat: returns the training state that is reported to the hub.

    Attributes:
        worker: decides.
        comm_threads: one per hub.
        step_seconds: duration of a local step, smoothed.

    Raises:
        UsageError: the folder can't be used.
        CheckpointError: it can't be written.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        layout: ParameterLayout,
        replicas: Sequence[FragmentReplica],
        *,
        score: Callable[[], float] | None,
        reset_optimizer: Callable[[], None],
        heartbeat: Callable[[], dict[str, Any]],
    ) -> None:
        self._settings, self._affinity = settings, None
        self.comm_threads: list[CommThread] = []
        self._outboxes: list[Outbox] = []
        self.step_seconds, self._stepped_at = 0.0, time.monotonic()
        try:
            sessions = self._open_sessions(layout, replicas)
            self.worker = AsyncWorker(
                replicas,
                sessions,
                settings.schedule,
                settings.policy,
                score=score,
                reset_optimizer=reset_optimizer,
                warmup=settings.warmup,
            )
            self._start_threads(sessions, heartbeat)
        except BaseException:
            self.close()
            raise

    def _open_sessions(
        self, layout: ParameterLayout, replicas: Sequence[FragmentReplica]
    ) -> list[HubSession]:
        settings, hubs = self._settings, len(self._settings.hubs)
        for index in range(hubs):  # one outbox per hub, since each acknowledges its own updates
            folder = None if settings.folder is None else Path(settings.folder, f"hub{index}")
            number = self._outboxes[0].worker if self._outboxes and folder is None else None
            self._outboxes.append(Outbox(folder, number))
        hello_meta: dict[str, Any] = {"every": settings.schedule.every, "delay": settings.schedule.delay}
        if settings.rate is not None:
            hello_meta["rate"] = settings.rate
        return [
            HubSession(
                outbox.worker,
                settings.name,
                layout,
                dict(list(enumerate(replicas))[index::hubs]),
                outbox,
                run=settings.run,
                hello_meta=hello_meta,
                new_session_id=lambda: secrets.randbits(48) + 1,
            )
            for index, outbox in enumerate(self._outboxes)
        ]

    def _start_threads(self, sessions: Sequence[HubSession], heartbeat: Callable[[], dict[str, Any]]) -> None:
        settings = self._settings
        if settings.cores and hasattr(os, "sched_setaffinity"):
            self._affinity = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._affinity - settings.cores)
        sockets = SocketSettings(rate=settings.rate)
        for session, access in zip(sessions, settings.accesses, strict=True):
            exchange = WorkerExchange(access.address, session.worker, keys=access.keys, settings=sockets)
            self.comm_threads.append(
                CommThread(session, exchange, rate=settings.rate, heartbeat=heartbeat, cores=settings.cores)
            )

    def close(self) -> None:
        """Leave the hubs and end the threads."""
        for thread in self.comm_threads:
            thread.close()
        for outbox in self._outboxes:
            outbox.close()
        if self._affinity is not None:
            os.sched_setaffinity(0, self._affinity)
        self.comm_threads, self._outboxes, self._affinity = [], [], None

    # ------------------------------------------------------------------ local steps

    def step(self, samples: float, lr: float, count: int = 1) -> None:
        """Count local steps and do what is due after them, see `AsyncWorker.step`.

        Raises:
            UsageError: the hub refused this worker.
        """
        worker, now = self.worker, time.monotonic()
        self.raise_errors()
        seconds, self._stepped_at = max(0.0, now - self._stepped_at) / count, now
        if self.step_seconds:
            kept = _STEP_SMOOTHING**count
            seconds = kept * self.step_seconds + (1 - kept) * seconds
        self.step_seconds = seconds
        sent, taken = worker.counts.sent, worker.counts.taken
        started = time.perf_counter()
        worker.step(samples, lr, now, self.step_seconds, count)
        self._wake()
        if worker.counts.sent > sent or worker.counts.taken > taken:
            kind = "send" if worker.counts.sent > sent else "merge"
            trace_file.add(kind, started, time.perf_counter() - started, step=worker.counts.steps)
        if worker.counts.taken > taken:
            self._choose_settings()

    def _wake(self) -> None:
        for thread in self.comm_threads:
            if thread.session.requests:
                thread.wake()

    def _choose_settings(self) -> None:
        """Set k, d and the codec from the last exchange."""
        settings, worker = self._settings, self.worker
        measured = self.comm_threads[0].session.reply_timeout
        if (settings.every is not None and settings.delay is not None) or not measured.update_seconds:
            return
        codec = worker.replicas[0].codec.codec.name
        chosen = choose_settings(self.step_seconds, measured.update_seconds, measured.fetch_seconds, codec)
        every = chosen.every if settings.every is None else settings.every
        delay = min(every - 1, chosen.delay if settings.delay is None else settings.delay)
        every = max(every, settings.schedule.fragments)
        worker.schedule = SyncSchedule(every, settings.schedule.fragments, delay)
        if settings.choose_codec and chosen.codec != codec:
            for replica in worker.replicas:
                replica.next_codec = chosen.codec

    def raise_errors(self) -> None:
        """Raise what ended a communication thread, or the refusal of a hub."""
        for thread in self.comm_threads:
            if thread.error is not None:
                raise thread.error
            refusal = thread.session.hub_status.refusal
            if refusal:
                raise UsageError(
                    f"the hub at {thread.exchange.address} refused this worker: {refusal}",
                    remedy="start all workers with the same model, settings and run",
                )

    @property
    def samples(self) -> float:
        """Samples that the global parameters were trained on, as far as known."""
        return max((thread.session.hub_status.samples for thread in self.comm_threads), default=0.0)

    # ------------------------------------------------------------------ the end

    def finish(self, seconds: float, keep_waiting: Callable[[], None] = lambda: None) -> bool:
        """Send the last updates and apply the global parameters; see `AsyncDataParallel.finish`.

        Args:
            seconds: to wait at most.
            keep_waiting: called about once a second.
        """
        worker, name, now = self.worker, self._settings.name, time.monotonic()
        deadline, called_at = now + seconds, now
        worker.begin_finish()
        if not worker.has_global_params:
            log.warning("%s has never reached a hub: waiting for one, %.0f s at most", name, seconds)
        while not worker.poll_finish(now := time.monotonic()):
            for thread in self.comm_threads:
                thread.wake()
            self.raise_errors()
            if worker.in_population:
                log.warning("%s ends before all share parameters: it keeps its own parameters", name)
                return False
            if now > deadline:
                log.warning("no answer from the hub for %.0f s: %s keeps its own parameters", seconds, name)
                return False
            if now > called_at + _KEEP_WAITING_SECONDS:
                called_at = now
                keep_waiting()
            time.sleep(0.005)
        return True
