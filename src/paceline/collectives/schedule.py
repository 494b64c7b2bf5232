"""A collective as data: a `Schedule` is rounds of `Send`.

Every rank holds a vector that is cut into chunks of equal size. All sends of a round run at the same time and read
their sender's chunks as of the beginning of the round. A rank enters its next round once everything that it sends and
receives in this one is done. A send replaces the receiver's chunk, or is added to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline._core.format import plural
from paceline.errors import UsageError

__all__ = ["Message", "Rounds", "Schedule", "Send", "mirrored", "pipelined", "rotated"]


class Send(NamedTuple):
    """A run of adjacent chunks that goes from one rank to another.

    Attributes:
        src: sending rank.
        dst: receiving rank.
        chunk: index of the first chunk.
        add: added to the chunk that `dst` holds, instead of replacing it.
        width: number of chunks.
    """

    src: int
    dst: int
    chunk: int
    add: bool = False
    width: int = 1

    @property
    def range(self) -> range:
        """Indices of its chunks."""
        return range(self.chunk, self.chunk + self.width)


Rounds = list[list[Send]]


class Message(NamedTuple):
    """Everything that goes from one rank to another in one round; it costs one latency."""

    src: int
    dst: int
    sends: tuple[Send, ...]

    @property
    def chunks(self) -> int:
        """Number of chunks that it carries."""
        return sum(send.width for send in self.sends)


@dataclass(frozen=True)
class Schedule:
    """A collective operation, carried out by one algorithm on a number of ranks.

    Attributes:
        op: such as ``"all-reduce"``; `paceline.collectives.prove` defines its result.
        algorithm: such as ``"ring"``.
        ranks: number of ranks.
        chunks: number of chunks of the vector; all-to-all: of the vectors of all ranks together.
        rounds: the sends, round by round.
        root: root of a broadcast, reduce, scatter or gather.
    """

    op: str
    algorithm: str
    ranks: int
    chunks: int
    rounds: tuple[tuple[Send, ...], ...]
    root: int = 0

    def __str__(self) -> str:
        return f"{self.op} by {self.algorithm} on {plural(self.ranks, 'rank')}"

    @property
    def parts(self) -> int:
        """Number of chunks of the vector whose size counts (see `closed_form`): all, or one rank's share."""
        return self.chunks // self.ranks if self.op in ("all-to-all", "send-recv") else self.chunks

    def messages(self, number: int) -> list[Message]:
        """Return the messages of round `number`."""
        sends_of_pair: dict[tuple[int, int], list[Send]] = {}
        for send in self.rounds[number]:
            sends_of_pair.setdefault((send.src, send.dst), []).append(send)
        return [Message(src, dst, tuple(sends)) for (src, dst), sends in sends_of_pair.items()]


def mirrored(rounds: Iterable[Sequence[Send]]) -> Rounds:
    """Return the rounds backwards, every send in the other direction and replacing.

    The mirror image of a reduce is a broadcast, and that of a reduce-scatter is an all-gather.
    """
    return [
        [Send(send.dst, send.src, send.chunk, width=send.width) for send in sends]
        for sends in reversed(list(rounds))
    ]


def rotated(rounds: Iterable[Sequence[Send]], by: int, ranks: int, *, chunks: bool = False) -> Rounds:
    """Return the rounds with rank r's part played by rank r + `by`, modulo `ranks`.

    With `chunks`, chunk r belongs to rank r and moves with it; a run past the last chunk continues at the first.
    """
    return [[turned for send in sends for turned in _rotated(send, by, ranks, chunks)] for sends in rounds]


def _rotated(send: Send, by: int, ranks: int, chunks: bool) -> Iterator[Send]:
    src, dst = (send.src + by) % ranks, (send.dst + by) % ranks
    first = (send.chunk + by) % ranks if chunks else send.chunk
    fits = min(send.width, ranks - first) if chunks else send.width
    yield Send(src, dst, first, send.add, fits)
    if fits < send.width:
        yield Send(src, dst, 0, send.add, send.width - fits)


def pipelined(schedule: Schedule, segments: int) -> Schedule:
    """Return a schedule in which every chunk travels in segments, each one round behind the one before.

    All links of a chain then work at the same time.

    Raises:
        UsageError: fewer than one segment.
    """
    if segments < 1:
        raise UsageError(f"segments={segments}: a chunk has at least one", remedy="give 1 or more")
    if segments == 1:
        return schedule
    rounds: Rounds = [[] for _ in range(len(schedule.rounds) + segments - 1)] if schedule.rounds else []
    for number, sends in enumerate(schedule.rounds):
        for segment in range(segments):
            rounds[number + segment] += [
                Send(send.src, send.dst, chunk * segments + segment, send.add)
                for send in sends
                for chunk in send.range
            ]
    return replace(schedule, chunks=schedule.chunks * segments, rounds=tuple(map(tuple, rounds)))
