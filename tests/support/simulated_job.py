"""The state of a job whose hosts send requests at chosen times, without sockets or clocks."""

from __future__ import annotations

import itertools

from paceline.launch.agent.first_failure import RankFailure
from paceline.launch.agent.job_messages import (
    JobSettings,
    JoinWorld,
    RegisterHost,
    ReportDeparture,
    ReportFailure,
    ReportLive,
    WatchJob,
)
from paceline.launch.agent.job_state import JobState
from paceline.launch.agent.restart_policy import HostMember

__all__ = ["SimulatedJob"]


class SimulatedJob:
    """A job whose hosts send requests at chosen times; replies are collected by host and request."""

    def __init__(self, hosts, min_hosts=None, ranks=1, max_restarts=3, rejoin=True):
        least = min_hosts or hosts
        self.settings = JobSettings(
            hosts=hosts,
            min_hosts=least,
            min_ranks=least * ranks,
            max_restarts=max_restarts,
            first_call=30.0,
            last_call=3.0,
            join=300.0,
            rejoin=rejoin,
        )
        self.state, self.ranks, self.now = JobState(), ranks, 0.0
        self.replies, self.ids = {}, itertools.count()

    def _collect(self, replies):
        for reply in replies:
            assert (reply.client, reply.id) not in self.replies, "every request has one reply"
            self.replies[reply.client, reply.id] = reply

    def request(self, kind, host, *arguments):
        """Send a request and return its reply, None while there is none."""
        client, number = b"%d" % host, next(self.ids)
        self._collect(self.state.handle(client, kind(number, "run", f"m{host}", *arguments), self.now))
        return lambda: self.replies.get((client, number))

    def register(self, host):
        return self.request(RegisterHost, host, self.settings)().result

    def join(self, host, ranks=None, *, live=False):
        member = HostMember(f"host{host}", f"m{host}", ranks or self.ranks)
        return self.request(JoinWorld, host, member, f"10.0.{host // 256}.{host % 256:03}", 4000 + host, live)

    def watch(self, host, news):
        return self.request(WatchJob, host, news, 600.0)

    def fail(self, host, world, lines=(), rank=0):
        failure = RankFailure(
            f"host{host}", f"m{host}", rank=rank, local_rank=0, exit_code=1, seconds=1.0, lines=lines
        )
        return self.request(ReportFailure, host, world, failure)

    def pass_time(self, seconds):
        """Let time pass, and everything happen when it is due."""
        end = self.now + seconds
        while self.state.next_due() <= end:
            self.now = max(self.now, self.state.next_due())
            self._collect(self.state.advance(self.now))
        self.now = end

    def close(self, host):
        self._collect(self.state.disconnected(b"%d" % host, self.now))

    def start(self, hosts):
        for host in hosts:
            self.register(host)
        joined = [self.join(host) for host in hosts]
        return [one().result.plan for one in joined]

    def view(self, host):
        return self.watch(host, -1)().result

    def live(self, host, world=0, *, live=True, survivors=None, epoch=0):
        count = self.ranks if survivors is None else survivors
        return self.request(ReportLive, host, world, live, count, epoch)

    def depart(self, host, rank, cause="failed", *, world=0, survivors=0, replace=True, others=()):
        known = tuple(f"m{each}/{number}" for each, number in others)
        reply = self.request(
            ReportDeparture, host, world, f"m{host}/{rank}", cause, survivors, replace, known
        )
        return reply().result.goes_on, reply().result.replaces
