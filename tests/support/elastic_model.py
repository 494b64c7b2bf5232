"""A model of an elastic run, all of whose interleavings can be explored: processes, their state, store and faults.

The machines are real (`paceline.elastic.member.Member`); the model plays the drivers, the training, the store and the
network. A transition stands for several moves that no other process can tell apart:

- Facts in the store never change, so a member may read them late: it reads reports, deaths and joiners at the moment
  when it composes a view, in every combination that it could have read by then.
- A member that has reason to stop does so at any time until it is removed, so being triggered, stopping and writing the
  report are one move.
- A member contributes to a step when it begins it; that others may miss the contribution is covered by their stopping.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from elastic_changes import ChangeModel
from elastic_run import UP, Move, Proc, Scenario, State, Violation
from paceline.elastic.member import Member
from paceline.elastic.member_events import (
    Event,
    Formed,
    FormedSeen,
    LeaveRequested,
    Replacing,
    StoreLost,
    Suspected,
    Train,
    WaitTimedOut,
    WriteReport,
)


class Model(ChangeModel):
    """Moves of a scenario."""

    def moves(self, state: State) -> list[Move]:
        """Return the moves of the processes; one alone where its order with others can't matter."""
        moves: list[Move] = []
        for at, proc in enumerate(state.procs):
            if proc.status != UP:
                continue
            member = self.member(proc)
            if proc.cut:
                moves += self._ends(state, at, StoreLost())
                moves += self._trains(state, at, proc, member)
                continue
            if self._is_decided(state, member):
                return self._adopts(state, at, proc, member)
            moves += self._of_member(state, at, proc, member)
        return moves

    def _is_decided(self, state: State, member: Member) -> bool:
        """Return whether the next view is there, and nothing else than to form its world can happen."""
        is_there = len(state.views) > member.view.epoch + 1
        return member.phase == "reported" and is_there and not self.scenario.mutation

    def _of_member(self, state: State, at: int, proc: Proc, member: Member) -> Iterator[Move]:
        epoch, phase = member.view.epoch, member.phase
        if len(state.views) > epoch + 1:
            yield from self._adopts(state, at, proc, member)
        if phase == "joining":
            if member.me not in state.joiners:
                yield "ready", state._replace(joiners=(*state.joiners, member.me))
            if all(each.status != UP for each in state.procs[:-1]):
                yield from self._ends(state, at, WaitTimedOut())
            return
        if phase == "reported":
            yield from self._composes(state, at, proc, member)
        if phase == "training" or self.scenario.mutation == "report not frozen":
            yield from self._trains(state, at, proc, member)
        if phase == "forming":
            yield from self._forms(state, at, proc, member)
        if (
            phase == "formed"
            and epoch == len(state.views) - 1
            and state.formed.issuperset(member.view.members)
        ):
            seen = (FormedSeen(epoch, each) for each in member.view.members)
            yield from self._after(state, at, proc, "train", *seen)
        if phase in ("training", "forming", "formed"):
            yield from self._stops(state, at, proc, member)

    def _trains(self, state: State, at: int, proc: Proc, member: Member) -> Iterator[Move]:
        """Complete the gradients of a step, and apply the update."""
        step = len(proc.done)
        if (
            (step == self.scenario.steps and not member.view.closing)
            or proc.entered != step
            or member.phase not in ("training", "reported")
        ):
            return
        entered = [self._position(state, at, each, member) for each in member.view.members]
        if any(where[0] < step for where in entered):
            return
        if member.view.closing:
            yield "save", self._gone(state, at, "saved")
            return
        gradients = member.view.epoch
        if self.sharded and proc.gradients < 0:
            yield "complete", self._with(state, at, proc._replace(gradients=gradients))
            return
        confirmed = all(where[0] > step or where[1] >= 0 for where in entered)
        if self.sharded and not confirmed and self.scenario.mutation != "no confirmation":
            return
        wish = any(
            each.wish and each.entered == step and self.member(each).view.epoch == gradients
            for each in state.procs
        )
        updated = proc._replace(done=(*proc.done, gradients), gradients=-1)
        if member.phase == "reported":
            yield "update late", self._with(state, at, updated)
        elif wish and step + 1 < self.scenario.steps and not proc.cut:
            yield from self._reports(state, at, updated, "update, stop", ())
        else:
            yield from self._begins(state, at, updated, "update")

    def _begins(self, state: State, at: int, proc: Proc, label: str) -> Iterator[Move]:
        """Contribute to the next step, knowing joiners or not; or finish."""
        step = len(proc.done)
        closing = self.member(proc).view.closing  # what it contributes to is the save
        if closing or (step == self.scenario.steps and proc.cut):
            yield label, self._with(state, at, proc._replace(entered=step))
            return
        if step == self.scenario.steps:
            yield from self._reports(state, at, proc._replace(entered=step), f"{label}, finish", ())
            return
        member = self.member(proc)
        choices: list[tuple[Event, ...]] = [()]
        if state.joiners[member.slots :] and not proc.cut:
            choices.append(self._joiners_seen(state, member))
        for events in choices:
            number, _ = self.machines.feed(proc.machine, *events)
            wish = self.machines.known[number].wants_change
            yield label, self._with(state, at, proc._replace(machine=number, entered=step, wish=wish))

    def _forms(self, state: State, at: int, proc: Proc, member: Member) -> Iterator[Move]:
        """Apply the update that the view asks for; then take over the state."""
        view, recovery = member.view, member.view.recovery
        if member.me in recovery.applying and len(proc.done) < recovery.step:
            if proc.gradients < 0 or len(proc.done) != recovery.step - 1:
                raise Violation(f"{member.me} can't apply step {recovery.step - 1}")
            yield (
                "apply",
                self._with(state, at, proc._replace(done=(*proc.done, proc.gradients), gradients=-1)),
            )
            return
        if member.me in view.leaving:
            if view.epoch == len(state.views) - 1 and state.formed.issuperset(view.members):
                yield from self._ends(state, at, *(FormedSeen(view.epoch, each) for each in view.members))
            return
        if any(self._is_split(state, member.me, each) for each in view.participants):
            return
        done = self._received(state, proc, member)
        if done is None:
            return
        if member.me in recovery.receivers and proc.data:
            number, _ = self.machines.feed(proc.machine, Replacing())
            yield "replace", self._with(state, at, proc._replace(machine=number, data=()))
            return
        if len(done) != recovery.step:
            raise Violation(f"{member.me} begins step {recovery.step} with the state of step {len(done)}")
        data = (*proc.data, view.epoch) if self.sharded else (0,)
        number, _ = self.machines.feed(proc.machine, Formed())
        if not self.sharded:
            data = (*self.machines.known[number].holds,)
        formed = proc._replace(machine=number, done=done, data=data)
        latest = view.epoch == len(state.views) - 1
        written = state.formed | {member.me} if latest else state.formed
        if view.members == (member.me,):
            yield from self._trained(state._replace(formed=written), at, formed, "form, train")
        else:
            yield "form", self._with(state, at, formed)._replace(formed=written)

    def _received(self, state: State, proc: Proc, member: Member) -> tuple[int, ...] | None:
        """Return the history of the state that a member has when it has formed a world; None: it has to wait."""
        view, recovery = member.view, member.view.recovery
        if recovery.origin == "checkpoint":
            return ()
        if not self.sharded:
            source = state.procs[self.index[recovery.source]]
            if member.me != recovery.source and member.me not in recovery.receivers:
                if not proc.data:
                    raise Violation(f"{member.me} has no state and receives none")
                return proc.done
            sources = [(source, 0)]
        else:
            sources = [(state.procs[self.index[each]], recovery.base) for each in set(recovery.shards)]
        found = set()
        for source, base in sources:
            if source.status != UP or self.member(source).view != view:
                return None
            name = self.member(source).me
            if name in recovery.applying and len(source.done) < recovery.step:
                return None
            if not source.data or (self.sharded and base not in source.data):
                if self.member(source).phase == "training":
                    return None  # only if a rule is broken
                raise Violation(f"{name} provides state that it does not hold")
            found.add(source.done[: recovery.step])
        if len(found) != 1:
            raise Violation("shards of different histories")
        return found.pop()

    def _trained(self, state: State, at: int, proc: Proc, label: str) -> Iterator[Move]:
        member = self.member(proc)
        data = (member.view.epoch,) if self.sharded else proc.data
        for other in state.procs:
            known = self.member(other)
            same = known.view == member.view and known.phase in ("training", "formed")
            if same and other.status == UP and other.done[: len(proc.done)] != proc.done:
                raise Violation("members train from states of different histories")
        yield from self._begins(state, at, proc._replace(data=data, gradients=-1), label)

    def _after(self, state: State, at: int, proc: Proc, label: str, *events: Event) -> Iterator[Move]:
        """Feed events; carry out the actions that change more than the machine."""
        number, actions = self.machines.feed(proc.machine, *events)
        after = proc._replace(machine=number)
        for action in actions:
            if isinstance(action, WriteReport):
                old = {each for each in self.reports(state) if each.member == action.report.member}
                kept = state.reports - {self.machines.number(each) for each in old}
                state = state._replace(reports=kept | {self.machines.number(action.report)})
                member = replace(self.machines.known[number], proposed=False)  # it may compose later
                after = proc._replace(machine=self.machines.number(member))
            if isinstance(action, Train):
                yield from self._trained(state, at, after, label)
                return
        yield label, self._with(state, at, after)

    def fault_moves(self, state: State) -> Iterator[Move]:
        """Yield what may go wrong."""
        for kind in dict.fromkeys(state.faults):
            left = list(state.faults)
            left.remove(kind)
            rest = state._replace(faults=tuple(left))
            if kind == "split":
                positions = tuple(map(self._contribution, state.procs))
                far = () if self.scenario.split_store else self._far_side()
                yield "split", self._cut(rest._replace(frozen=positions), far)
            elif kind == "server":
                yield "server", self._cut(rest, range(len(self.names)))
            else:
                for at, proc in enumerate(state.procs):
                    if proc.status == UP:
                        yield from self._fault(rest, at, proc, kind)

    def _fault(self, state: State, at: int, proc: Proc, kind: str) -> Iterator[Move]:
        member = self.member(proc)
        active = member.phase in ("training", "forming", "formed")
        match kind:
            case "kill":
                yield f"kill {member.me}", self._gone(state, at, "killed")
            case "vanish":
                yield f"vanish {member.me}", self._gone(state, at, "vanished")
            case "cut":
                yield f"cut {member.me}", self._cut(state, [at])
            case "leave" if member.phase == "joining":
                yield from self._ends(state, at, LeaveRequested())
            case "leave" if not member.leaving and not proc.cut:
                yield from self._after(state, at, proc, f"leave {member.me}", LeaveRequested())
            case "glitch" if active and not proc.cut:
                yield from self._reports(state, at, proc, f"glitch {member.me}", (Suspected(),))
            case "suspect" if member.phase != "joining" and not proc.cut:
                for other in set(member.view.members) - {member.me}:
                    pair = (member.me, other, member.view.epoch)
                    yield f"suspect {pair}", state._replace(suspicions=state.suspicions | {pair})

    def _cut(self, state: State, indices: Iterable[int]) -> State:
        for at in indices:
            if state.procs[at].status == UP:
                state = self._with(state, at, state.procs[at]._replace(cut=True))
        return state

    def _far_side(self) -> list[int]:
        return [at for at, name in enumerate(self.names) if name not in self.scenario.split]


