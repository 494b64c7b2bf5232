"""`Elastic`: training that goes on in the same processes when ranks die, leave or join."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self

from paceline._core.processes.warning_signals import WarningSignals
from paceline.checkpoint.api import Checkpoint
from paceline.checkpoint.parts.named_objects import NamedObjects
from paceline.elastic.live_checkpoint import LiveCheckpoint
from paceline.elastic.member import ALL_TRAINED, AS_REQUESTED, Member
from paceline.elastic.member_events import (
    Abort,
    End,
    Finish,
    Formed,
    FormWorld,
    Leave,
    LeaveRequested,
    Replacing,
    Stopped,
    Suspected,
    Train,
)
from paceline.elastic.membership import Membership, TrainingAction, wait_for_view
from paceline.elastic.next_view import ALL_LEAVE, first_view
from paceline.elastic.shard_recovery import ShardRecovery
from paceline.elastic.step_counter import StepCounter
from paceline.elastic.store_link import StoreLink
from paceline.elastic.store_records import view_key, view_value
from paceline.elastic.training_state import StepSnapshot, TrainingState
from paceline.elastic.view import Rules, View
from paceline.elastic.world_forming import WorldForming, ends_forming
from paceline.errors import UsageError, WorldError
from paceline.health.watchdog import Watchdog, is_symptom
from paceline.profiling import trace_file
from paceline.world.control_collectives import gather_texts, rank_and_size
from paceline.world.group_devices import backend_name
from paceline.world.live_file import JOINER_VARIABLE, LEFT_EXIT_CODE, MEMBER_VARIABLE, LiveFile, LiveWorld
from paceline.world.session import World, leave_group
from paceline.world.store.launched_store import has_launched_store, open_launched_store

__all__ = ["Elastic"]

log = logging.getLogger("paceline.elastic")


class Elastic:
    """Keeps a training run going in the same processes when ranks die, leave or join.

    Under ``paceline run --recovery live`` (the default) or ``paceline train``; started otherwise, it changes nothing.
    All ranks make it with the same objects, once these are built, and run every optimizer step inside `attempt`.

    If another rank dies in an attempt, the others form a new world, bring each other to the same state, and the attempt
    ends without an error; `step` says whether its step has been done. A replacement that the launcher starts builds the
    same objects, gets their state from another rank, and joins between two steps. On SIGTERM a rank leaves between two
    steps, with exit code 75; the last ones save before. After another warning to `checkpoint` all ranks save and leave.

    With virtual ranks the result has the same bits as that of an undisturbed run.

    Args:
        objects: models, optimizers, and others with ``state_dict()`` and ``load_state_dict()``, all that a step
            changes; a ``rejoin()`` is called in each new world, and a loader needs one, as a `Loader` has it. With a
            sharded optimizer, what follows its step in an attempt must not read parameters.
        active: False: failures are not recovered from.
        watchdog: to watch each new world with.
        min_ranks: fewer ranks wait for others to join.
        lost: seconds without a sign of life after which a rank counts as lost.
        wait: seconds to wait for others to join.
        timeout: seconds that collectives wait for a rank.
        step: optimizer steps that are done already; None: those of `checkpoint`, or none.
        checkpoint: saved when it is due, between two steps; continues in each new world. Training goes back to it
            where sharded state is lost, as two neighbouring ranks have died. None: then the run ends.
        named: objects under given names.

    Attributes:
        world: the place of this rank in the newest world that was formed since this was made; None: there is none.
        recoveries: worlds that were formed since this was made.

    Raises:
        UsageError: on entering, a model is not wrapped, its strategy can't recover live, or a loader can't move.
        WorldError: from an attempt, this rank is removed, or the run can't go on.

    Example:
        >>> model = paceline.DataParallel(torch.nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = paceline.Loader(list(torch.ones(8, 2)), batch_size=4)
        >>> with Elastic(model, optimizer, loader) as elastic:
        ...     for batches in loader.steps(epochs=3):  # or: while elastic.step < 6
        ...         with elastic.attempt():
        ...             for batch in batches:
        ...                 model.backward(model(batch).mean(), samples=batch.samples)
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> elastic.step
        6
    """

    def __init__(
        self,
        *objects: Any,
        active: bool = True,
        watchdog: Watchdog | None = None,
        min_ranks: int = 1,
        lost: float = 5.0,
        wait: float = 300.0,
        timeout: float = 300.0,
        step: int | None = None,
        checkpoint: Checkpoint | None = None,
        **named: Any,
    ) -> None:
        found = NamedObjects.of(objects, named)
        self._state = TrainingState(found)
        self._enabled, self._watchdog, self._timeout = active, watchdog, timeout
        self._shards, self._checkpoint = ShardRecovery(self._state), checkpoint
        strategy = "sharded" if self._shards.sharded else "replicated"
        self._rules = Rules(strategy, min_ranks, saves=checkpoint is not None)
        self._lost, self._wait = lost, wait
        done = step if step is not None else 0 if checkpoint is None else checkpoint.step
        self._steps = StepCounter(list(found.optimizers.values()), done)
        self._saves = LiveCheckpoint(checkpoint, self._steps)
        self.recoveries = 0
        self.world: World | None = None
        self._undo: StepSnapshot | None = None  # of a step whose update is held
        self._repeats, self._stopped_at = False, 0.0
        self._membership: Membership | None = None
        self._forming: WorldForming | None = None
        self._live_file = LiveFile.from_environment(os.environ)
        self._on_world: list[Callable[[World], None]] = []
        self._signals = WarningSignals(self._request_leave)

    @property
    def step(self) -> int:
        """Number of optimizer steps done, of the whole world."""
        return self._steps.step

    @property
    def is_joiner(self) -> bool:
        """Whether this process joins a running world."""
        return bool(os.environ.get(JOINER_VARIABLE))

    @property
    def active(self) -> bool:
        """Whether failures of other ranks are recovered from."""
        return self._membership is not None

    def add(self, name: str, other: Any) -> None:
        """Add an object with ``state_dict()`` and ``load_state_dict()`` that a step changes."""
        self._state.add(name, other)

    def on_world(self, function: Callable[[World], None]) -> None:
        """Call a function with this rank's place in each new world; all ranks call this before they enter.

        Raises:
            UsageError: it is too late: a newcomer forms its first world on entering.
        """
        if self.active:
            raise UsageError("on_world() after entering", remedy="call it before the with statement")
        self._on_world.append(function)

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> Self:
        me = os.environ.get(MEMBER_VARIABLE, "") if self._enabled else ""
        if not (me and has_launched_store(os.environ)) or (not self.is_joiner and rank_and_size()[1] == 1):
            return self
        self._state.check(self._checkpoint)
        store = StoreLink(open_launched_store(os.environ, self._timeout))
        self._shards.begin()
        forming = self._forming = WorldForming(
            me,
            self._state,
            self._shards,
            watchdog=self._watchdog,
            checkpoint=self._checkpoint,
            timeout=self._timeout,
        )
        if self.is_joiner:
            member = Member.joining(me, self._rules, wait_for_view(store, self._wait))
        else:
            view = first_view(gather_texts(me), self.step)
            store.create("backend", backend_name(None).encode())
            store.create(view_key(0), view_value(view))
            member = Member.starting(me, self._rules, view)
            self._shards.joined(view)
        self._membership = Membership(store, member, lost=self._lost, wait=self._wait, on_abort=forming.abort)
        self._membership.start()
        self._signals.install([signal.SIGTERM], replace=True)
        if self.is_joiner:
            self._membership.announce()
            self._go_on()
        else:
            self._publish(member.view)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (membership := self._membership) is None:
            return
        try:
            if error is None:
                self._finish(membership)
        finally:
            membership.close()
            if error is None and self._live_file is not None:  # else this process ends: nobody waits for it
                self._live_file.remove()
            self._membership = None
            if error is None or not self._signals.taken:
                self._signals.restore()
            else:  # it leaves, and may get the signal once more
                self._signals.ignore_at_exit()

    def _request_leave(self, number: int) -> None:
        """Leave at the end of this step."""
        if self._membership is not None:
            threading.Thread(target=self._membership.feed, args=(LeaveRequested(),), daemon=True).start()

    def _finish(self, membership: Membership) -> None:
        """Wait until all ranks have trained all steps."""
        while True:
            membership.stopped(self._stopped(finished=True))
            action = membership.next_action()
            if isinstance(action, Finish):
                return
            self._stopped_at = time.perf_counter()
            self._go_on(action)

    # ------------------------------------------------------------------ attempts

    def attempt(self) -> AbstractContextManager[None]:
        """Run an optimizer step, and what else takes all ranks, such as evaluation; another rank's failure undoes it.

        Before it, members change, and a checkpoint that is due is saved. Afterwards `step` counts it if its update was
        applied.

        Raises:
            UsageError: the program has attempts in two places: a newcomer begins with the first.
        """
        if self.active:
            self._steps.check_place(sys._getframe(1))
        return self._attempt()

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        self._steps.begin()
        if (membership := self._membership) is None:
            if self._checkpoint is not None:
                self._checkpoint.save_if_due()
            yield
            self._steps.end(held=False)
            return
        while membership.aborting or membership.member.wants_change or not self._saves.save_if_due():
            membership.feed(Suspected())
            self._recover(membership, None)
        before, failed, self._shards.ended = self._state.snapshot(), False, False
        try:
            yield
            self._shards.ended = True
            self._shards.wait()
        except BaseException as error:
            if not is_symptom(error):
                raise
            failed = True
            self._steps.fail(error)
            self._shards.settle()
        applied = self._steps.end(held=self._shards.held)
        self._repeats = failed and not applied
        if failed:
            membership.feed(Suspected())
        if failed or membership.aborting:
            self._recover(membership, before if self._repeats else None)

    def _recover(self, membership: Membership, undo: StepSnapshot | None) -> None:
        """Stop, undo a step that was not done, and go on in the next world."""
        self._stopped_at = time.perf_counter()
        if self._shards.held:
            self._undo = undo
        elif undo is not None:
            self._give_up(undo)
        self._steps.begin()
        membership.stopped(self._stopped())
        self._go_on()

    def _give_up(self, before: StepSnapshot) -> None:
        """Go back to before an attempt."""
        self._state.give_up(before)
        self._shards.ended = True

    def _stopped(self, *, finished: bool = False) -> Stopped:
        """Return how far this rank is."""
        stage = "complete" if self._shards.held else "computing"
        return Stopped(self.step, stage, finished, self._saves.newest_step)

    def _go_on(self, action: TrainingAction | None = None) -> None:
        """Carry out what the membership decides until this rank trains again."""
        membership = self._membership
        assert membership is not None, "it is active"
        while True:
            action = action or membership.next_action()
            match action:
                case FormWorld(view):
                    try:
                        self._form(view)
                    except BaseException as error:
                        if not ends_forming(error):
                            raise
                        why = str(error).partition("\n")[0]
                        log.warning("the world of epoch %d can't be formed: %s", view.epoch, why)
                        self._steps.fail(error)
                        membership.feed(Suspected())
                    else:
                        if not membership.aborting:
                            membership.feed(Formed())
                    if membership.aborting:
                        membership.stopped(self._stopped())
                case Abort():
                    membership.stopped(self._stopped())
                case Train(view) if view.closing:
                    self._shards.train()
                    if self._saves.save_last():
                        leave_group()
                        raise SystemExit(LEFT_EXIT_CODE)
                    membership.feed(Suspected())
                    membership.stopped(self._stopped())
                case Train(view):
                    self._shards.train()
                    self.recoveries += 1
                    self._publish(view)
                    return
                case Leave(reason):
                    self._saves.leave()  # now: the others wait for the folder's lock
                    leave_group()
                    if reason in (AS_REQUESTED, ALL_TRAINED):
                        raise SystemExit(LEFT_EXIT_CODE if reason == AS_REQUESTED else 0)
                    raise WorldError(reason, step=self.step)
                case End(reason):
                    if reason == ALL_LEAVE:
                        raise SystemExit(LEFT_EXIT_CODE)
                    raise WorldError(f"the run can't go on: {reason}", step=self.step)
                case Finish():
                    return
            action = None

    def _publish(self, view: View) -> None:
        """Report the world to the launcher."""
        seconds = time.perf_counter() - self._stopped_at if self._stopped_at else 0.0
        world = LiveWorld(view.epoch, view.members, self.step, self._repeats, round(seconds, 3))
        log.info("rank %d of %d from step %d, after %.2f s", *rank_and_size(), self.step, seconds)
        if self._live_file is not None:
            self._live_file.write(world)
        if seconds:
            trace_file.add("recovery", self._stopped_at, seconds, step=self.step, ranks=len(view.members))

    # ------------------------------------------------------------------ the next world

    def _form(self, view: View) -> None:
        """Form the world of a view; on a member that leaves, provide its state only.

        Raises:
            WorldError: the world changed again before it was begun.
        """
        forming, membership = self._forming, self._membership
        assert forming is not None, "it is active"
        assert membership is not None, "it is active"
        self._decide(apply=membership.member.me in view.recovery.applying)
        forming.begin()
        if membership.aborting:
            raise WorldError("the world changed again")
        found = forming.form(view, partial(membership.feed, Replacing()))
        if found is None:
            return
        self.world, self._steps.step = found
        for function in self._on_world:
            function(self.world)
        forming.end()
        self._shards.joined(view)

    def _decide(self, *, apply: bool) -> None:
        """Apply or give up an update that is held, as the view says."""
        if not self._shards.held:
            return
        self._shards.decide(apply=apply)
        if apply:
            self._steps.advance()
        elif self._undo is not None:
            self._give_up(self._undo)
        self._undo = None
