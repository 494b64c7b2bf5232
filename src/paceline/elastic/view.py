"""Views of a world that changes while it trains, and what its members report before a change (pure data).

A *view* is the list of members that train together, in rank order, and the state from which they go on. Views are
numbered by *epochs*; each is written to the store at most once. A *member* is one incarnation of a process.

A change from view e to e + 1: every member stops, reports its progress for e + 1 and waits. A report is a promise: its
author changes nothing of what it reports until view e + 1 exists. When every member of view e has reported, is dead or
is unreachable, one of them writes view e + 1 (`next_view`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline._core.json_codec import Whole

__all__ = ["Cause", "Evidence", "Recovery", "Removal", "Report", "Rules", "Stage", "Strategy", "View"]

Strategy = Literal["replicated", "sharded"]
"""Whether every member holds the whole state, or a shard of it and a copy of its right neighbour's shard."""

Stage = Literal["computing", "complete"]
"""Progress in a step: its reduced gradients are not complete here, or they are and the update has not been applied.

A member that has applied the update is `computing` the next step. With sharded state, nobody applies an update before
all members have confirmed that they are `complete`.
"""

Cause = Literal["dead", "unreachable", "left"]


@dataclass(frozen=True)
class Rules:
    """What is the same on all members of a run.

    Attributes:
        strategy: how state is held.
        min_ranks: with fewer members the world waits for joiners.
        saves: whether there are checkpoints, of which the last members save one.
    """

    strategy: Strategy
    min_ranks: int = 1
    saves: bool = False


@dataclass(frozen=True)
class Report:
    """Progress of a member, frozen until the next view exists.

    Attributes:
        epoch: of the view that is to follow.
        member: the author.
        step: under way; all updates before it are part of the state.
        stage: of that step.
        holds: epochs of the views whose layout of state it holds, at `step`; none: it holds no usable state. While the
            world of a view forms, members have the old layout, then both; replicated state is the same in any layout.
        leaving: whether it leaves the world.
        trained: whether the world of the present view has formed, as it knows.
        orderly: whether it stopped where all members stop: such a report begins no change for the others.
        finished: whether it has trained all steps.
        unreachable: members that have been unreachable for it.
        joiners: newcomers known to be ready, in the order of their slots from `View.slots` on.
        checkpoint: step of the newest complete checkpoint that all members can read; None: there is none.
    """

    epoch: Whole
    member: str
    step: Whole
    stage: Stage = "computing"
    holds: tuple[int, ...] = ()
    leaving: bool = False
    trained: bool = False
    orderly: bool = False
    finished: bool = False
    unreachable: tuple[str, ...] = ()
    joiners: tuple[str, ...] = ()
    checkpoint: int | None = None


@dataclass(frozen=True)
class Recovery:
    """How the members of a view come to the same state.

    Attributes:
        origin: where the state comes from: members; the newest checkpoint, as some of it was lost; none: the run ends.
        step: to train first.
        applying: participants that first apply the update of step − 1, whose complete gradients they hold.
        source: participant that sends its whole state (replicated).
        receivers: members that receive it.
        base: epoch of the view in whose layout the shards are (sharded); −1: there are none.
        layout: members of that view.
        shards: participant that provides each shard of that layout: its owner, or the left neighbour that holds a copy.
    """

    origin: Literal["members", "checkpoint", "none"]
    step: Whole = 0
    applying: tuple[str, ...] = ()
    source: str = ""
    receivers: tuple[str, ...] = ()
    base: int = -1
    layout: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Removal:
    """A member of the view before that is not in this one."""

    member: str
    cause: Cause


@dataclass(frozen=True)
class View:
    """A world: who trains together from now on, and from which state.

    Attributes:
        epoch: number of the view.
        members: in rank order; empty: the run ends.
        leaving: former members that leave once the world has formed; until then they provide state.
        recovery: the state to go on with.
        removed: who was in the view before, and is neither a member nor `leaving`.
        attempt: worlds in sequence before this one that never formed.
        slots: of the list of joiners, whose newcomers this or an earlier view has admitted, or who were dead.
        finished: whether the run ends well, as all members have trained all steps.
        closing: whether its members save a checkpoint and leave, once its world has formed.
        reason: why it ends otherwise, or why it goes on from a checkpoint.
    """

    epoch: Whole
    members: tuple[str, ...]
    recovery: Recovery
    leaving: tuple[str, ...] = ()
    removed: tuple[Removal, ...] = ()
    attempt: Whole = 0
    slots: Whole = 0
    finished: bool = False
    closing: bool = False
    reason: str = ""

    @property
    def participants(self) -> tuple[str, ...]:
        """All that take part in forming its world, and report if that fails."""
        return (*self.members, *self.leaving)

    @property
    def ends(self) -> bool:
        """Whether the run ends."""
        return self.recovery.origin == "none"


@dataclass(frozen=True)
class Evidence:
    """What a member knows of the others when it composes the next view.

    Attributes:
        reports: for the next view.
        dead: members and joiners whose process has ended, for certain.
        unreachable: members that can't be reached and had time to report; they may be alive.
        joiners: newcomers that are ready, see `Report.joiners`.
        waited: whether it has waited long enough for joiners.
    """

    reports: frozenset[Report] = frozenset()
    dead: frozenset[str] = field(default_factory=frozenset)
    unreachable: frozenset[str] = field(default_factory=frozenset)
    joiners: tuple[str, ...] = ()
    waited: bool = False
