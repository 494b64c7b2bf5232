"""A host's part in a run: find the rendezvous or serve it, run the agent, leave, say why if it did not end well."""

from __future__ import annotations

import contextlib
import os
import time

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from paceline.errors import WorldError
from paceline.launch.agent.elastic_agent import ElasticAgent, JobEnded
from paceline.launch.agent.elastic_rendezvous import (
    STORE_TIMEOUT_SECONDS,
    RendezvousEndpoint,
    StoreHeartbeat,
    join_rendezvous,
    open_endpoint,
    open_job_store,
)
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.job_store import JobStore, too_few_hosts
from paceline.launch.agent.restart_log import log_line
from paceline.launch.process.rank_process import RankLogs

__all__ = ["run_host"]

_LINGER_SECONDS = 5.0  # whoever serves the rendezvous waits so long for the others to hear of the end


_LOOK_SECONDS = 0.05


def run_host(job: JobSpec, logs: RankLogs) -> None:
    """Run the ranks of this host; errors are those of :func:`paceline.launch.agent.elastic_run.run_job`."""
    place = open_endpoint(job)
    serving = place.served is not None
    try:
        board = open_job_store(job, place)
        board.arrive(job)
        agent = ElasticAgent(
            job, join_rendezvous(job, place, place.store(), late=board.begun()), board, logs, serving=serving
        )
        pulse = None if serving else StoreHeartbeat(place, lambda: _lost_in_silence(place, agent, logs))
        try:
            agent.run()
        finally:
            if pulse:
                pulse.stop()
            _part(board, agent.hosts if serving else 0)
    except JobEnded as told:
        if told.over.code:
            raise told.over.error() from None
        log_line("the run ended well while this host waited to be let in")
    except RendezvousTimeoutError:
        raise too_few_hosts(job) from None
    except (DistError, RendezvousConnectionError) as error:
        raise _lost(place, str(error.__cause__ or error).splitlines()[0]) from None


def _part(board: JobStore, hosts: int) -> None:
    """Leave the store; whoever serves it lets `hosts` hosts hear of the end first."""
    with contextlib.suppress(DistError):
        board.leave()
        deadline = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < deadline and board.left() < hosts:
            time.sleep(_LOOK_SECONDS)


def _lost(place: RendezvousEndpoint, why: str) -> WorldError:
    return WorldError(
        f"the rendezvous at {place.address} was lost: {why}",
        remedy="the host there has ended or is out of reach, and the run with it; "
        "served by a host that does not train (paceline run --serve), it outlives any host that does",
    )


def _lost_in_silence(place: RendezvousEndpoint, agent: ElasticAgent, logs: RankLogs) -> None:
    """End this process, whose main thread waits for an answer that does not come."""
    agent.kill()
    log_line(f"Error: {_lost(place, f'no answer for {STORE_TIMEOUT_SECONDS} s')}")
    logs.__exit__(None, None, None)
    os._exit(1)
