"""Who waits for the centre: all who asked, until they may have it (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.star.members import Member, Members
from paceline.star.stale import Staleness

__all__ = ["Fetches"]


class Fetches:
    """Remembers who asked for which fragment, in the order in which they asked.

    Args:
        members: the workers. staleness: says who has to wait for others.
    """

    def __init__(self, members: Members, staleness: Staleness) -> None:
        self._members, self._staleness = members, staleness
        self._asked: dict[tuple[int, int], None] = {}

    def ask(self, worker: int, fragment: int) -> None:
        """Note that a worker wants a fragment; asking twice is asking once."""
        self._asked[worker, fragment] = None

    @property
    def waiting(self) -> bool:
        """Whether anybody waits."""
        return bool(self._asked)

    def free(self, revisions: dict[int, int]) -> Iterator[tuple[Member, int]]:
        """Yield all who may have the centre now; each has it when the next one is asked for.

        Args:
            revisions: of the centre, by fragment.
        """
        again = True
        while again and self._asked:
            again = False
            for worker, fragment in list(self._asked):
                member = self._members.get(worker)
                if member is None or not member.session:
                    del self._asked[worker, fragment]
                elif not self._holds(member, fragment, revisions[fragment]):
                    del self._asked[worker, fragment]
                    member.base[fragment] = revisions[fragment]
                    again = self._staleness.policy == "wait"  # others may have waited for this one
                    yield member, fragment

    def _holds(self, member: Member, fragment: int, revision: int) -> bool:
        if self._staleness.policy != "wait":
            return False
        alive = self._members.alive
        others = [
            each.base[fragment]
            for each in self._members
            if each is not member and each.number in alive and fragment in each.base
        ]
        return self._staleness.holds(member.base.get(fragment, revision), others, revision, len(alive))
