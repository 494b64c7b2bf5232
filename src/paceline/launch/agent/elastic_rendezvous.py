"""Rendezvous of a job's agents: torch's dynamic rendezvous on a c10d store, with clock and liveness checks.

[Note: clocks] torch's rendezvous compares the clock of the observing host with the time that a host wrote as its last
heartbeat. A host whose clock is off by more than the heartbeat time-out would be removed again and again. So the server
of the store writes its time there, and every host compares.

[Note: silent store] A request to the store blocks for ever when the store's host loses power or its cable, since TCP
has nothing to time out. So one thread sends a request every second on its own connection, and another one watches it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from paceline.errors import UsageError, WorldError
from paceline.launch.agent.job_spec import JobSpec, JobTimeouts
from paceline.launch.agent.job_store import JobStore
from paceline.launch.agent.rendezvous_address import (
    RendezvousAddress,
    check_port_free,
    is_local,
    is_port_taken,
    reachable_address,
    wait_for_server,
)
from paceline.launch.agent.restart_log import log_line

__all__ = [
    "STORE_TIMEOUT_SECONDS",
    "ElasticRendezvous",
    "RendezvousEndpoint",
    "StoreHeartbeat",
    "check_endpoint",
    "join_rendezvous",
    "open_endpoint",
    "open_job_store",
    "serve_store",
]

STORE_TIMEOUT_SECONDS = 10
_STORE_SECONDS = 10.0
_CLOCK_SECONDS = 0.5
_MARK = "paceline"
_YEAR_SECONDS = 365 * 86400.0
_UNLIMITED = 1_000_000_000  # a single host is not lost, however long it was suspended
_LOCALHOST = RendezvousAddress("127.0.0.1", 0)


@dataclass(frozen=True)
class RendezvousEndpoint:
    """A rendezvous as seen by one process: its address, and the store if this process serves it."""

    address: RendezvousAddress
    served: TCPStore | None

    def connect(self) -> TCPStore:
        """Return a new connection to the store, since a blocking request delays all others on the same one."""
        return _tcp_store(self.address, serve=False)


class ElasticRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous, which also reports when a host has left the world."""

    _size = 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next world; its ranks get a new store on the host of rank 0.

        torch would keep the address of the first store, even when the host there is gone.
        """
        self._bootstrap_store_info = None
        info = super().next_rendezvous()
        self._size = info.world_size
        return info

    def has_waiting_hosts(self) -> bool:
        """Return whether a host waits to join."""
        return self.num_nodes_waiting() > 0

    def has_lost_hosts(self) -> bool:
        """Return whether a host has left the world or was lost, as of the last call of `has_waiting_hosts`."""
        present = self._state_holder.state.participants
        return len(present) < self._size or self._this_node not in present


class StoreHeartbeat:
    """Checks that the store answers; see [Note: silent store].

    Args:
        endpoint: served by another process.
        on_lost: called, in a thread, when the store has not answered for `STORE_TIMEOUT_SECONDS`.
    """

    def __init__(self, endpoint: RendezvousEndpoint, on_lost: Callable[[], None]) -> None:
        self._answers = 0
        self._stop = threading.Event()
        self._store = endpoint.connect()
        self._on_lost = on_lost
        for work in (self._send_requests, self._watch):
            threading.Thread(target=work, name="paceline-store-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stop checking."""
        self._stop.set()

    def _send_requests(self) -> None:
        while not self._stop.wait(1.0):
            try:
                self._store.add("paceline/pulse", 0)
            except dist.DistError:
                return  # the agent notices it too; if it is blocked, `_watch` does
            self._answers += 1

    def _watch(self) -> None:
        silent, seen = 0, 0
        while not self._stop.wait(1.0):
            silent = 0 if self._answers != seen else silent + 1
            seen = self._answers
            if silent >= STORE_TIMEOUT_SECONDS:
                self._on_lost()
                return


def open_endpoint(job: JobSpec) -> RendezvousEndpoint:
    """Return the job's rendezvous; this process serves it if the address is local and not served yet.

    Raises:
        MissingRanks: it is not reachable in time.
        WorldError: the server is not a rendezvous, or the clocks differ.
        UsageError: it can't be served here.
    """
    address = job.address
    if address is None:
        server = _tcp_store(_LOCALHOST, serve=True)
        return RendezvousEndpoint(RendezvousAddress(_LOCALHOST.host, server.port), server)
    if is_local(address) and not is_port_taken(address.port):
        check_port_free(address)
        with contextlib.suppress(UsageError):  # another process on this host was faster
            return serve_store(address)
    wait_for_server(address, job.timeouts.join, log_line)
    endpoint = RendezvousEndpoint(address, None)
    check_endpoint(endpoint, job.timeouts)
    return endpoint


