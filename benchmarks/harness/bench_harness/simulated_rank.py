"""One rank of a simulated world: its connections, which behave like TCP, and the turns of its watchdog."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline._core.step_state import StepState
from paceline.errors import PeerFailed
from paceline.health.aggregation.groups import PeerGroups
from paceline.health.failure_detector import HEARTBEAT_SECONDS, FailureDetector
from paceline.health.heartbeat import TAG_NBYTES, FrameParser, Heartbeat, encode_frame
from paceline.health.peer_endpoint import PeerEndpoint
from paceline.health.peer_handshake import FrameSealer
from paceline.health.pending_connections import CallFailure

__all__ = ["Decision", "SimulatedLink", "SimulatedRank"]

EXIT_SECONDS = 1.0
"""From the decision of a rank to the end of its watchdog."""

_KEY = b"s" * 32


class World(Protocol):
    """What a rank needs of its world, see `WatchdogSimulation`."""

    now: float
    groups: PeerGroups
    endpoints: list[PeerEndpoint]
    measured: Collection[int]
    ranks: list[SimulatedRank]
    heartbeats: dict[int, Heartbeat]

    def call(self, caller: SimulatedRank, listener: SimulatedRank, *, probe: bool) -> None:
        """Let a call take its course."""
        ...

    def transmit(self, sender: SimulatedRank, link: SimulatedLink, data: Any) -> None:
        """Bring bytes to the other end."""
        ...

    def heartbeat_of(self, rank: SimulatedRank) -> Heartbeat:
        """Return the heartbeat of a rank."""
        ...

    def after(self, seconds: float, action: Any) -> None:
        """Run `action` later."""
        ...

    def end(self, rank: SimulatedRank, how: str = "killed") -> None:
        """End a process."""
        ...


@dataclass(frozen=True)
class Decision:
    """What a rank decided: the error, and when."""

    error: PeerFailed
    at: float


@dataclass(eq=False)
class SimulatedLink:
    """One end of a connection."""

    rank: int
    other: SimulatedRank
    state: str = "open"
    since: float = 0.0
    last_ack_at: float = 0.0
    sealer: FrameSealer = field(default_factory=lambda: FrameSealer(_KEY))
    parser: FrameParser = field(default_factory=lambda: FrameParser(key=_KEY))
    peer: SimulatedLink | None = None


class SimulatedRank:
    """A rank: its process, and the connections that its detector sees (`PeerNetwork`)."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.own, self.endpoints = world.endpoints[rank], world.endpoints
        self.links: dict[int, SimulatedLink] = {}
        self.process = "runs"  # or "stopped", "gone"
        self.inbox: deque[tuple[SimulatedLink | None, Any]] = deque()
        self.decision: Decision | None = None
        self.messages = self.nbytes_sent = self.nbytes_received = 0
        self.cpu_seconds = 0.0
        self.state = StepState()
        self.measured = world.groups.group_of[rank] in world.measured
        self.detector: FailureDetector
        self.failures: dict[int, CallFailure] = {}
        self.turned_at = 0.0
        self.beat_at = 0.0
        self.wake_at = float("inf")
        self.sequence = 0
        self.accepting: list[SimulatedRank] = []
        self.calling: set[int] = set()
        self.changes = 0
        self.stopped_mates: tuple[int, ...] = ()

    @property
    def host(self) -> str:
        """Key of its host."""
        return self.own.host_key

    # ------------------------------------------------------------------ PeerNetwork

    def now(self) -> float:
        """Return the virtual time."""
        return self.world.now

    def call(self, rank: int) -> None:
        """Start to connect to a rank."""
        link = self.links.get(rank)
        if rank not in self.calling and (link is None or link.state != "open"):
            self.calling.add(rank)
            self.world.call(self, self.world.ranks[rank], probe=False)

    def probe(self, rank: int) -> None:
        """Start to find out whether a process listens."""
        self.world.call(self, self.world.ranks[rank], probe=True)

    def call_failure(self, rank: int) -> CallFailure | None:
        """Return how the latest call failed."""
        return self.failures.get(rank)

    def discard_dump(self, rank: int) -> None:
        """There are no stack dumps."""

    def unanswered(self, rank: int) -> float:
        """Return the seconds since the host of a rank acknowledged bytes."""
        link = self.links.get(rank)
        return self.world.now - link.last_ack_at if link is not None and link.state == "open" else 0.0

    def send(
        self,
        message: dict[str, Any],
        *,
        to: Collection[int] | None = None,
        besides: int | None = None,
        droppable: bool = False,
    ) -> None:
        """Send to some ranks, or to all that are connected."""
        links = self.links.values() if to is None else [self.links[rank] for rank in to if rank in self.links]
        frame = encode_frame(message)
        for link in links:
            if link.state != "open" or link.rank == besides:
                continue
            self.messages += 1
            self.nbytes_sent += len(frame) + TAG_NBYTES
            exact = self.measured or link.other.measured or "row" not in message
            self.world.transmit(
                self, link, link.sealer.seal(frame) if exact else (len(frame) + TAG_NBYTES, message)
            )

    # ------------------------------------------------------------------ the monitor

    def turn(self) -> None:
        """Receive, send what is due, and decide, as `MonitorThread` does."""
        now = self.world.now
        began = time.thread_time()
        absent = now - self.turned_at - HEARTBEAT_SECONDS if self.turned_at else 0.0
        self.turned_at = now
        if absent > 1.0:
            self.detector.ignore_absence(absent)
        for link, data in self._received():
            for message in [data] if isinstance(data, dict) else link.parser.feed(data):
                if isinstance(data, dict):
                    self.detector.add_heartbeat(message["heartbeat"], now)
                else:
                    self.detector.receive(link.rank, message, now)
        if now - self.beat_at > 0.9 * HEARTBEAT_SECONDS:
            self.beat_at = now
            self.sequence += 1
            self.detector.beat(self.world.heartbeat_of(self), now)
        self.detector.report(now)
        if self.decision is None:
            failure = self.detector.detect(now, None)
            if failure is not None:
                self.decision = Decision(self.detector.error_of(failure), now)
                self.detector.publish(self.detector.own_notice("leaves", name=failure.kind))
                self.world.after(EXIT_SECONDS * (1 + self.rank % 7 / 7), lambda: self.world.end(self, "left"))
        self.cpu_seconds += time.thread_time() - began

    def _received(self) -> list[tuple[SimulatedLink, Any]]:
        found = []
        while self.inbox:
            link, data = self.inbox.popleft()
            if link is None:
                continue
            if data is None:
                if link.state == "open":
                    link.state, link.since = "closed", self.world.now
                    self.changes += 1
            elif isinstance(data, tuple):
                nbytes, message = data
                self.nbytes_received += nbytes
                found.append((link, {"heartbeat": self.world.heartbeats[message["row"][0]]}))
            else:
                self.nbytes_received += len(data)
                found.append((link, data))
        return found
