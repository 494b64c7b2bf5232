"""A collective as data: `Schedule`, rounds of `Send`.

Every rank has a vector cut into `chunks` of equal size. In a round all sends happen at once and read what their
sender held when the round began; a rank goes on to its next round when all it sends and receives in this one is
done. What a send does to the receiver's chunk is to replace it, or to be added to it.

Readers of a schedule: `prove` (every input exactly once), `cost` (seconds on a topology), `run` (real messages),
`tell` (in words), `report.rounds` (a picture).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.errors import UsageError

__all__ = ["Message", "Round", "Rounds", "Schedule", "Send", "mirrored", "pipelined", "rotated"]


class Send(NamedTuple):
    """A run of adjacent chunks that goes from one rank to another.

    Attributes:
        src, dst: ranks.
        chunk: index of the first chunk.
        add: added to what `dst` holds, instead of replacing it.
        width: how many chunks.
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


Round = Sequence[Send]
Rounds = list[list[Send]]


class Message(NamedTuple):
    """All that goes from one rank to another in one round; it costs one latency."""

    src: int
    dst: int
    sends: tuple[Send, ...]

    @property
    def chunks(self) -> int:
        """How many chunks it holds."""
        return sum(send.width for send in self.sends)


@dataclass(frozen=True)
class Schedule:
    """A collective operation, carried out by one algorithm on a number of ranks.

    Attributes:
        op: such as ``"all-reduce"``; `paceline.collectives.prove` says what each has to achieve.
        algorithm: such as ``"ring"``.
        ranks: how many take part.
        chunks: into how many the vector is cut; all-to-all: the vectors of all ranks together.
        rounds: what is sent, round by round.
        root: the rank that a broadcast, reduce, scatter or gather is about.
    """

    op: str
    algorithm: str
    ranks: int
    chunks: int
    rounds: tuple[tuple[Send, ...], ...]
    root: int = 0

    def __str__(self) -> str:
        return f"{self.op} by {self.algorithm} on {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    @property
    def parts(self) -> int:
        """How many chunks make the vector whose size counts (see `closed_form`): all, or one rank's share."""
        return {"all-to-all": self.chunks // self.ranks, "send-recv": self.chunks // self.ranks}.get(
            self.op, self.chunks
        )

    def messages(self, number: int) -> list[Message]:
        """Return the messages of round `number`."""
        sends_of_pair: dict[tuple[int, int], list[Send]] = {}
        for send in self.rounds[number]:
            sends_of_pair.setdefault((send.src, send.dst), []).append(send)
        return [Message(src, dst, tuple(sends)) for (src, dst), sends in sends_of_pair.items()]


def mirrored(rounds: Iterable[Round]) -> Rounds:
    """Return the rounds backwards, every send the other way round and replacing: what was gathered is spread.

    So the mirror image of a reduce is a broadcast, and that of a reduce-scatter is an all-gather.
    """
    return [
        [Send(send.dst, send.src, send.chunk, width=send.width) for send in sends]
        for sends in reversed(list(rounds))
    ]


def rotated(rounds: Iterable[Round], by: int, ranks: int, *, chunks: bool = False) -> Rounds:
    """Return the rounds with every rank's part played by the rank `by` places further.

    With `chunks`, chunk r belongs to rank r and moves with it; a run that would leave the vector goes on at its start.
    """
    return [[turned for send in sends for turned in _turned(send, by, ranks, chunks)] for sends in rounds]


def _turned(send: Send, by: int, ranks: int, chunks: bool) -> Iterator[Send]:
    src, dst = (send.src + by) % ranks, (send.dst + by) % ranks
    first = (send.chunk + by) % ranks if chunks else send.chunk
    fits = min(send.width, ranks - first) if chunks else send.width
    yield Send(src, dst, first, send.add, fits)
    if fits < send.width:
        yield Send(src, dst, 0, send.add, send.width - fits)


def pipelined(schedule: Schedule, segments: int) -> Schedule:
    """Return a schedule in which every chunk travels in `segments` pieces, each one round behind the one before.

    That is how a chain becomes fast: all its links work at the same time.

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
            rounds[number + segment] += _pieces(sends, segment, segments)
    return replace(schedule, chunks=schedule.chunks * segments, rounds=tuple(map(tuple, rounds)))


def _pieces(sends: Round, segment: int, segments: int) -> Iterator[Send]:
    for send in sends:
        for chunk in send.range:
            yield Send(send.src, send.dst, chunk * segments + segment, send.add)