def serve_store(address: RendezvousAddress) -> RendezvousEndpoint:
    """Serve a rendezvous at `address` until this process ends.

    Raises:
        UsageError: the port is taken.
    """
    try:
        server = _tcp_store(address, serve=True)
    except dist.DistError:
        raise UsageError(
            f"can't serve at {address}: the port is taken", remedy="choose another port"
        ) from None
    server.set(_MARK, "1")
    clock = _tcp_store(address, serve=False)
    threading.Thread(target=_publish_time, args=(clock,), name="paceline-clock", daemon=True).start()
    return RendezvousEndpoint(address, server)


def join_rendezvous(
    job: JobSpec, endpoint: RendezvousEndpoint, store: Store, *, late: bool = False
) -> ElasticRendezvous:
    """Return this host's rendezvous handler.

    Args:
        job: to join.
        endpoint: of the rendezvous.
        store: holds the state of the rendezvous.
        late: whether the job has already begun; then it may take any time until this host is admitted.
    """
    limits = job.timeouts
    seconds = {
        "join": limits.join if job.rejoin or not late else _YEAR_SECONDS,
        "last_call": limits.last_call,
        "close": 5.0,
        "heartbeat": limits.heartbeat_timeout,
    }
    attempts = max(1, round(limits.heartbeat_timeout / limits.heartbeat))
    serving = endpoint.served is not None
    handler = ElasticRendezvous.from_backend(
        job.name,
        store,
        C10dRendezvousBackend(store, job.name),
        job.min_hosts,
        job.hosts,
        reachable_address(endpoint.address, serving=serving) if job.address else _LOCALHOST.host,
        RendezvousTimeout(**{name: timedelta(seconds=value) for name, value in seconds.items()}),
        keep_alive_interval=limits.heartbeat,  # type: ignore[arg-type] — timedelta takes fractions of a second
        keep_alive_max_attempt=attempts if job.address else _UNLIMITED,
    )
    assert isinstance(handler, ElasticRendezvous)
    return handler


def open_job_store(job: JobSpec, endpoint: RendezvousEndpoint) -> JobStore:
    """Return the store of a job on its own connection."""
    return JobStore(PrefixStore(f"paceline/run/{job.name}", endpoint.connect()))


def _tcp_store(address: RendezvousAddress, *, serve: bool) -> TCPStore:
    seconds = timedelta(seconds=_STORE_SECONDS)
    return TCPStore(address.host, address.port, is_master=serve, timeout=seconds, wait_for_workers=False)


def _publish_time(store: TCPStore) -> None:
    while True:
        store.set("paceline/clock", repr(time.time()))
        time.sleep(_CLOCK_SECONDS)


def check_endpoint(endpoint: RendezvousEndpoint, timeouts: JobTimeouts) -> None:
    """Raise WorldError unless the server is a rendezvous of Paceline, and its clock agrees with this host's."""
    answers: queue.Queue[float | str] = queue.Queue()
    # In a thread: torch waits for the answer of a foreign server without a time-out.
    threading.Thread(
        target=_measure_clock, args=(endpoint, answers), name="paceline-check", daemon=True
    ).start()
    with _silence_stderr():
        try:
            offset = answers.get(timeout=1.5 * _STORE_SECONDS)
        except queue.Empty:
            offset = "it does not answer"
    if isinstance(offset, str):
        raise WorldError(
            f"the server at {endpoint.address} is not a rendezvous of paceline: {offset}",
            remedy="choose another port",
        )
    limit = timeouts.heartbeat_timeout / 2
    if abs(offset) > limit:
        raise WorldError(
            f"the clock of this host is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that at "
            f"{endpoint.address}; at most {limit:g} s are allowed",
            remedy="set the clocks by NTP on all hosts",
        )


def _measure_clock(endpoint: RendezvousEndpoint, answers: queue.Queue[float | str]) -> None:
    """Put the seconds by which this clock is ahead of the rendezvous', or an error message."""
    try:
        store = endpoint.connect()
        store.get(_MARK)
        first = store.get("paceline/clock")
        while (latest := store.get("paceline/clock")) == first:
            time.sleep(0.02)
        answers.put(time.time() - float(latest))
    except (dist.DistError, RuntimeError) as error:
        answers.put(str(error).splitlines()[0])


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Suppress the many lines that torch's C++ writes about a foreign server."""
    terminal = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
