"""Ranks of a host meet: everybody tells what it is about to do, waits for the others, and learns why they don't come.

post a notice → arrive → all there?  yes: go on
                            no: look again for a moment, then sleep; now and then see whether somebody
                                ended, told of a failure, or is too late: then raise, and tell the others
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Sequence
from typing import NoReturn

from paceline._core.process_exit import ExitStatus
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm import futex
from paceline.backends.shm.control_block import ControlBlock, GroupFailure, OpNotice
from paceline.backends.shm.host_peers import HostPeers, PeerCard
from paceline.errors import CollectiveError, CollectiveTimeout, MismatchError, PeerLost, UsageError

__all__ = ["ShmBarrier"]

_LOOK_SECONDS = 0.1


class ShmBarrier:
    """The ranks of a group on this host; `index` counts them, and everything here is in that order.

    Calls block, and are made in the same order by all ranks.

    Args:
        neighbours: the connections to the others. board: the shared board.
        timeout: seconds that a call waits for a rank.
        patience: seconds to look again and again before sleeping; 0 where ranks share cores.
    """

    def __init__(self, neighbours: HostPeers, board: ControlBlock, timeout: float, patience: float) -> None:
        self.index, self.size = board.index, board.size
        self.timeout = timeout
        self.board = board
        self._neighbours, self._patience = neighbours, patience
        self._turn = 0
        self._failure: GroupFailure | None = None
        self._left = self._forked = False
        self.abandoned: CollectiveError | None = None
        """Why this rank makes no calls any more, although the group is there."""
        self._call, self._limit = OpSignature("barrier"), timeout
        _all.add(self)

    def _begin(self, call: OpSignature, notice: OpNotice) -> list[OpNotice]:
        """Post a notice, meet, and return all ranks' notices.

        Raises:
            MismatchError: ranks call different things; all ranks raise it, and the group stays usable.
            UsageError: this process is a child that a rank forked.
        """
        if self.abandoned is not None:
            raise self.abandoned
        if self._failure is not None:
            raise self.error(self._failure)
        if self._forked:
            raise UsageError(
                f"{call}: this process was forked from rank {self._neighbours.me.world_rank} and is no rank",
                remedy="fork before init, or leave collectives to the ranks themselves",
            )
        self._call, self._limit = call, self.timeout if call.timeout is None else call.timeout
        self.board.post(self._turn, notice)
        self._meet()
        notices = [self.board.read(self._turn, rank) for rank in range(self.size)]
        self._turn += 1
        for rank, other in enumerate(notices):
            if other.call != notice.call and not call.agrees(other.call):
                raise MismatchError(
                    f"this rank calls {call}, rank {self._neighbours.cards[rank].world_rank} "
                    f"calls {OpSignature.unpacked(other.call)}",
                    rank=self._neighbours.me.world_rank,
                    remedy="all ranks of a group must make the same calls in the same order",
                )
        return notices

    def _meet(self) -> None:
        """Return when everybody is here.

        Raises:
            PeerLost: a rank ended. CollectiveTimeout: one did not come in time. The group is useless then.
        """
        if not self.board.arrive():
            self._wait()
        futex.fence()
        if self.board.broken and self.board.given_up():
            self.look()

    def _wait(self) -> None:
        board = self.board
        start = time.perf_counter()
        while time.perf_counter() - start < self._patience:
            if board.all_here():
                return
        while True:
            board.sleep(_LOOK_SECONDS)
            if board.all_here():
                return
            self.look()
            if time.perf_counter() - start > self._limit:
                self._time_out()

    def look(self) -> None:
        """Raise if the group can't go on."""
        if self.abandoned is not None:
            raise self.abandoned
        if self._left:
            raise CollectiveError(f"this rank left the group during {self._call}")
        failure = self.board.failure()
        if failure is None:
            gone = self._neighbours.ended()
            if not gone or self.board.all_here():
                return
            self.board.fail(self.board.failure() or self._describe(gone))
        self._raise()

    def miss(self, indices: Collection[int]) -> bool:
        """Return whether the group failed, or one of these ranks is gone."""
        return self._left or self.board.failure() is not None or bool(self._gone(indices))

    def give_up_on(self, indices: Collection[int]) -> None:
        """Raise if the group failed, or one of these ranks is gone: a message to or from it can't come."""
        gone = self._gone(indices)
        if gone and self.board.failure() is None:
            self.board.fail(self._describe(gone))
        self.look()

    def all_gone(self, indices: Collection[int]) -> bool:
        """Return whether all of these ranks are gone."""
        return len(self._gone(indices)) == len(indices)

    def time_out_on(self, index: int) -> None:
        """Raise because a message to or from this rank took longer than the group's time-out."""
        self.board.fail(self._lateness([index], self.timeout))
        self._raise()

    def _gone(self, indices: Collection[int]) -> list[tuple[PeerCard, bool]]:
        return [
            (card, left)
            for card, left in self._neighbours.ended()
            if self._neighbours.cards.index(card) in indices
        ]

    def _describe(self, gone: Sequence[tuple[PeerCard, bool]]) -> GroupFailure:
        """Return what became of the neighbours that are gone: of the one most likely to be the cause."""
        ends = [(card, None if left else self._neighbours.exit_of(card.rank)) for card, left in gone]
        card, end = min(ends, key=lambda each: _innocence(each[1]))
        step = self.board.step_of(self._neighbours.cards.index(card))
        if end is None:
            return GroupFailure(card.world_rank, card.name, step, None, "left the group")
        return GroupFailure(card.world_rank, card.name, step, end.code, f"ended ({end})")

    def _time_out(self) -> None:
        late = self.board.late()
        if late:
            self.board.fail(self._lateness(late, self._limit))
            self._raise()

    def _lateness(self, late: Sequence[int], limit: float) -> GroupFailure:
        """Return what to say of ranks that did not come in time; the first of them is at fault."""
        cards = [self._neighbours.cards[index] for index in late]
        stopped = any(self._neighbours.stopped(card.rank) for card in cards)
        state = "its process is stopped" if stopped else "its process lives"
        names = ", ".join(f"rank {card.world_rank}" for card in cards)
        more = f"; missing in all: {names}" if len(cards) > 1 else ""
        text = f"did not come within the timeout of {limit:g} s ({state}){more}"
        step = self.board.step_of(late[0])
        return GroupFailure(cards[0].world_rank, cards[0].name, step, None, text, dead=False)

    def _raise(self) -> NoReturn:
        """Raise what was told first."""
        failure = self.board.failure()
        assert failure is not None, "somebody told"
        raise self.fail(failure)

    def error(self, failure: GroupFailure) -> CollectiveError:
        """Return the error that tells `failure` to this rank's caller."""
        kind = PeerLost if failure.dead else CollectiveTimeout
        where = f" in step {failure.step}" if failure.step >= 0 else ""
        return kind(
            f"rank {failure.rank} on host {failure.host} {failure.text}{where}, while rank "
            f"{self._neighbours.me.world_rank} was in {self._call}",
            rank=failure.rank,
            step=failure.step if failure.step >= 0 else None,
            host=failure.host,
            exit_code=failure.exit_code,
        )

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank can't go on: an error in the middle of a collective."""
        if self._failure is None and not self._left:
            me = self._neighbours.me
            text = f"gave up in {self._call}: {type(error).__name__}: {error}"
            failure = GroupFailure(me.world_rank, me.name, self.board.step, None, text[:500])
            self.board.fail(failure)
            self.fail(failure)

    def fail(self, failure: GroupFailure) -> CollectiveError:
        """Make every later call raise, and return the error."""
        self._failure = failure
        return self.error(failure)

    def someone_ended(self) -> bool:
        """Return whether a neighbour is gone; the board tells which, then."""
        try:
            self.look()
        except CollectiveError:
            return True
        return False

    def note_step(self, step: int) -> None:
        """Tell the other ranks, for their messages, which optimizer step this rank is in."""
        self.board.step = step

    def leave(self) -> None:
        """Have a call under way in another thread end soon, with an error."""
        self._left = True

    def abandon(self, reason: CollectiveError) -> None:
        """Have a call under way in another thread raise `reason` soon, and every later one at once."""
        self.abandoned = reason
        self._left = True

    def close(self) -> None:
        """Take leave."""
        self._neighbours.close()

    def forsake(self) -> None:
        """Have no more to do with the group: this is a child that was forked."""
        self._forked = True
        self._neighbours.forsake()


_all: weakref.WeakSet[ShmBarrier] = weakref.WeakSet()


def _forsake_all() -> None:
    for meeting in list(_all):
        meeting.forsake()


os.register_at_fork(after_in_child=_forsake_all)


def _innocence(end: ExitStatus | None) -> int:
    """Return how little an end tells of its cause: a signal most, leaving the group least."""
    if end is None:
        return 3
    return 0 if end.code is not None and end.code < 0 else 2 if end.code == 0 else 1
