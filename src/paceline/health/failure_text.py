"""What a verdict says to people: one error, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from paceline._core.format import format_seconds
from paceline._core.process_exit import describe_exit
from paceline.errors import PeerFailed
from paceline.health.attribution import Attribution, RankObservation
from paceline.health.heartbeat import FailureNotice
from paceline.health.peer_mesh import MeshCard
from paceline.world.rendezvous import format_ranks

__all__ = ["error_of", "headline"]

_NAMES = {"outside": "its own code", "data": "fetching data"}

_REMEDY = {
    "raised": "correct what its traceback says; the other ranks only waited for it",
    "gone": "look at its own output, and at its host's kernel log where it was killed (dmesg)",
    "stopped": "let it go on (kill -CONT), or see what else keeps its process from running, then start again",
    "unreachable": "see whether that host runs and its network is connected, then start again",
    "cut off": "see whether this host's network is connected, then start again",
    "held": "its stack shows which call holds Python's lock: let it release that, or raise stall= if it takes so long",
    "stalled": "its stack shows where it stands; raise stall= if that may take so long",
    "finished": "let all ranks make equally many steps (paceline.Loader does), or leave the Watch together",
    "elsewhere": "let all ranks make the same collective calls in the same order",
}


def error_of(
    verdict: Attribution,
    cards: Sequence[MeshCard],
    seen: Sequence[RankObservation],
    notices: Sequence[FailureNotice],
) -> PeerFailed:
    """Return the error that tells `verdict`, with where the rank was and what it stands in."""
    if verdict.rank is None:
        hosts = len({card.key for card in cards})
        return PeerFailed(
            f"this host ({cards[verdict.others[0]].host if verdict.others else '?'}) has heard from none "
            f"of the {hosts - 1} others for {format_seconds(verdict.seconds)}: it seems to be cut off",
            host=cards[verdict.others[0]].host if verdict.others else "",
            remedy=_REMEDY["cut off"],
            kind="cut off",
        )
    rank, card = verdict.rank, cards[verdict.rank]
    step, phase, bucket = _place(verdict, seen, notices)
    code = next(iter(_codes(rank, notices)), None)
    stack = _stack(verdict, notices)
    text = headline(verdict, cards, seen, notices)
    return PeerFailed(
        text + (f"\n{_indented(stack)}" if stack else ""),
        rank=rank,
        step=step,
        remedy=_REMEDY[verdict.kind],
        host=card.host,
        exit_code=code,
        pid=card.pid,
        phase=phase,
        bucket=bucket,
        kind=verdict.kind,
        stack=stack,
    )


def headline(
    verdict: Attribution,
    cards: Sequence[MeshCard],
    seen: Sequence[RankObservation],
    notices: Sequence[FailureNotice],
) -> str:
    """Return who, what and where in one line."""
    assert verdict.rank is not None, "of a single rank"
    card = cards[verdict.rank]
    _, phase, bucket = _place(verdict, seen, notices)
    where = f", in {_NAMES.get(phase, phase)}" if phase else ""
    where += f", bucket {bucket}" if bucket >= 0 else ""
    others = f"; so with ranks {format_ranks(sorted(verdict.others))}" if verdict.others else ""
    return (
        f"rank {card.rank} on host {card.host} (process {card.pid}{where}) {_what(verdict, notices)}{others}"
    )


def _what(verdict: Attribution, notices: Sequence[FailureNotice]) -> str:
    rank, seconds = verdict.rank, format_seconds(max(0.1, round(verdict.seconds, 1)))
    whom = f"rank {verdict.waiting}" if verdict.waiting is not None else "others"
    if verdict.kind == "raised":
        name = next((each.name for each in notices if each.kind == "raised" and each.rank == rank), "")
        return f"raised {name or 'an exception'}"
    if verdict.kind == "gone":
        codes = _codes(rank, notices)
        if not codes:
            return "ended; nobody can tell how"
        killed = " (the kernel does so where memory runs out)" if codes[0] == -9 else ""
        return describe_exit(codes[0]) + killed
    return {
        "stopped": f"has been stopped for {seconds}, while {whom} waits for it",
        "unreachable": f"has been out of reach for {seconds}: its host is down or cut off",
        "held": f"has held Python's lock for {seconds}, while {whom} waits for it",
        "stalled": f"has stood still for {seconds}, while {whom} waits for it",
        "finished": f"has left its loop, and {whom} has waited for it for {seconds}",
        "elsewhere": f"has waited for something else than {whom} for {seconds}",
    }[verdict.kind]


def _codes(rank: int | None, notices: Sequence[FailureNotice]) -> list[int]:
    """Return the exit codes of a rank's process that somebody could tell."""
    ends = [each for each in notices if each.kind == "gone" and each.rank == rank]
    return [each.code for each in ends if each.code is not None]


def _place(
    verdict: Attribution, seen: Sequence[RankObservation], notices: Sequence[FailureNotice]
) -> tuple[int | None, str, int]:
    """Return step, phase and bucket: as the rank itself told it last.

    Of a rank that is heard no more, that was a moment ago. The steps of the others show how far it had come: each of
    them has been through the round before, in which all take part.
    """
    for each in notices:
        if each.rank == verdict.rank and each.kind in ("raised", "done"):
            return each.step, each.phase, each.bucket
    row = seen[verdict.rank or 0].row
    heard = verdict.kind in ("stalled", "elsewhere")
    reached = [] if heard else [each.row.step for each in seen if each.row is not None]
    if reached and (row is None or max(reached) > row.step):
        return max(reached), "", -1
    if row is None:
        return None, "", -1
    return row.step, row.task or row.phase, row.bucket


def _stack(verdict: Attribution, notices: Sequence[FailureNotice]) -> str:
    kinds = ("raised",) if verdict.kind == "raised" else ("stack", "thread")
    told = [each for each in notices if each.rank == verdict.rank and each.kind in kinds and each.text]
    if verdict.kind in ("gone", "unreachable"):
        told = [each for each in told if each.kind == "thread"]
    return "\n".join(each.text for each in told)


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