def explore(
    scenario: Scenario, permitted: Callable[[State], str | None], *, most: int = 2_000_000
) -> tuple[int, int]:
    """Visit every state that a scenario can reach; return how many, and how many of them are ends.

    Args:
        permitted: returns what is wrong with an end; None: nothing.
        most: states.

    Raises:
        Violation: a property does not hold; with the moves that lead there.
    """
    model = Model(scenario)
    start = model.start()
    numbers, active = {start: 0}, [True]  # of each state, and whether the path leads through it
    stack: list[tuple[str, int, Iterator[Move]]] = [("start", 0, iter(()))]
    try:
        stack[0] = "start", 0, _successors(model, start, permitted)
        while stack:
            move = next(stack[-1][2], None)
            if move is None:
                active[stack.pop()[1]] = False
                continue
            label, state = move
            number = numbers.setdefault(state, len(active))
            if number == len(active):
                active.append(True)
                stack.append((label, number, _successors(model, state, permitted)))
            elif active[number]:
                raise Violation(f"a circle of moves: {label}")
            if len(active) > most:
                raise Violation(f"more than {most} states")
    except Violation as violation:
        path = [label for label, _, _ in stack]
        raise Violation(f"{violation}\n  after {' → '.join(path)}") from None
    ends = sum(all(proc.status != UP for proc in state.procs) for state in numbers)
    return len(active), ends


def _successors(model: Model, state: State, permitted: Callable[[State], str | None]) -> Iterator[Move]:
    moves = model.moves(state)
    if not moves:
        model.check_end(state)
        wrong = permitted(state)
        if wrong:
            raise Violation(wrong)
        return
    for label, following in itertools.chain(moves, model.fault_moves(state)):
        yield label, model.canonical(following)
