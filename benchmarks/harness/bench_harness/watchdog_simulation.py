"""The watchdogs of many ranks in virtual time: their state machine with simulated connections, processes and hosts.

Every rank has a real `FailureDetector`, which sees connections that behave like TCP: frames arrive in order, the end of
a process ends its connections, a stopped process acknowledges and does not read, a host that is cut off acknowledges
nothing. Messages are encoded, authenticated and parsed as on sockets, so bytes are exact and the CPU time is that of
all but the system calls; except heartbeats inside a group, which in groups that are not `measured` are passed on as
they are, since simulating ten thousand ranks takes long enough without.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection
from typing import Any

from bench_harness.simulated_rank import Decision, SimulatedLink, SimulatedRank
from paceline.health.aggregation.groups import PeerGroups
from paceline.health.attribution import StallLimits
from paceline.health.failure_detector import HEARTBEAT_SECONDS, FailureDetector, suspicion_limits
from paceline.health.heartbeat import FailureNotice, Heartbeat
from paceline.health.peer_endpoint import PeerEndpoint
from paceline.health.pending_connections import CONNECT_SECONDS, CallFailure

__all__ = ["WatchdogSimulation"]

LATENCY_SECONDS = 0.0005
COALESCE_SECONDS = 0.02
STEP_SECONDS = 0.5


class WatchdogSimulation:
    """A world of ranks that train in step, and what happens to it.

    Args:
        ranks: their number. per_host: ranks of each host.
        stall, lost: limits, as of `paceline.Watchdog`.
        measured: groups whose heartbeats are encoded and parsed too.

    Attributes:
        now: virtual seconds.
        ranks: all of them.
        waiting_since: the moment from which ranks wait for others that do not come; None: they train.
        silent_ranks: ranks that stand still in their own code.
    """

    def __init__(
        self,
        ranks: int,
        *,
        per_host: int = 8,
        stall: float = 20.0,
        lost: float = 10.0,
        measured: Collection[int] | None = None,
    ) -> None:
        host_keys = [f"host{rank // per_host}" for rank in range(ranks)]
        self.groups = PeerGroups(host_keys)
        self.measured = range(len(self.groups.groups)) if measured is None else measured
        self.endpoints = [
            PeerEndpoint(
                rank=rank,
                host=key,
                host_key=key,
                pid=1000 + rank,
                start_ticks=0,
                thread_ident=0,
                address="",
                port=0,
                token="",
            )
            for rank, key in enumerate(host_keys)
        ]
        self.now = 0.0
        self.cut: dict[
            str, tuple[int, float]
        ] = {}  # part of the network of each host that is cut off, and since when
        self.waiting_since: float | None = None
        self.standing: dict[int, float] = {}
        self.heartbeats: dict[int, Heartbeat] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._lost = lost
        limits = suspicion_limits(StallLimits(stall, lost), self.groups)
        self.ranks = [SimulatedRank(self, rank) for rank in range(ranks)]
        for each in self.ranks:
            each.detector = FailureDetector(
                each, self.groups, limits, leave_on_stall=True, warn=stall / 4, state=each.state
            )
            for other in self.groups.calls(each.rank):
                self.connect(each, self.ranks[other])
            self.after(HEARTBEAT_SECONDS * (each.rank * 0.618 % 1), lambda each=each: self._turn(each))

    # ------------------------------------------------------------------ time

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Run `action` later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), action))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Let time pass, at most until a condition, which is checked ten times a second, holds."""
        end, check = self.now + seconds, self.now
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
            if until is not None and self.now >= check:
                check = self.now + 0.1
                if until():
                    return
        self.now = end

    def _turn(self, rank: SimulatedRank) -> None:
        """A turn that is due, and the next one."""
        if rank.process == "gone":
            return
        if rank.process == "runs" and self.now - rank.turned_at >= HEARTBEAT_SECONDS - 0.001:
            self._accept(rank)
            rank.turn()
        sleep = HEARTBEAT_SECONDS - (self.now - rank.turned_at) if rank.process == "runs" else 0.0
        self.after(sleep if sleep > 0.001 else HEARTBEAT_SECONDS, lambda: self._turn(rank))

    def wake(self, rank: SimulatedRank) -> None:
        """Give a rank a turn soon, because something arrived that ends its sleep."""
        at = max(self.now, rank.turned_at + COALESCE_SECONDS)
        if rank.wake_at <= at + COALESCE_SECONDS and rank.wake_at >= self.now:
            return
        rank.wake_at = at

        def turn() -> None:
            rank.wake_at = float("inf")
            if rank.process == "runs":
                self._accept(rank)
                rank.turn()

        self.after(at - self.now, turn)

    # ------------------------------------------------------------------ network

    def reachable(self, one: SimulatedRank, other: SimulatedRank) -> bool:
        """Return whether packets pass between two ranks."""
        return (
            one.host == other.host or self.cut.get(one.host, (0, 0))[0] == self.cut.get(other.host, (0, 0))[0]
        )

    def connect(self, caller: SimulatedRank, listener: SimulatedRank) -> None:
        """Connect two ranks."""
        one = SimulatedLink(listener.rank, listener, since=self.now, last_ack_at=self.now)
        other = SimulatedLink(caller.rank, caller, since=self.now, last_ack_at=self.now)
        one.peer, other.peer = other, one
        caller.links[listener.rank], listener.links[caller.rank] = one, other
        caller.changes += 1
        listener.changes += 1

    def transmit(self, sender: SimulatedRank, link: SimulatedLink, data: Any) -> None:
        """Bring bytes to the other end; None: the end of the connection."""
        receiver, end = link.other, link.peer
        if not self.reachable(sender, receiver):
            first = link.last_ack_at
            if self.now - first > self._lost and link.state == "open":
                link.state, link.since = "lost", self.now
                sender.changes += 1
            return
        link.last_ack_at = self.now
        if isinstance(data, tuple) and receiver.process != "gone" and end is not None and end.state == "open":
            receiver.inbox.append((end, data))  # ends no sleep, so that it does not matter when it arrives
            return
        same = sender.host == receiver.host
        self.after(LATENCY_SECONDS * (1 - 0.9 * same), lambda: self._arrive(receiver, end, data))

    def _arrive(self, receiver: SimulatedRank, end: SimulatedLink | None, data: Any) -> None:
        if receiver.process == "gone" or end is None or end.state != "open":
            return
        receiver.inbox.append((end, data))
        if receiver.process == "runs" and (data is None or end.rank not in receiver.detector.heard_at):
            self.wake(receiver)

    def call(self, caller: SimulatedRank, listener: SimulatedRank, *, probe: bool) -> None:
        """Let a call take its course."""
        if not self.reachable(caller, listener) or (listener.process == "stopped" and not probe):
            self.after(CONNECT_SECONDS, lambda: self._fail(caller, listener, "unanswered"))
        elif listener.process == "gone":
            self.after(2 * LATENCY_SECONDS, lambda: self._fail(caller, listener, "refused"))
        elif not probe:
            self.after(2 * LATENCY_SECONDS, lambda: listener.accepting.append(caller))

    def _fail(self, caller: SimulatedRank, listener: SimulatedRank, kind: Any) -> None:
        caller.failures[listener.rank] = CallFailure(kind, kind, self.now)
        caller.calling.discard(listener.rank)
        caller.changes += 1
        if caller.process == "runs":
            self.wake(caller)

    def _accept(self, listener: SimulatedRank) -> None:
        """Answer those who call; authentication takes two more turns."""
        callers, listener.accepting = listener.accepting, []
        for caller in callers:

            def connect(caller: SimulatedRank = caller) -> None:
                caller.calling.discard(listener.rank)
                if "gone" not in (caller.process, listener.process) and self.reachable(caller, listener):
                    self.connect(caller, listener)

            self.after(2 * COALESCE_SECONDS, connect)

    # ------------------------------------------------------------------ what happens

    def heartbeat_of(self, rank: SimulatedRank) -> Heartbeat:
        """Return the heartbeat of a rank that makes steps with all others, until they wait for one of them."""
        now, since = self.now, self.waiting_since
        moment = now if since is None else min(now, since)
        step, part = divmod(moment, STEP_SECONDS)
        worked = STEP_SECONDS * (0.7 + 0.2 * (rank.rank * 0.618 % 1))
        fields: dict[str, Any] = {"step": int(step), "rounds": int(step), "busy_seconds": step * worked}
        if rank.rank in self.standing:
            still = now - self.standing[rank.rank]
            fields |= {"phase": "forward", "age": still, "still": still}
        elif since is not None and now > since:
            fields |= {
                "phase": "exchange",
                "bucket": 0,
                "waiting": True,
                "age": now - since,
                "still": now - since,
            }
        elif part < worked:
            fields |= {"phase": "forward", "age": part}
        else:
            fields |= {
                "phase": "exchange",
                "bucket": 0,
                "waiting": True,
                "age": part - worked,
                "still": part - worked,
            }
        rank.state.step, rank.state.phase = fields["step"], fields["phase"]
        found = Heartbeat(rank.rank, rank.sequence, stopped=rank.stopped_mates, **fields)
        self.heartbeats[rank.rank] = found
        return found

    def end(self, rank: SimulatedRank, how: str = "killed") -> None:
        """End a process: killed, or its watchdog because it left."""
        if rank.process == "gone":
            return
        rank.process = "gone"
        for link in rank.links.values():
            if link.state == "open":
                self.transmit(rank, link, None)
        if how == "killed":
            self.waiting_since = self.waiting_since or self.now
            for mate in rank.detector.mates:
                other = self.ranks[mate]
                if other.process == "runs" and other.host == rank.host:
                    self.after(0.001, lambda other=other: self._report_end(other, rank))

    def _report_end(self, mate: SimulatedRank, rank: SimulatedRank) -> None:
        if mate.process == "runs":
            last = mate.detector.heartbeats[rank.rank]
            place = {"step": last.step, "phase": last.phase, "bucket": last.bucket}
            mate.detector.publish(FailureNotice("gone", rank.rank, mate.rank, code=-9, **place))
            self.wake(mate)

    def leave(self, rank: SimulatedRank) -> None:
        """Let a rank leave its loop, and end its watchdog."""
        rank.detector.publish(rank.detector.own_notice("done"))
        self.end(rank, "left")

    def stop(self, rank: SimulatedRank) -> None:
        """Stop a process."""
        rank.process = "stopped"
        self.waiting_since = self.waiting_since or self.now

        def notice() -> None:
            for mate in rank.detector.mates:
                if self.ranks[mate].host == rank.host and rank.process == "stopped":
                    self.ranks[mate].stopped_mates += (rank.rank,)

        self.after(0.5, notice)

    def resume(self, rank: SimulatedRank) -> None:
        """Let a stopped process continue."""
        rank.process = "runs"
        for mate in rank.detector.mates:
            other = self.ranks[mate]
            other.stopped_mates = tuple(each for each in other.stopped_mates if each != rank.rank)
        self.waiting_since = None

    def cut_off(self, hosts: Collection[str], part: int = 1) -> None:
        """Put hosts into another part of the network, or each into one of its own (`part` < 0)."""
        for number, host in enumerate(hosts):
            self.cut[host] = (part if part > 0 else -1 - number, self.now)
        self.waiting_since = self.waiting_since or self.now

    def stall(self, rank: SimulatedRank) -> None:
        """Let a rank stand still in its own code."""
        self.standing[rank.rank] = self.now
        self.waiting_since = self.waiting_since or self.now

    def fail(self, rank: SimulatedRank) -> None:
        """Let a rank raise an exception."""
        rank.detector.publish(
            rank.detector.own_notice("raised", name="ValueError: injected", text="x" * 2000)
        )
        self.waiting_since = self.waiting_since or self.now
        self.after(0.5, lambda: self.end(rank, "left"))

    def decisions(self) -> dict[int, Decision | None]:
        """Return what each rank has decided whose process runs, or that decided before it left."""
        return {
            each.rank: each.decision
            for each in self.ranks
            if each.process == "runs" or each.decision is not None
        }

    def all_decided(self) -> bool:
        """Return whether every rank has decided whose process runs."""
        return all(decision is not None for decision in self.decisions().values())
