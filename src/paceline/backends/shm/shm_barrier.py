"""Barriers of the ranks of a host: every rank announces its next collective, waits for the others, or learns why not.

post a notice → arrive → all arrived?  yes: continue
                                       no: poll or yield for a moment, then sleep; now and then check whether a rank
                                           ended, posted a failure or timed out: then raise, and post the failure

A rank with its own core polls for a moment. Then it yields its core (sched_yield), for the rank that it waits for may
be the next one there, and then it sleeps: a sleep and a wake by the kernel take several times as long as an exchange.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Collection, Sequence
from typing import NoReturn

from paceline._core.processes.process_exit import ExitStatus
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm import futex
from paceline.backends.shm.control_block import ControlBlock, GroupFailure, OpNotice
from paceline.backends.shm.peer_sockets import HostPeers, PeerInfo
from paceline.errors import CollectiveError, CollectiveTimeout, PeerLost, UsageError

__all__ = ["ShmBarrier"]

_CHECK_SECONDS = 0.1

SPIN_SECONDS = 5e-6
"""How long a rank with its own core polls before it yields that core: most waits of ranks in step end before."""

YIELD_SECONDS = 200e-6
"""How long a rank lets others run on its core, in all, before it sleeps: about twice the time that waking up takes."""

BACKGROUND_YIELD_SECONDS = 10e-6
"""The same for a call that runs beside the program: polling would take the core from it."""


class ShmBarrier:
    """Barriers and failures of the ranks of a group on this host, which are numbered in that order here.

    Calls block, and all ranks make them in the same order.

    Args:
        peers: connections to the other ranks.
        control: the shared control block.
        timeout: seconds that a call waits for a rank.
        cores: that the ranks of this host may use.

    Attributes:
        interrupted: the error that every call raises, although the group still exists; None: it works.
    """

    def __init__(self, peers: HostPeers, control: ControlBlock, timeout: float, *, cores: float) -> None:
        self.index, self.size = control.index, control.size
        self.timeout, self.control = timeout, control
        self._peers = peers
        share = math.ceil(self.size / cores)
        self._waits = {
            False: (SPIN_SECONDS if share == 1 else 0.0, YIELD_SECONDS),
            True: (0.0, BACKGROUND_YIELD_SECONDS),
        }
        shares = {False: share, True: self.size}
        self._views = {each: control.compiled(*self._waits[each], shares[each]) for each in shares}
        self.set_background(False)
        self._turn = 0
        self._failure: GroupFailure | None = None
        self._cancelled = self._forked = False
        self.interrupted: CollectiveError | None = None
        self._call, self._call_timeout = OpSignature("barrier"), timeout
        _instances.add(self)

    def set_background(self, background: bool) -> None:
        """Set whether the calls from now on run beside the program, which computes on the same cores meanwhile."""
        self._spin, self._yielding = self._waits[background]
        self._compiled = self._views[background]

    def _start_call(self, call: OpSignature, notice: OpNotice) -> None:
        """Post a notice, and wait for those of all ranks.

        Raises:
            MismatchError: ranks call different collectives; all ranks raise it, and the group stays usable.
            UsageError: this process was forked from a rank.
        """
        self._check_usable(call)
        if self._compiled is not None:
            same = self._compiled.start(self._turn, *notice, self._attend)
        else:
            self.control.post_notice(self._turn, notice)
            self._wait_all()
            same = False
        self._turn += 1
        if not same:
            self._check_match(call)

    def _check_usable(self, call: OpSignature) -> None:
        """Raise if the group makes no more calls; else this is its call from now on."""
        if self.interrupted is not None:
            raise self.interrupted
        if self._failure is not None:
            raise self._error(self._failure)
        if self._forked:
            raise UsageError(
                f"{call}: this process was forked from rank {self._peers.me.world_rank} and is not a rank",
                remedy="fork before init, or leave collectives to the ranks themselves",
            )
        self._call, self._call_timeout = call, self.timeout if call.timeout is None else call.timeout

    def _notices(self) -> list[OpNotice]:
        """Return the notices of all ranks for the call that has started."""
        return [self.control.read_notice(self._turn - 1, rank) for rank in range(self.size)]

    def _check_match(self, call: OpSignature) -> None:
        """Raise MismatchError unless all ranks made the call that has started."""
        packed = call.pack()
        for rank, other in enumerate(self._notices()):
            if other.call != packed and not call.matches(other.call):
                me, peer = self._peers.me, self._peers.peers[rank]
                raise call.mismatch(other.call, me=me.world_rank, other=peer.world_rank)

    def _wait_all(self) -> None:
        """Return when all ranks have arrived.

        Raises:
            PeerLost: a rank ended. The group is unusable from then on.
            CollectiveTimeout: a rank did not arrive in time. The group is unusable from then on.
        """
        if self._compiled is not None:
            self._compiled.wait(self._attend)
            return
        if not self.control.arrive():
            self._wait()
        futex.fence()
        if self.control.failed:
            self._attend(-1.0)

    def _wait(self) -> None:
        control = self.control
        start = time.perf_counter()
        while time.perf_counter() - start < self._spin:
            if control.all_arrived():
                return
        while time.perf_counter() - start < self._yielding:
            os.sched_yield()
            if control.all_arrived():
                return
        while True:
            control.sleep(_CHECK_SECONDS)
            if control.all_arrived():
                return
            self._attend(time.perf_counter() - start)

    def _attend(self, waited: float) -> None:
        """Raise if the call can't continue.

        Args:
            waited: seconds that this rank has slept at the barrier; −1: all ranks have arrived, and one has failed.
        """
        if waited < 0:
            if self.control.barrier_failed():
                self.check()
            return
        self.check()
        if waited > self._call_timeout and (missing := self.control.missing()):
            self._raise(self._timeout_failure(missing, self._call_timeout))

    def check(self) -> None:
        """Raise if the group can't continue."""
        if self.interrupted is not None:
            raise self.interrupted
        if self._cancelled:
            raise CollectiveError(f"this rank left the group during {self._call}")
        failure = self.control.first_failure()
        if failure is not None:
            raise self.set_failed(failure)
        gone = self._peers.gone()
        if gone and not self.control.all_arrived():
            self._raise(self.control.first_failure() or self._exit_failure(gone))

    # For messages from one rank to another.

    def has_failed(self, indices: Collection[int]) -> bool:
        """Return whether the group failed, or one of these ranks is gone."""
        return self._cancelled or self.control.first_failure() is not None or bool(self._gone(indices))

    def check_peers(self, indices: Collection[int]) -> None:
        """Raise if the group failed, or one of these ranks is gone: a message to or from it can't complete."""
        gone = self._gone(indices)
        if gone and self.control.first_failure() is None:
            self.control.post_failure(self._exit_failure(gone))
        self.check()

    def all_gone(self, indices: Collection[int]) -> bool:
        """Return whether all of these ranks are gone."""
        return len(self._gone(indices)) == len(indices)

    def raise_timeout(self, index: int) -> NoReturn:
        """Raise because a message to or from this rank exceeded the group's time-out."""
        self._raise(self._timeout_failure([index], self.timeout))

    def _gone(self, indices: Collection[int]) -> list[tuple[PeerInfo, bool]]:
        return [(peer, left) for peer, left in self._peers.gone() if self._peers.peers.index(peer) in indices]

    # Failures.

    def _exit_failure(self, gone: Sequence[tuple[PeerInfo, bool]]) -> GroupFailure:
        """Return the failure of the peer that is most likely the cause, of those that are gone."""
        ends = [(peer, None if left else self._peers.exit_status(peer.rank)) for peer, left in gone]
        peer, end = min(ends, key=lambda each: _unlikely_cause(each[1]))
        step = self.control.step_of(self._peers.peers.index(peer))
        text, code = ("left the group", None) if end is None else (f"ended ({end})", end.code)
        return GroupFailure(peer.world_rank, peer.name, text, step=step, exit_code=code)

    def _timeout_failure(self, missing: Sequence[int], timeout: float) -> GroupFailure:
        """Return the failure of a call or message for which these ranks did not arrive in time.

        A stopped rank is at fault, one that is missing if possible: others may wait for it. Else the first is.
        """
        peers, others = self._peers.peers, (index for index in range(self.size) if index != self.index)
        stopped = [index for index in others if self._peers.is_stopped(peers[index].rank)]
        cause = next((index for index in stopped if index in missing), (stopped or missing)[0])
        names = ", ".join(f"rank {peers[index].world_rank}" for index in missing)
        late = f"did not arrive within the timeout of {timeout:g} s"
        if cause in missing:
            more = f"; missing in all: {names}" if len(missing) > 1 else ""
            text = f"{late} (its process is {'stopped' if stopped else 'alive'}){more}"
        else:
            text = f"is stopped ({names} {late})"
        step = self.control.step_of(cause)
        return GroupFailure(peers[cause].world_rank, peers[cause].name, text, step=step, dead=False)

    def _raise(self, failure: GroupFailure) -> NoReturn:
        """Post a failure, and raise the one that was posted first."""
        self.control.post_failure(failure)
        raise self.set_failed(self.control.first_failure() or failure)

    def set_failed(self, failure: GroupFailure) -> CollectiveError:
        """Make every later call raise, and return the error."""
        self._failure = failure
        return self._error(failure)

    def _error(self, failure: GroupFailure) -> CollectiveError:
        kind = PeerLost if failure.dead else CollectiveTimeout
        where = f" in step {failure.step}" if failure.step >= 0 else ""
        return kind(
            f"rank {failure.rank} on host {failure.host} {failure.text}{where}, while rank "
            f"{self._peers.me.world_rank} was in {self._call}",
            rank=failure.rank,
            step=failure.step if failure.step >= 0 else None,
            host=failure.host,
            exit_code=failure.exit_code,
        )

    def report_error(self, error: BaseException) -> None:
        if self._failure is None and not self._cancelled:
            me = self._peers.me
            text = f"failed in {self._call}: {type(error).__name__}: {error}"
            failure = GroupFailure(me.world_rank, me.name, text[:500], step=self.control.step)
            self.control.post_failure(failure)
            self._failure = failure

    # Lifecycle.

    def note_step(self, step: int) -> None:
        self.control.step = step

    def cancel(self) -> None:
        self._cancelled = True

    def interrupt(self, reason: CollectiveError) -> None:
        self.interrupted = reason
        self._cancelled = True

    def close(self) -> None:
        self._peers.close()

    def detach(self) -> None:
        """Drop the group in a forked child."""
        self._forked = True
        self._peers.disconnect()


_instances: weakref.WeakSet[ShmBarrier] = weakref.WeakSet()


def _detach_all() -> None:
    for instance in list(_instances):
        instance.detach()


os.register_at_fork(after_in_child=_detach_all)


def _unlikely_cause(end: ExitStatus | None) -> int:
    """Return how unlikely an end is to be the cause: a signal is the likeliest, leaving the group the least."""
    if end is None:
        return 3
    return 0 if end.code is not None and end.code < 0 else 2 if end.code == 0 else 1
