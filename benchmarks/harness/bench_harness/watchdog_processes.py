"""Watchdogs of many ranks in processes of this machine, with real sockets and without a training: their CPU time."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from paceline._core.processes.graceful_shutdown import ShutdownListener
from paceline.health.aggregation.groups import PeerGroups
from paceline.health.attribution import StallLimits
from paceline.health.monitor_thread import MonitorThread
from paceline.health.peer_endpoint import LOOPBACK, PeerEndpoint, open_listener
from paceline.health.peer_mesh import PeerMesh
from paceline.world.process_probe import process_start_ticks

__all__ = ["watchdog_core_shares"]

_SETTLE_SECONDS = 8.0
_KEY = b"m" * 32


def watchdog_core_shares(ranks: int, per_host: int, seconds: float) -> list[float]:
    """Return the share of a core that each rank's watchdog uses, by rank, in a world on hosts of `per_host` ranks."""
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = fork.Pipe()
        process = fork.Process(
            target=_watch, args=(theirs, rank, f"host{rank // per_host}", seconds), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    endpoints = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(endpoints)
    shares = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(30.0)
    return shares


def _watch(pipe: Connection, rank: int, host: str, seconds: float) -> None:
    listener = open_listener(LOOPBACK)
    own = PeerEndpoint(
        rank=rank,
        host=host,
        host_key=host,
        pid=os.getpid(),
        start_ticks=process_start_ticks(os.getpid()),
        thread_ident=threading.get_ident(),
        address=LOOPBACK,
        port=listener.getsockname()[1],
        token="",
    )
    pipe.send(json.dumps(asdict(own)))
    endpoints = [PeerEndpoint(**json.loads(text)) for text in pipe.recv()]
    groups = PeerGroups([each.host_key for each in endpoints])
    mesh = PeerMesh(
        own,
        endpoints,
        listener,
        60.0,
        key=_KEY,
        peers=groups.peers(rank),
        calls=groups.calls(rank),
        quiet=groups.mates(rank),
    )
    limits = StallLimits(60.0, 60.0)
    monitor = MonitorThread(
        mesh, groups, limits, leave_on_stall=True, warn=60.0, grace=60.0, shutdown=ShutdownListener()
    )
    monitor.start()
    time.sleep(_SETTLE_SECONDS)
    before, began = _cpu_seconds(monitor), time.monotonic()
    time.sleep(seconds)
    share = (_cpu_seconds(monitor) - before) / (time.monotonic() - began)
    heard = monitor.detector.exchange is None or monitor.detector.exchange.is_unremarkable(
        60.0, time.monotonic()
    )
    pipe.send(share if heard else float("nan"))
    pipe.recv()
    monitor.publish(monitor.detector.own_notice("done"))
    monitor.close()


def _cpu_seconds(monitor: MonitorThread) -> float:
    """Return the CPU seconds that the watchdog's thread has used (proc(5): schedstat)."""
    path = Path(f"/proc/self/task/{monitor._thread.native_id}/schedstat")
    return int(path.read_text(encoding="ascii").split()[0]) / 1e9
