"""Events that a member's state machine takes, and actions that it gives (plain data)."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.elastic.view import Report, Stage, View

__all__ = [
    "Abort",
    "Action",
    "ChangeSeen",
    "CreateView",
    "Died",
    "End",
    "Event",
    "Finish",
    "FormWorld",
    "Formed",
    "FormedSeen",
    "JoinerSeen",
    "Leave",
    "LeaveRequested",
    "Overdue",
    "Replacing",
    "ReportSeen",
    "Stopped",
    "StoreLost",
    "Suspected",
    "Train",
    "Unreachable",
    "ViewSeen",
    "WaitTimedOut",
    "WriteChange",
    "WriteFormed",
    "WriteReport",
]

# ---------------------------------------------------------------- events of the member itself


@dataclass(frozen=True)
class Stopped:
    """The training thread has stopped: after `Abort`; or by itself, after the last step or one in which all agreed.

    Attributes:
        step: under way; all updates before it are applied.
        stage: of that step.
        finished: whether all steps are trained.
        checkpoint: step of the newest complete checkpoint that all members can read.
    """

    step: int
    stage: Stage = "computing"
    finished: bool = False
    checkpoint: int | None = None


@dataclass(frozen=True)
class Replacing:
    """The state of this member is being overwritten from now on: the source's has begun to arrive."""


@dataclass(frozen=True)
class Formed:
    """The world of the view is connected, and this member holds its part of the state; see `FormWorld`."""


@dataclass(frozen=True)
class LeaveRequested:
    """This member shall leave after the present step."""


@dataclass(frozen=True)
class Suspected:
    """Something failed that a peer takes part in, such as a connection or a collective; nobody is removed for it."""


@dataclass(frozen=True)
class Unreachable:
    """A participant has been unreachable for so long that it may be removed; to be fed anew in each view."""

    member: str


@dataclass(frozen=True)
class Overdue:
    """The next view is late: since the change began, each member that reaches the store could have reported.

    What the store has of the change is fed first. From now on members count as absent that are `Unreachable` and have
    not reported; and this member composes the view, whatever its rank.
    """


@dataclass(frozen=True)
class WaitTimedOut:
    """No joiner came in time while there were fewer than ``min_ranks`` members."""


@dataclass(frozen=True)
class StoreLost:
    """The store has been unreachable for too long."""


# ---------------------------------------------------------------- events read from the store


@dataclass(frozen=True)
class ChangeSeen:
    """A change to the view of this epoch is under way."""

    epoch: int


@dataclass(frozen=True)
class ReportSeen:
    """A member has reported."""

    report: Report


@dataclass(frozen=True)
class ViewSeen:
    """A view has been written."""

    view: View


@dataclass(frozen=True)
class Died:
    """A process has ended, for certain."""

    member: str


@dataclass(frozen=True)
class JoinerSeen:
    """The newcomer in a slot of the list of joiners is ready."""

    slot: int
    member: str


@dataclass(frozen=True)
class FormedSeen:
    """A member has formed the world of a view."""

    epoch: int
    member: str


Event = (
    Stopped | Replacing | Formed | LeaveRequested | Suspected | Unreachable | Overdue | WaitTimedOut | StoreLost
    | ChangeSeen | ReportSeen | ViewSeen | Died | JoinerSeen | FormedSeen
)  # fmt: skip

# ---------------------------------------------------------------- actions on the store


@dataclass(frozen=True)
class WriteReport:
    """Write the report."""

    report: Report


@dataclass(frozen=True)
class WriteChange:
    """Write that a change to the view of this epoch is under way."""

    epoch: int


@dataclass(frozen=True)
class CreateView:
    """Write a view unless its epoch has one (compare_set); then feed `ViewSeen` with the one that the store has."""

    view: View


@dataclass(frozen=True)
class WriteFormed:
    """Write that this member has formed the world of a view."""

    epoch: int


# ---------------------------------------------------------------- actions on the training


@dataclass(frozen=True)
class Abort:
    """Stop training or forming, abort what waits for peers, then feed `Stopped`; an update that has begun is ended."""


@dataclass(frozen=True)
class FormWorld:
    """Carry out a view, then feed `Formed`; a member of ``view.leaving`` only provides state.

    1. If this member is in ``recovery.applying``: apply the update of step − 1; else discard gradients.
    2. Connect to all participants.
    3. Replicated: if this member is the source, send the state to the receivers. If it is a receiver, feed `Replacing`
       when the state begins to arrive, and never before.
       Sharded: build the own shard and the copy of the right neighbour's in the layout of this view from the shards of
       ``recovery.layout``, and keep the old ones until `Train`.
       From a checkpoint: read it instead.
    """

    view: View


@dataclass(frozen=True)
class Train:
    """All members have formed the world: discard the old layout's shards, and train from the view's step."""

    view: View


@dataclass(frozen=True)
class Finish:
    """All members have trained all steps: end well."""


@dataclass(frozen=True)
class Leave:
    """This member ends, and others may train on."""

    reason: str


@dataclass(frozen=True)
class End:
    """The run ends on all members."""

    reason: str


Action = (
    WriteReport | WriteChange | CreateView | WriteFormed
    | Abort | FormWorld | Train | Finish | Leave | End
)  # fmt: skip
