"""Where the agents of a run meet: torch's rendezvous on a c10d store, its settings, and what it leaves to be done.

[Note: clocks] torch's rendezvous compares the clock of the host that looks with the time that a host wrote as its last
sign of life. A host whose clock is wrong by more than the time after which hosts count as lost would be thrown out
again and again. So whoever serves the store writes its time there, and who comes compares.

[Note: silence] A question to the store waits for ever when the store's host loses power or its cable: nothing is sent
that TCP could miss. So one thread asks every second on a connection of its own, and another one watches it.
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

_STORE_SECONDS = 10.0
_CLOCK_SECONDS = 0.5
_MARK = "paceline"
_YEAR_SECONDS = 365 * 86400.0
_NEVER = 1_000_000_000  # a host alone is not lost, however long it was suspended
_HERE = RendezvousAddress("127.0.0.1", 0)
STORE_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class RendezvousEndpoint:
    """A rendezvous as one process sees it: its address, and the store if this process serves it."""

    address: RendezvousAddress
    served: TCPStore | None

    def store(self) -> TCPStore:
        """Return a new connection to the store: a question holds up all others on the same one."""
        return _connect(self.address)


class ElasticRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous, which also tells when a host of the world has left it."""

    _size = 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next world, where its ranks get a new store of their own on the host of rank 0.

        torch would keep the address that it gave the first time, even when the host there is gone.
        """
        self._bootstrap_store_info = None
        info = super().next_rendezvous()
        self._size = info.world_size
        return info

    def newcomers(self) -> bool:
        """Return whether a host waits to be let in."""
        return self.num_nodes_waiting() > 0

    def broken(self) -> bool:
        """Return whether a host of the world has left, or was lost; :meth:`newcomers` brings it up to date."""
        there = self._state_holder.state.participants
        return len(there) < self._size or self._this_node not in there


class StoreHeartbeat:
    """Watches whether the store answers; see [Note: silence].

    Args:
        place: where it is served, by another process.
        lost: called, in a thread, when it has not answered for `STORE_TIMEOUT_SECONDS`.
    """

    def __init__(self, place: RendezvousEndpoint, lost: Callable[[], None]) -> None:
        self._beats = 0
        self._stop = threading.Event()
        self._store = place.store()
        self._lost = lost
        for work in (self._ask, self._watch):
            threading.Thread(target=work, name="paceline-pulse", daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()

    def _ask(self) -> None:
        while not self._stop.wait(1.0):
            try:
                self._store.add("paceline/pulse", 0)
            except dist.DistError:
                return  # the agent notices by itself; if it is held up, so does the watch
            self._beats += 1

    def _watch(self) -> None:
        silent, seen = 0, 0
        while not self._stop.wait(1.0):
            silent = 0 if self._beats != seen else silent + 1
            seen = self._beats
            if silent >= STORE_TIMEOUT_SECONDS:
                self._lost()
                return


def open_endpoint(job: JobSpec) -> RendezvousEndpoint:
    """Return where the agents meet; this process serves it if it is on this host and nobody does yet.

    Raises:
        MissingRanks: it can't be reached in time.
        WorldError: what listens there is no rendezvous, or the clocks differ.
        UsageError: it can't be served here.
    """
    address = job.address
    if address is None:
        server = _serve(_HERE)
        return RendezvousEndpoint(RendezvousAddress(_HERE.host, server.port), server)
    if is_local(address) and not is_port_taken(address.port):
        check_port_free(address)
        with contextlib.suppress(UsageError):  # another one on this host was faster
            return serve_store(address)
    wait_for_server(address, job.timeouts.join, log_line)
    place = RendezvousEndpoint(address, None)
    check_endpoint(place, job.timeouts)
    return place


def serve_store(address: RendezvousAddress) -> RendezvousEndpoint:
    """Serve a rendezvous at `address` until this process ends.

    Raises:
        UsageError: somebody else does.
    """
    try:
        server = _serve(address)
    except dist.DistError:
        raise UsageError(
            f"can't serve at {address}: the port is taken", remedy="choose another port"
        ) from None
    server.set(_MARK, "1")
    clock = _connect(address)
    tell_time = threading.Thread(target=_tell_time, args=(clock,), name="paceline-clock", daemon=True)
    tell_time.start()
    return RendezvousEndpoint(address, server)


def join_rendezvous(
    job: JobSpec, place: RendezvousEndpoint, store: Store, *, late: bool = False
) -> ElasticRendezvous:
    """Return this host's handler of the rendezvous, whose state is on `store`.

    Args:
        late: whether the run has begun already; then it may take any time until this host is let in.
    """
    timeouts = job.timeouts
    seconds = {
        "join": timeouts.join if job.rejoin or not late else _YEAR_SECONDS,
        "last_call": timeouts.last_call,
        "close": 5.0,
        "heartbeat": timeouts.heartbeat_timeout,
    }
    handler = ElasticRendezvous.from_backend(
        job.name,
        store,
        C10dRendezvousBackend(store, job.name),
        job.min_hosts,
        job.hosts,
        _HERE.host if job.address is None else reachable_address(place.address, serving=place.served is not None),
        RendezvousTimeout(**{name: timedelta(seconds=value) for name, value in seconds.items()}),
        keep_alive_interval=timeouts.heartbeat,  # type: ignore[arg-type] — a timedelta takes parts of a second
        keep_alive_max_attempt=max(1, round(timeouts.heartbeat_timeout / timeouts.heartbeat)) if job.address else _NEVER,
    )
    assert isinstance(handler, ElasticRendezvous)
    return handler


def open_job_store(job: JobSpec, place: RendezvousEndpoint) -> JobStore:
    """Return the board of a run, on a connection of its own."""
    return JobStore(PrefixStore(f"paceline/run/{job.name}", place.store()))


def _serve(address: RendezvousAddress) -> TCPStore:
    seconds = timedelta(seconds=_STORE_SECONDS)
    return TCPStore(address.host, address.port, is_master=True, timeout=seconds, wait_for_workers=False)


def _connect(address: RendezvousAddress) -> TCPStore:
    seconds = timedelta(seconds=_STORE_SECONDS)
    return TCPStore(address.host, address.port, is_master=False, timeout=seconds, wait_for_workers=False)


def _tell_time(store: TCPStore) -> None:
    while True:
        store.set("paceline/clock", repr(time.time()))
        time.sleep(_CLOCK_SECONDS)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch's C++ says about a foreign server, many lines, from the terminal."""
    terminal = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def check_endpoint(place: RendezvousEndpoint, timeouts: JobTimeouts) -> None:
    """Raise WorldError unless what listens there is a rendezvous of ours, and its clock and this one agree."""
    answers: queue.Queue[float | str] = queue.Queue()
    # In a thread: torch waits for the answer of a foreign server without a limit.
    threading.Thread(target=_ask, args=(place, answers), name="paceline-check", daemon=True).start()
    with _quiet():
        try:
            apart = answers.get(timeout=1.5 * _STORE_SECONDS)
        except queue.Empty:
            apart = "it does not answer"
    if isinstance(apart, str):
        raise WorldError(
            f"what listens at {place.address} is no rendezvous of paceline: {apart}",
            remedy="choose another port",
        )
    if abs(apart) > timeouts.heartbeat_timeout / 2:
        raise WorldError(
            f"the clock of this host is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} that at "
            f"{place.address}; at most {patience.lost / 2:g} s are allowed",
            remedy="set the clocks by NTP on all hosts",
        )


def _ask(place: RendezvousEndpoint, answers: queue.Queue[float | str]) -> None:
    """Find out how many seconds this clock is ahead of that of the rendezvous, or why nobody can tell."""
    try:
        store = place.store()
        store.get(_MARK)
        first = store.get("paceline/clock")
        while (told := store.get("paceline/clock")) == first:
            time.sleep(0.02)
        answers.put(time.time() - float(told))
    except (dist.DistError, RuntimeError) as error:
        answers.put(str(error).splitlines()[0])
