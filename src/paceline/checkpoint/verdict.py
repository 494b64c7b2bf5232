"""Which parameter differs between ranks, and who has not what most have: pure, over digests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.world.rollcall import ranges

__all__ = ["Verdict", "judge"]


@dataclass(frozen=True)
class Verdict:
    """What differs.

    Attributes:
        name: the first thing that differs. differing: how many do. of: how many were compared.
        ranks: those that hold another `name` than most; where no value has a majority, than rank 0.
        majority: whether more than half of the ranks hold the same `name`.
    """

    name: str
    differing: int
    of: int
    ranks: tuple[int, ...]
    majority: bool

    def __str__(self) -> str:
        noun, verb = ("rank", "holds") if len(self.ranks) == 1 else ("ranks", "hold")
        others = "the majority" if self.majority else "rank 0"
        more = f"; {self.differing} of {self.of} differ" if self.differing > 1 else ""
        return f"{noun} {ranges(self.ranks)} {verb} another {self.name} than {others}{more}"


def judge(names: Sequence[str], digests_of_rank: Sequence[Sequence[int]]) -> Verdict | None:
    """Return what differs between ranks, None where nothing does.

    Args:
        names: of what was compared. digests_of_rank: for every rank, one digest per name.

    Example:
        >>> print(judge(["parameter 'a'", "parameter 'b'"], [[1, 2], [1, 2], [1, 3]]))
        rank 2 holds another parameter 'b' than the majority
    """
    differing = [
        at
        for at, held in enumerate(zip(*digests_of_rank, strict=True))
        if any(each != held[0] for each in held)
    ]
    if not differing:
        return None
    held = [digests[differing[0]] for digests in digests_of_rank]
    ((usual, count),) = Counter(held).most_common(1)
    majority = 2 * count > len(held)
    reference = usual if majority else held[0]
    ranks = tuple(rank for rank, digest in enumerate(held) if digest != reference)
    return Verdict(names[differing[0]], len(differing), len(names), ranks, majority)
