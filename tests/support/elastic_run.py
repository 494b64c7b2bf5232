"""State of a modelled elastic run, and the properties that it must have; see `elastic_model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.elastic.member import Member
from paceline.elastic.member_events import Action, Event, JoinerSeen
from paceline.elastic.next_view import first_view
from paceline.elastic.view import Report, Rules, View

NEWCOMER = "j"
UP = "up"


class Violation(AssertionError):
    """A property that the protocol guarantees does not hold."""


@dataclass(frozen=True)
class Scenario:
    """What may happen in a run.

    Attributes:
        strategy: of the state.
        ranks: members at the start.
        steps: to train.
        faults: kinds that may happen, each at any time: "kill" (the agent sees it), "vanish" (nobody sees it), "leave",
            "suspect" (a detector errs once), "glitch" (a connection breaks and works again), "cut" (one member loses
            the store), "server" (all lose it).
        split: side of a network cut that may happen at any time; empty: none.
        split_store: whether both sides still reach the store; else only the first does.
        joins: whether a newcomer is there.
        min_ranks: of the rules.
        checkpoint: whether there is one, of step 0.
        saves: whether the last members save one before they leave.
        mutation: a rule that drivers or store break.
    """

    strategy: str
    ranks: int
    steps: int = 2
    faults: tuple[str, ...] = ()
    split: str = ""
    split_store: bool = True
    joins: bool = False
    min_ranks: int = 1
    checkpoint: bool = False
    saves: bool = False
    mutation: str = ""

    @property
    def names(self) -> str:
        return "abcdefgh"[: self.ranks] + (NEWCOMER if self.joins else "")


class Proc(NamedTuple):
    """A process.

    Attributes:
        machine: number of its `Member`, see `Machines`.
        status: "up", "killed", "vanished", or how it ended.
        done: for each applied step the epoch in which its gradients were summed.
        data: layouts of the state that it truly holds, at this step.
        gradients: epoch in which the complete gradients of the next step were summed; −1: it has none.
        entered: step to which it has contributed in this epoch; −1: none.
        wish: whether it asked for a change with that.
        cut: whether it has lost the store.
        split: whether it has adopted a view since the network was cut; its detector knows of the cut by then.
    """

    machine: int
    status: str = UP
    done: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    gradients: int = -1
    entered: int = -1
    wish: bool = False
    cut: bool = False
    split: bool = False


class State(NamedTuple):
    """The whole run.

    Attributes:
        procs: in the order of `Scenario.names`.
        views: number of the view of each epoch, see `Machines`; −1: it can't matter any more.
        reports: numbers of those for the epoch after the latest.
        formed: members that have formed the latest view's world.
        dead: members whose end an agent has written.
        joiners: list of newcomers that are ready.
        faults: that may still happen.
        frozen: positions of all processes at the moment of the network cut; empty: not cut.
        suspicions: (member, other, epoch): the detector of a member takes another one for unreachable in that epoch.
    """

    procs: tuple[Proc, ...]
    views: tuple[int, ...]
    reports: frozenset[int] = frozenset()
    formed: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()
    joiners: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    frozen: tuple[tuple[int, int, int], ...] = ()
    suspicions: frozenset[tuple[str, str, int]] = frozenset()


@dataclass
class Machines:
    """Numbers of the member states, views and reports met so far, and what follows from events."""

    known: list[Any] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)
    memory: dict[tuple[int, Event], tuple[int, tuple[Action, ...]]] = field(default_factory=dict)

    def number(self, value: Member | View | Report) -> int:
        found = self.numbers.get(value)
        if found is None:
            found = self.numbers[value] = len(self.known)
            self.known.append(value)
        return found

    def feed(self, number: int, *events: Event) -> tuple[int, tuple[Action, ...]]:
        """Return the number of the state after some events, and all actions."""
        actions: list[Action] = []
        for event in events:
            found = self.memory.get((number, event))
            if found is None:
                member, more = self.known[number].handle(event)
                found = self.memory[number, event] = self.number(member), more
            number = found[0]
            actions += found[1]
        return number, tuple(actions)


Move = tuple[str, State]


class RunModel:
    """A scenario's start, and what is true in a state."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.machines = scenario, Machines()
        self.names = scenario.names
        self.index = {name: at for at, name in enumerate(self.names)}
        self.rules = Rules(scenario.strategy, scenario.min_ranks, scenario.saves)
        self.sharded = scenario.strategy == "sharded"
        self.first = first_view(self.names[: scenario.ranks])
        self.canonical_procs: dict[tuple[Proc, int, bool], Proc] = {}

    def start(self) -> State:
        """Return the state in which all members have begun step 0."""
        view = self.first
        procs = []
        for name in self.names:
            if name == NEWCOMER:
                procs.append(Proc(self.machines.number(Member.joining(name, self.rules, view))))
            else:
                number = self.machines.number(Member.starting(name, self.rules, view))
                procs.append(Proc(number, data=(0,), entered=0))
        faults = tuple(sorted(self.scenario.faults)) + (("split",) if self.scenario.split else ())
        return State(tuple(procs), (self.machines.number(view),), faults=faults)

    def reports(self, state: State) -> list[Report]:
        return [self.machines.known[number] for number in state.reports]

    def member(self, proc: Proc) -> Member:
        return self.machines.known[proc.machine]

    def _joiners_seen(self, state: State, member: Member) -> tuple[Event, ...]:
        return tuple(
            JoinerSeen(slot, state.joiners[slot]) for slot in range(member.slots, len(state.joiners))
        )

    def _contribution(self, proc: Proc) -> tuple[int, int, int]:
        """Return the epoch, the step that a process has entered in it, and where its gradients for that are from."""
        epoch = self.member(proc).view.epoch
        applied = 0 <= proc.entered < len(proc.done)  # it stopped at a step boundary
        return epoch, proc.entered, epoch if applied else proc.gradients

    def _position(self, state: State, at: int, other: str, member: Member) -> tuple[int, int]:
        """Return the step that another member has entered in the same epoch, and its gradients, as far as seen."""
        index = self.index[other]
        proc = state.procs[index]
        epoch, entered, gradients = self._contribution(proc)
        if state.frozen and self._is_split(state, self.names[at], other):
            epoch, entered, gradients = state.frozen[index]
        return (entered, gradients) if epoch == member.view.epoch else (-1, -1)

    def _is_split(self, state: State, one: str, other: str) -> bool:
        return bool(state.frozen) and (one in self.scenario.split) != (other in self.scenario.split)

    def _may_be_unreachable(self, state: State, member: Member, other: str) -> bool:
        """Return whether a failure detector may report another member: not one of whose death an agent writes."""
        return self._is_split(state, member.me, other) or self._is_silent(state, member, other)

    def _is_silent(self, state: State, member: Member, other: str) -> bool:
        """Return whether another member may be unreachable and not report in time, though it could have."""
        proc = state.procs[self.index[other]]
        lost = proc.status == "vanished" or proc.cut
        return lost or (member.me, other, member.view.epoch) in state.suspicions

    def _with(self, state: State, at: int, proc: Proc) -> State:
        procs = state.procs
        return State((*procs[:at], proc, *procs[at + 1 :]), *state[1:])

    def canonical(self, state: State) -> State:
        """Return the state without what can't matter any more."""
        known, latest = self.machines.known, len(state.views) - 1
        alive = [known[proc.machine] for proc in state.procs if proc.status == UP]
        training = forming = False
        oldest = latest
        for each in alive:
            epoch, phase = each.view.epoch, each.phase
            oldest = min(oldest, epoch)
            training = training or (phase == "training" and epoch == latest)
            forming = forming or phase in ("forming", "formed")
        # Lists in the calls of tuple and any are faster than generators: this runs once per move.
        procs = tuple([self._canonical_proc(proc, latest, training) for proc in state.procs])
        views, frozen, suspicions = state.views, state.frozen, state.suspicions
        if oldest > 0:
            needed = {epoch for proc in procs for epoch in proc.data}
            views = tuple(
                [
                    number if epoch >= oldest or epoch in needed else -1
                    for epoch, number in enumerate(state.views)
                ]
            )
        if frozen and not training:
            frozen = ((-1, -1, -1),) * len(procs)
        if suspicions:
            running = {each.me for each in alive}
            suspicions = frozenset(each for each in suspicions if each[0] in running)
        formed = state.formed if forming else frozenset()
        return State(
            procs,
            views,
            state.reports,
            formed,
            state.dead,
            state.joiners,
            state.faults,
            frozen,
            suspicions,
        )

    def _canonical_proc(self, proc: Proc, latest: int, training: bool) -> Proc:
        """Return what can matter of a process, if members still train in the latest view or not."""
        key = proc, latest, training
        found = self.canonical_procs.get(key)
        if found is None:
            member, found = self.member(proc), proc
            current = member.view.epoch == latest
            if proc.status != UP:
                found = self._remains(proc, member, keep=current and training)
            elif current and not training and not self.scenario.mutation:
                found = proc._replace(entered=-1, wish=False)
            self.canonical_procs[key] = found
        return found

    def _remains(self, proc: Proc, member: Member, *, keep: bool) -> Proc:
        """Return what is left of a process that has ended: what it has contributed, if others still train."""
        view = member.view if keep or self.scenario.mutation else self.first
        number = self.machines.number(Member(member.me, member.rules, view, "gone"))
        done = proc.done if proc.status in ("finished", "saved") else ()
        if keep:
            gradients = self._contribution(proc)[2]
            return proc._replace(machine=number, done=done, data=(), gradients=gradients)
        return Proc(number, proc.status, done, cut=proc.cut)

    def _check_view(self, state: State, view: View) -> None:
        """Check a new view against what is true of the processes."""
        before = self.machines.known[state.views[view.epoch - 1]]
        truth = {name: state.procs[self.index[name]] for name in before.participants}
        alive = [name for name in before.members if truth[name].status == UP]
        expelled = [each for each in view.removed if each.cause == "unreachable" and each.member in alive]
        stay = [name for name in before.members if name in view.participants]
        stay += [
            each.member for each in view.removed if each.cause == "left" and each.member in before.members
        ]
        if expelled and view.members and 2 * len(stay) < len(alive):
            raise Violation(f"a minority {stay} of {alive} goes on")
        if view.recovery.origin == "members":
            return
        planned = not self.scenario.split and set(self.scenario.faults) <= {"leave"}
        if planned and (view.recovery.applying or set(view.recovery.receivers) - {NEWCOMER}):
            raise Violation("a planned change interrupts a step")
        if view.finished:
            return
        away = {each.member for each in view.removed if each.cause != "left"}
        reports = {each.member for each in self.reports(state) if each.epoch == view.epoch} - away
        held = [truth[name] for name in reports if name in truth and truth[name].data]
        lost_ranks = view.reason.endswith(("in time", "leaves"))
        if not lost_ranks and self._is_recoverable(state, held, before):
            raise Violation(f"state is given up that members hold: {view.reason}")

    def _is_recoverable(self, state: State, held: list[Proc], before: View) -> bool:
        if not self.sharded:
            return bool(held)
        for epoch in {each for proc in held for each in proc.data}:
            layout = self.machines.known[state.views[epoch]].members
            owners = {self.member(proc).me for proc in held if epoch in proc.data}
            if all(owner in owners or layout[at - 1] in owners for at, owner in enumerate(layout)):
                return True
        return False

    def check_end(self, state: State) -> None:
        """Check that nobody hangs, and that those who finished have applied the same steps from the same gradients."""
        waiting = [name for name, proc in zip(self.names, state.procs, strict=True) if proc.status == UP]
        if waiting:
            phases = [self.member(state.procs[self.index[name]]).phase for name in waiting]
            raise Violation(f"{waiting} wait for ever, in {phases}")
        for status in ("finished", "saved"):
            histories = {proc.done for proc in state.procs if proc.status == status}
            if len(histories) > 1:
                raise Violation(f"{status} with different histories: {sorted(histories)}")
