"""The view that follows from the reports of a view's members: who stays, and how they come to the same state (pure).

1. Everybody has reported, is dead or is unreachable.
2. Of members that report to be unreachable for each other, the larger side stays. If the reports show no clear cut, as
   some may not have noticed it yet, all stay for one more attempt.
3. Who stays is a majority of those that are not certainly dead; exactly half counts with the lowest of their ranks.
4. All joiners that are ready are admitted.
5. Members that leave provide their state until the next world has formed.
6. Replicated state: all receive it from the lowest rank of the most advanced. Nobody has applied the step under way: it
   is repeated. Sharded state: if one member has applied an update, all others hold the gradients for it, and apply it
   too; a lost shard comes from its copy.
7. State that nobody holds comes from the newest checkpoint; without one, the run ends.
8. If all leave, or so many that too few are left, the last ones form one more world, in which they save a checkpoint.

The run ends well with a view too: when all members of a view have reported that they have trained all steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from paceline.elastic.view import Evidence, Recovery, Removal, Report, Rules, View

__all__ = ["ALL_LEAVE", "first_view", "has_quorum", "mutually_reachable", "next_view"]

ALL_LEAVE = "every member leaves"
"""Why a run ends: all its members shall leave at once."""

_Reports = Mapping[str, Report]


def first_view(members: Sequence[str], step: int = 0) -> View:
    """Return view 0, whose members hold the state of `step` already.

    Example:
        >>> first_view(["a/0/0", "a/1/0"]).members
        ('a/0/0', 'a/1/0')
    """
    return View(0, tuple(members), Recovery("members", step, base=0, layout=tuple(members)))


def next_view(view: View, evidence: Evidence, rules: Rules) -> View | Literal["wait", "no quorum"]:
    """Return the view after `view`.

    Returns:
        The view; ``"wait"``: a report or a joiner is missing; ``"no quorum"``: the composer belongs to a minority.

    Example:
        >>> view = first_view(["a", "b", "c"])
        >>> reports = frozenset(Report(1, member, step=7, holds=(0,)) for member in "ac")
        >>> then = next_view(view, Evidence(reports, dead=frozenset("b")), Rules("replicated"))
        >>> then.members, then.recovery.step, then.removed
        (('a', 'c'), 7, (Removal(member='b', cause='dead'),))
    """
    received = {each.member: each for each in evidence.reports if each.epoch == view.epoch + 1}
    if all(member in received and received[member].finished for member in view.members):
        return View(view.epoch + 1, (), Recovery("none"), finished=True)
    alive = [member for member in view.participants if member not in evidence.dead]
    if any(member not in received and member not in evidence.unreachable for member in alive):
        return "wait"
    present = [member for member in alive if member in received]
    trained = any(received[member].trained for member in present)
    present = mutually_reachable(present, received, patient=trained or view.attempt == 0)
    voters = [member for member in alive if member in view.members] or alive
    if not has_quorum(voters, [member for member in present if member in voters]):
        return "no quorum"
    reports = {member: received[member] for member in present}
    members = [one for one, report in reports.items() if one in view.members and not report.leaving]
    ready: tuple[str, ...] = ()
    closing = False
    if not members or not all(reports[one].finished for one in members):  # else nothing is left to train
        ready = max((evidence.joiners, *(each.joiners for each in reports.values())), key=len)
        members += [one for one in ready if one not in evidence.dead]
        leave = any(report.leaving for report in reports.values())
        closing = (
            rules.saves and leave and len(members) < rules.min_ranks
        )  # nobody waits with those that leave
        if 0 < len(members) < rules.min_ranks and not closing:
            if not evidence.waited:
                return "wait"
            return _end(
                view, f"{len(members)} of at least {rules.min_ranks} ranks are left, and none joined in time"
            )
    if closing:
        members, ready = list(reports), ()
    following = _view_of(view, members, reports, evidence.dead, rules)
    following = replace(following, closing=closing and not following.ends)
    attempt = 0 if trained else view.attempt + 1
    return replace(following, attempt=attempt, slots=view.slots + len(ready))


def _end(view: View, reason: str, removed: tuple[Removal, ...] = ()) -> View:
    """Return the view that ends the run for a reason."""
    return View(view.epoch + 1, (), Recovery("none"), removed=removed, reason=reason)


def _view_of(
    view: View, members: Sequence[str], reports: _Reports, dead: Collection[str], rules: Rules
) -> View:
    """Return the next view with given members, and where they have their state from."""
    if not members:
        return _end(view, ALL_LEAVE)
    recover = _recover_replicated if rules.strategy == "replicated" else _recover_sharded
    recovery, reason = recover(view, reports, members), ""
    leaving: list[str] = []
    if recovery is not None:
        leaving = [one for one in reports if one not in members and _provides(one, reports, recovery)]
    removed = tuple(
        Removal(one, "dead" if one in dead else "left" if one in reports else "unreachable")
        for one in view.participants
        if one not in members and one not in leaving
    )
    if recovery is None:
        reason = "state is lost with " + ", ".join(f"{each.member} ({each.cause})" for each in removed)
        steps = [report.checkpoint for report in reports.values() if report.checkpoint is not None]
        if not steps:
            return _end(view, f"{reason}, and there is no checkpoint", removed)
        recovery = Recovery("checkpoint", max(steps))
        reason += f": training goes on from the checkpoint of step {max(steps)}"
    return View(view.epoch + 1, tuple(members), recovery, tuple(leaving), removed, reason=reason)


def has_quorum(alive: Sequence[str], present: Collection[str]) -> bool:
    """Return whether those present may go on without the others.

    Args:
        alive: members that are not certainly dead, in rank order.
        present: those of them that take part in the change.

    Example:
        >>> has_quorum("abcd", "ab"), has_quorum("abcd", "cd"), has_quorum("abc", "bc")
        (True, False, True)
    """
    majority = 2 * len(present) - len(alive)
    return majority > 0 or (majority == 0 and bool(alive) and alive[0] in present)


def mutually_reachable(members: Sequence[str], reports: _Reports, *, patient: bool = False) -> list[str]:
    """Return the members that stay if those that can't reach each other must not be in one world.

    That counts only if both report it: one that has reported and ended since says nothing of others. The member with
    the most broken links is removed until none is broken. Among equals that is one that can't reach the lowest rank, so
    that of two halves the one with rank 0 stays.

    Args:
        members: that have reported, in rank order.
        reports: of them.
        patient: return all, unless none of those that stay can reach any of the others.

    Example:
        >>> cut = {"a": "cd", "b": "cd", "c": "ab", "d": "ab"}
        >>> reports = {one: Report(1, one, 0, unreachable=tuple(others)) for one, others in cut.items()}
        >>> mutually_reachable("abcd", reports)
        ['a', 'b']
    """
    broken = {
        member: {
            other
            for other in reports[member].unreachable
            if other in members and member in reports[other].unreachable
        }
        for member in members
    }
    links = {member: frozenset(others) for member, others in broken.items()}
    staying = list(members)
    while any(broken.values()):
        lowest = next(member for member in staying if broken[member])
        worst = max(
            range(len(staying)),
            key=lambda at: (len(broken[staying[at]]), lowest in broken[staying[at]], at),
        )
        removed = staying.pop(worst)
        for other in broken.pop(removed):
            broken[other].discard(removed)
    clear = all(links[one].issuperset(staying) for one in members if one not in staying)
    return list(members) if patient and not clear else staying


# ---------------------------------------------------------------- state


def _provides(leaver: str, reports: _Reports, recovery: Recovery) -> bool:
    """Return whether a member that leaves holds state of which the next world is formed."""
    return leaver == recovery.source or recovery.base in reports[leaver].holds


def _recover_replicated(view: View, reports: _Reports, members: Sequence[str]) -> Recovery | None:
    """Return who sends the state to whom: a member that stays, if one of them is most advanced."""
    valid = {member: report.step for member, report in reports.items() if report.holds}
    if not valid:
        return None
    step = max(valid.values())
    advanced = [member for member, at in valid.items() if at == step]
    source = next((member for member in advanced if member in members), advanced[0])
    receivers = tuple(member for member in members if member not in advanced)
    return Recovery("members", step, source=source, receivers=receivers)


def _recover_sharded(view: View, reports: _Reports, members: Sequence[str]) -> Recovery | None:
    """Return how to recover from the newest layout of which no shard is lost."""
    for base, layout in ((view.epoch, view.members), (view.recovery.base, view.recovery.layout)):
        holders = {
            member: report for member, report in reports.items() if member in layout and base in report.holds
        }
        shards = _providers(layout, holders)
        reached = _roll_forward(holders) if shards is not None else None
        if shards is not None and reached is not None:
            step, applying = reached
            return Recovery("members", step, tuple(applying), base=base, layout=layout, shards=shards)
    return None


def _providers(layout: Sequence[str], holders: Collection[str]) -> tuple[str, ...] | None:
    """Return who provides each shard of a layout; None: one is lost with its copy."""
    providers = []
    for index, owner in enumerate(layout):
        neighbour = layout[index - 1]
        if owner not in holders and neighbour not in holders:
            return None
        providers.append(owner if owner in holders else neighbour)
    return tuple(providers) if providers else None


def _roll_forward(holders: _Reports) -> tuple[int, list[str]] | None:
    """Return the step to train next, and who applies the one before it first; None: that can't be done.

    If one has applied a step, all others must hold its complete gradients, which the confirmation guarantees. If all
    hold the complete gradients of the step under way, it is applied; else it is repeated.
    """
    step = max(report.step for report in holders.values())
    behind = [member for member, report in holders.items() if report.step < step]
    if behind:
        ready = all(holders[one].step == step - 1 and holders[one].stage == "complete" for one in behind)
        return (step, behind) if ready else None
    if all(report.stage == "complete" for report in holders.values()):
        return step + 1, list(holders)
    return step, []
