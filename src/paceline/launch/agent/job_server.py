"""Server of jobs on several hosts: their state, and the key-value stores of their ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from ipaddress import ip_address

import msgspec

from paceline._core.job_key import JobKey
from paceline.errors import UsageError
from paceline.launch.agent.job_messages import JOB_SERVICE, AnyJobRequest
from paceline.launch.agent.job_state import JobReply, JobState
from paceline.launch.agent.rendezvous_address import RendezvousAddress
from paceline.world.store.key_value_state import KEY_VALUE_SERVICE, KeyValueState
from paceline.world.store.request_messages import SentReply, encode_reply, refuse
from paceline.world.store.request_server import RequestServer

__all__ = ["JobsHandler", "serve_jobs", "world_space"]

_MAX_JOBS = 10_000

_decoder = msgspec.json.Decoder(AnyJobRequest)


def world_space(job: str, world: int) -> str:
    """Return the space of keys for the ranks of a world."""
    return f"{job}/{world}"


def serve_jobs(address: RendezvousAddress, key: JobKey | None) -> RequestServer:
    """Serve jobs at `address` until the server is closed or this process ends.

    It listens at that IP address; at all of this host's if a name is given, which may resolve differently elsewhere.

    Raises:
        UsageError: it can't listen there.
    """
    key_values = KeyValueState()
    handlers = {JOB_SERVICE: JobsHandler(key_values), KEY_VALUE_SERVICE: key_values}
    host = "127.0.0.1" if address.host == "localhost" else "*"
    with contextlib.suppress(ValueError):
        host = str(ip_address(address.host))
    try:
        return RequestServer(host, address.port, key, handlers)
    except OSError as error:
        raise UsageError(
            f"can't serve at {address}: {error.strerror}", remedy="choose another port"
        ) from None


class JobsHandler:
    """`RequestHandler` of several jobs.

    Args:
        key_values: stores of their ranks; that of a world is deleted when the next one begins.
    """

    def __init__(self, key_values: KeyValueState) -> None:
        self._key_values = key_values
        self._jobs: dict[str, JobState] = {}

    def receive(self, client: bytes, body: bytes, now: float) -> Iterable[SentReply]:
        """Handle a request of a client."""
        try:
            request = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return [(client, refuse(0, f"invalid request: {error}"))]
        job = self._jobs.get(request.job)
        if job is None:
            if len(self._jobs) >= _MAX_JOBS:
                return [(client, refuse(request.id, f"this server has had {_MAX_JOBS} jobs"))]
            job = self._jobs[request.job] = JobState()
        return self._encoded(request.job, job, job.world, job.handle(client, request, now))

    def disconnected(self, client: bytes, now: float) -> Iterable[SentReply]:
        """Note that the connection of a client is gone."""
        replies: list[SentReply] = []
        for name, job in self._jobs.items():
            replies += self._encoded(name, job, job.world, job.disconnected(client, now))
        return replies

    def advance(self, now: float) -> Iterable[SentReply]:
        """Handle what is due in all jobs."""
        replies: list[SentReply] = []
        for name, job in self._jobs.items():
            if job.next_due() <= now:
                replies += self._encoded(name, job, job.world, job.advance(now))
        return replies

    def next_due(self) -> float:
        """Return when `advance` has to be called."""
        return min((job.next_due() for job in self._jobs.values()), default=math.inf)

    def _encoded(
        self, name: str, job: JobState, before: int, replies: Iterable[JobReply]
    ) -> Iterable[SentReply]:
        if job.world != before:
            self._key_values.drop_space(world_space(name, before))
        return [
            (
                one.client,
                refuse(one.id, one.error, timeout=one.timeout)
                if one.error
                else encode_reply(one.id, one.result),
            )
            for one in replies
        ]
