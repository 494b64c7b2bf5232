"""Forms the world of a view: connects its participants, and brings all members to the same state."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch.distributed as dist

from paceline._core.step_state import step_state
from paceline.checkpoint.api import Checkpoint
from paceline.elastic.shard_recovery import ShardRecovery
from paceline.elastic.store_link import AbortableStore
from paceline.elastic.training_state import TrainingState
from paceline.elastic.view import View
from paceline.errors import MismatchError, PacelineError, PeerFailed, UsageError
from paceline.health.abort_collectives import abort_groups
from paceline.health.watchdog import Watchdog
from paceline.world.session import World, form_world
from paceline.world.store.launched_store import open_launched_store

__all__ = ["WorldForming", "ends_forming"]


class WorldForming:
    """Forms worlds for one member.

    Args:
        me: id of the member.
        state: of the run.
        shards: of sharded training.
        watchdog: continues in each world; None: there is none.
        checkpoint: continues in each world; None: there is none.
        timeout: seconds that the store and collectives wait for a rank.
    """

    def __init__(
        self,
        me: str,
        state: TrainingState,
        shards: ShardRecovery,
        *,
        watchdog: Watchdog | None,
        checkpoint: Checkpoint | None,
        timeout: float,
    ) -> None:
        self._me, self._state, self._shards = me, state, shards
        self._watchdog, self._checkpoint, self._timeout = watchdog, checkpoint, timeout
        self._store: AbortableStore | None = None  # while a world is formed

    def abort(self) -> None:
        """Free the training thread from waits for other members; called in any thread."""
        if self._store is not None:
            self._store.abort()
        abort_groups(PeerFailed("the world changes"))

    def begin(self) -> None:
        """End the step that was recorded, and prepare for a world: what waits from now on can be aborted."""
        if step_state.recorder is not None:
            step_state.recorder.flush()
        if self._watchdog is not None:
            self._watchdog.close()
        self._store = AbortableStore(open_launched_store(os.environ, self._timeout), self._timeout)

    def form(self, view: View, replacing: Callable[[], None]) -> tuple[World, int] | None:
        """Connect to the members of a view, and bring all to the same state.

        Args:
            view: the view.
            replacing: called when this member's state is about to be overwritten.

        Returns:
            The world and the step to train first; None on a member that leaves and has provided its state.

        Raises:
            RuntimeError: the world changes again, a member can't be reached, or the checkpoint's folder is locked.
        """
        recovery, sharded, found = view.recovery, self._shards.sharded, None
        self._wait_for_all(view, "here")
        world = self._connect(view, view.participants)
        if sharded:
            found = self._shards.exchange(view, self._me)
        else:
            self._state.rejoin()
            if recovery.receivers:
                source = view.participants.index(recovery.source)
                self._state.send(source, replacing if self._me in recovery.receivers else None)
        if view.leaving:
            self._wait_for_all(view, "provided")
            if self._me in view.leaving:
                if self._checkpoint is not None:
                    self._checkpoint.leave()
                return None
            world = self._connect(view, view.members)
            if not sharded:
                self._state.rejoin()
        if self._checkpoint is not None:
            self._checkpoint.rejoin()
        step = self._shards.rejoin(view, found, self._checkpoint) if sharded else recovery.step
        if self._checkpoint is not None:
            self._checkpoint.step = step  # a newcomer's, or one that counts a step which was given up
        self._state.agree()
        if self._watchdog is not None:
            self._watchdog.rejoin()
        return world, step

    def end(self) -> None:
        """End the preparation for a world, which is formed."""
        self._store = None

    def _wait_for_all(self, view: View, place: str) -> None:
        """Wait until all participants of a view are at a place."""
        assert self._store is not None, "a world is being formed"
        key = f"elastic/{place}/{view.epoch}"
        self._store.set(f"{key}/{self._me}", b"")
        self._store.wait([f"{key}/{name}" for name in view.participants])

    def _connect(self, view: View, members: Sequence[str]) -> World:
        """Form the process group of some participants, with the backend of the first world."""
        assert self._store is not None, "a world is being formed"
        return form_world(
            dist.PrefixStore(f"elastic/world/{view.epoch}/{len(members)}", self._store),
            members.index(self._me),
            len(members),
            self._store.get("elastic/backend").decode(),
            self._timeout,
        )


def ends_forming(error: BaseException) -> bool:
    """Return whether an error may be the consequence of a change of members while their world was formed."""
    return isinstance(error, RuntimeError | OSError | PacelineError) and not isinstance(
        error, UsageError | MismatchError
    )
