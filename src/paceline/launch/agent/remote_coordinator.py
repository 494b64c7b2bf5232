"""Access of a host's agent to a job's state on another host, or in another thread: `job_server`."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from paceline._core.job_key import JobKey
from paceline._core.processes.child_process import POLL_SECONDS, ChildProcess
from paceline.errors import WorldError
from paceline.launch.agent.coordinator import Coordinator, JoinTimeout
from paceline.launch.agent.job_messages import (
    JOB_SERVICE,
    AnyJobRequest,
    JobView,
    JoinWorld,
    WatchJob,
)
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.rendezvous_address import RendezvousAddress
from paceline.launch.agent.restart_log import log_line
from paceline.world.store.request_client import Connection, ConnectionLost
from paceline.world.store.request_messages import ServerReply

__all__ = ["RemoteCoordinator"]

_ANSWER_SECONDS = 10.0
_AGAIN_SECONDS = 3.0  # in which a broken connection must be made again
_WATCH_SECONDS = 600.0
_QUIET_SECONDS = 3.0  # before it is logged that hosts are missing


class RemoteCoordinator(Coordinator):
    """State of a job on a server.

    One request is always open there, which is answered when the state changes. A broken connection is made again once,
    and what had no answer is requested again; every request may come twice.

    Args:
        job: whose state it is.
        member: id of this host's agent.
        address: of the server.
        key: of the job; None: the server has none either.

    Raises:
        WorldError: the server at the address is no rendezvous of this job.
    """

    def __init__(self, job: JobSpec, member: str, address: RendezvousAddress, key: JobKey | None) -> None:
        super().__init__(job, member)
        self._address, self._key = address, key
        self._view: JobView | None = None
        self._seen = -1  # the news of the view that was last returned
        self._watch: WatchJob | None = None
        self._quiet = -1  # id of the request for the view that is logged while hosts are missing
        self._connection = Connection(address.host, address.port, key)
        try:
            self._refresh()
        except ConnectionLost as error:
            self._connection.close()
            raise WorldError(
                f"the server at {address} is not a rendezvous of this job: {error}",
                remedy="give every host the same job key (PACELINE_JOB_KEY_FILE), or choose another port",
            ) from None

    def view(self) -> JobView:
        self._handle_replies()
        assert self._view is not None, "requested by the constructor"
        self._seen = self._view.news
        return self._view

    def wait(self, running: Sequence[ChildProcess], seconds: float) -> None:
        self._handle_replies()
        if self._view is None or self._view.news != self._seen:
            return
        poller = zmq.Poller()
        self._connection.register(poller)
        with contextlib.ExitStack() as files:
            for one in running:
                if one.exit_code() is not None:
                    continue
                if not hasattr(os, "pidfd_open"):
                    seconds = min(seconds, POLL_SECONDS)
                    break
                pidfd = os.pidfd_open(one.process.pid)
                files.callback(os.close, pidfd)
                poller.register(pidfd, zmq.POLLIN)
            poller.poll(math.ceil(seconds * 1000))

    def close(self) -> None:
        self._connection.close()

    def _ask(self, request: AnyJobRequest, kind: Any = Any) -> Any:
        joins = isinstance(request, JoinWorld)
        self._connection.send(JOB_SERVICE, request)
        deadline = math.inf if joins else time.monotonic() + _ANSWER_SECONDS
        quiet_until = time.monotonic() + _QUIET_SECONDS if joins and self._job.hosts > 1 else math.inf
        while True:
            left = min(deadline, quiet_until) - time.monotonic()
            try:
                reply = self._connection.receive(max(0.0, min(left, _WATCH_SECONDS)))
            except ConnectionLost:
                self._reconnect()
                self._connection.send(JOB_SERVICE, request)
                continue
            if reply is not None and reply.id == request.id:
                if reply.timeout:
                    raise JoinTimeout(reply.error)
                if reply.error:
                    raise ConnectionLost(reply.error)
                return msgspec.convert(reply.result, kind)
            if reply is not None:
                self._take_view(reply)
            elif time.monotonic() >= deadline:
                raise ConnectionLost(f"no answer for {_ANSWER_SECONDS:g} s")
            elif time.monotonic() >= quiet_until:
                quiet_until = math.inf
                self._connection.send(JOB_SERVICE, self._new_watch(news=-1))
                self._quiet = self._last_id

    def _handle_replies(self) -> None:
        """Take a new view if there is one, and keep a request for the next one open."""
        try:
            while (reply := self._connection.receive(0.0)) is not None:
                self._take_view(reply)
            if self._watch is None and self._view is not None:
                self._connection.send(JOB_SERVICE, self._new_watch(self._view.news))
        except ConnectionLost:
            self._reconnect()

    def _take_view(self, reply: ServerReply) -> None:
        if self._watch is None or reply.id != self._watch.id or reply.error:
            return
        self._watch = None
        self._view = msgspec.convert(reply.result, JobView)
        if reply.id == self._quiet and self._view.world < 0:
            log_line(f"waiting for hosts: {self._view.joined} of {self._job.hosts} joined")

    def _new_watch(self, news: int) -> WatchJob:
        self._watch = WatchJob(*self._head(), news, _WATCH_SECONDS)
        return self._watch

    def _refresh(self) -> None:
        """Request the present view, and wait for it."""
        watch = self._new_watch(news=-1)
        self._connection.send(JOB_SERVICE, watch)
        deadline = time.monotonic() + 2 * _ANSWER_SECONDS
        while self._watch is watch:
            reply = self._connection.receive(max(0.0, deadline - time.monotonic()))
            if reply is None:
                raise ConnectionLost("it does not answer")
            if reply.error and reply.id == watch.id:
                raise ConnectionLost(reply.error)
            self._take_view(reply)

    def _reconnect(self) -> None:
        """Connect again, and refresh the view: changes may have been missed."""
        self._connection.close()
        self._connection = Connection(self._address.host, self._address.port, self._key, _AGAIN_SECONDS)
        self._refresh()
