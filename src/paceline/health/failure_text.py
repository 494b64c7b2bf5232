"""Error and log texts of an attribution: rank, host, state, what happened, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from paceline._core.format import format_seconds
from paceline._core.processes.process_exit import describe_exit
from paceline.errors import PeerFailed
from paceline.health.attribution import Attribution, RankObservation
from paceline.health.heartbeat import FailureNotice
from paceline.health.peer_endpoint import PeerEndpoint
from paceline.world.rendezvous import format_ranks

__all__ = ["failure_headline", "peer_failed"]

_PHASES = {"outside": "its own code", "data": "fetching data"}

_REMEDIES = {
    "raised": "fix the cause that its traceback shows; the other ranks only waited for it",
    "gone": "read its own output, and its host's kernel log where it was killed (dmesg)",
    "stopped": "let it run again (kill -CONT), or find what else keeps its process from running, then restart",
    "unreachable": "check whether that host runs and its network is connected, then restart",
    "cut off": "check whether this host's network is connected, then restart",
    "held": "its stack shows which call holds Python's lock: release it there, or raise stall= for such calls",
    "stalled": "its stack shows where it is; raise stall= if that may take so long",
    "finished": "make the same number of steps on all ranks (paceline.Loader does), or leave the Watchdog together",
    "elsewhere": "make the same collective calls in the same order on all ranks",
}


def peer_failed(
    failure: Attribution,
    endpoints: Sequence[PeerEndpoint],
    observations: Sequence[RankObservation],
    notices: Sequence[FailureNotice],
) -> PeerFailed:
    """Return the error that reports a failure, with the state and stack of the rank."""
    if failure.rank is None:
        hosts = len({endpoint.host_key for endpoint in endpoints})
        host = endpoints[failure.others[0]].host if failure.others else ""
        return PeerFailed(
            f"this host ({host or '?'}) has received nothing from any of the {hosts - 1} others for "
            f"{format_seconds(failure.seconds)}: its network seems to be cut off",
            host=host,
            remedy=_REMEDIES["cut off"],
            kind="cut off",
        )
    endpoint = endpoints[failure.rank]
    step, phase, bucket = _state(failure, observations, notices)
    stack = _stack(failure, notices)
    indented = "".join(f"\n  | {line}" for line in stack.splitlines())
    return PeerFailed(
        failure_headline(failure, endpoints, observations, notices) + indented,
        rank=failure.rank,
        step=step,
        remedy=_REMEDIES[failure.kind],
        host=endpoint.host,
        exit_code=_exit_code(failure.rank, notices),
        pid=endpoint.pid,
        phase=phase,
        bucket=bucket,
        kind=failure.kind,
        stack=stack,
    )


def failure_headline(
    failure: Attribution,
    endpoints: Sequence[PeerEndpoint],
    observations: Sequence[RankObservation],
    notices: Sequence[FailureNotice],
) -> str:
    """Return rank, host, process, state and failure in one line."""
    assert failure.rank is not None, "of a single rank"
    endpoint = endpoints[failure.rank]
    _, phase, bucket = _state(failure, observations, notices)
    where = f", in {_PHASES.get(phase, phase)}" if phase else ""
    where += f", bucket {bucket}" if bucket >= 0 else ""
    others = f"; likewise ranks {format_ranks(sorted(failure.others))}" if failure.others else ""
    return (
        f"rank {endpoint.rank} on host {endpoint.host} (process {endpoint.pid}{where}) "
        f"{_event(failure, notices)}{others}"
    )


def _event(failure: Attribution, notices: Sequence[FailureNotice]) -> str:
    rank, seconds = failure.rank, format_seconds(max(0.1, round(failure.seconds, 1)))
    waiter = f"rank {failure.waiting}" if failure.waiting is not None else "others"
    waits = "waits" if failure.waiting is not None else "wait"
    if failure.kind == "raised":
        name = next((each.name for each in notices if each.kind == "raised" and each.rank == rank), "")
        return f"raised {name or 'an exception'}"
    if failure.kind == "gone":
        code = _exit_code(rank, notices)
        if code is None:
            return "ended; its exit code is unknown"
        return describe_exit(code) + (" (the kernel does this when memory runs out)" if code == -9 else "")
    return {
        "stopped": f"has been stopped for {seconds}, while {waiter} {waits} for it",
        "unreachable": f"has been out of reach for {seconds}: its host is down or cut off",
        "held": f"has held Python's lock for {seconds}, while {waiter} {waits} for it",
        "stalled": f"has stood still for {seconds}, while {waiter} {waits} for it",
        "finished": f"has left its loop; {waiter} waited {seconds} for it",
        "elsewhere": f"has waited {seconds} for something else than {waiter}",
    }[failure.kind]


def _exit_code(rank: int | None, notices: Sequence[FailureNotice]) -> int | None:
    codes = (each.code for each in notices if each.kind == "gone" and each.rank == rank)
    return next((code for code in codes if code is not None), None)


def _state(
    failure: Attribution, observations: Sequence[RankObservation], notices: Sequence[FailureNotice]
) -> tuple[int | None, str, int]:
    """Return step, phase and bucket as the rank itself last reported them.

    The last heartbeat of a rank that is silent is somewhat old. Where others report a later step, the rank had
    reached it too: all ranks take part in the round before.
    """
    for notice in notices:
        if notice.rank == failure.rank and notice.kind in ("raised", "done"):
            return notice.step, notice.phase, notice.bucket
    latest = next((each.heartbeat for each in observations if each.rank == failure.rank), None)
    current = failure.kind in ("stalled", "elsewhere")
    reached = [] if current else [each.heartbeat.step for each in observations if each.heartbeat is not None]
    if reached and (latest is None or max(reached) > latest.step):
        return max(reached), "", -1
    if latest is None:
        return None, "", -1
    return latest.step, latest.task or latest.phase, latest.bucket


def _stack(failure: Attribution, notices: Sequence[FailureNotice]) -> str:
    kinds = ("stack", "thread")
    if failure.kind == "raised":
        kinds = ("raised",)
    elif failure.kind in ("gone", "unreachable"):
        kinds = ("thread",)
    return "\n".join(
        each.text for each in notices if each.rank == failure.rank and each.kind in kinds and each.text
    )
