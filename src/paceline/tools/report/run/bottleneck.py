"""Rule-based diagnosis of a run: what limits it, by the shares of its phases, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline._core.format import (
    format_bytes,
    format_count,
    format_decimal,
    format_percent,
    format_ratio,
    format_seconds,
)
from paceline.tools.plan.compression_or_local_sgd import SyncOption, advise_network
from paceline.tools.report.run.run_summary import RankTime, RunSummary
from paceline.tools.report.run.step_breakdown import merge_intervals
from paceline.tools.report.run.straggler_detection import StragglerBreakdown
from paceline.tools.report.run.trace_reader import RankTrace, StepInterval, TracedStep

__all__ = ["Bottleneck", "Remedy", "find_bottleneck", "mean_share", "transfer_rate"]

_MIN_SHARE = {
    "tasks": 0.20,
    "data": 0.10,
    "straggler": 0.03,
    "uneven": 0.10,
    "communication": 0.10,
    "other": 0.20,
}
"""Share of the step (of all time, for tasks) from which a phase counts as the bottleneck."""


@dataclass(frozen=True)
class Remedy:
    """An action, how to take it, and its expected effect."""

    action: str
    how: str
    expected: str = ""


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run.

    Attributes:
        kind: ``"tasks"``, ``"data"``, ``"straggler"``, ``"uneven"``, ``"communication"``, ``"other"``, ``"computing"``.
        sentences: the bottleneck, then its cause.
        remedies: the most useful first.
    """

    kind: str
    sentences: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()


def find_bottleneck(summary: RunSummary, facts: Mapping[str, object]) -> Bottleneck:
    """Return what limits a run.

    Args:
        summary: its numbers, with the ranks' times.
        facts: the content of ``run.json``.
    """
    shares = _shares(summary)
    large = {kind: share for kind, share in shares.items() if share >= _MIN_SHARE[kind]}
    kind = max(large, key=large.__getitem__, default="computing")
    match kind:
        case "tasks":
            return _tasks(shares[kind])
        case "data":
            return _data(shares[kind])
        case "straggler":
            return _straggler(summary)
        case "uneven":
            return _uneven(shares[kind], mean_share(summary.ranks, "exposed"))
        case "communication":
            return _communication(summary, mean_share(summary.ranks, "exposed"), facts)
        case "other":
            text = (
                f"Other work inside the step limits this run: {format_percent(shares[kind])} are in no phase."
            )
            return Bottleneck("other", (text,))
    return _computing(summary)


def _shares(summary: RunSummary) -> dict[str, float]:
    """Return the share of the step of each kind of bottleneck; 0 where unknown.

    If a single rank waits for its data, the others wait for that rank: a straggler, not a data bottleneck.
    """
    ranks, arrivals, step = summary.ranks, summary.arrivals, _step_seconds(summary)
    imbalance = fmean(each.imbalance for each in arrivals.ranks) / step if arrivals.ranks and step else 0.0
    late = arrivals.straggler.lateness / step if arrivals.straggler is not None else 0.0
    return {
        "tasks": fmean(rank.between / (rank.between + rank.total) for rank in ranks if rank.total),
        "data": min(rank.share("data") for rank in ranks),
        "straggler": late,
        "uneven": 0.0 if late else imbalance,
        "communication": mean_share(ranks, "exposed") - imbalance if len(ranks) > 1 else 0.0,
        "other": mean_share(ranks, "other"),
    }


def mean_share(ranks: Sequence[RankTime], phase: str) -> float:
    """Return the share of a phase, averaged over ranks."""
    return fmean(rank.share(phase) for rank in ranks)


def _step_seconds(summary: RunSummary) -> float:
    return fmean(rank.total for rank in summary.ranks)


def _tasks(between: float) -> Bottleneck:
    return Bottleneck(
        "tasks",
        (
            f"Work outside the training step limits this run: {format_percent(between)} of the time goes into "
            "held-out losses and checkpoints.",
        ),
        (
            Remedy("Do it less often", "--eval-every, --checkpoint-every; paceline.Checkpoint(every=…)"),
            Remedy("Plan how often to save", "paceline plan checkpoint, with this run's folder"),
            Remedy("Share the evaluation among ranks", "paceline.evaluate; and evaluate on fewer batches"),
        ),
    )


def _data(data: float) -> Bottleneck:
    loader = "paceline.Loader(…, num_workers=4, persistent_workers=True, prefetch_factor=4)"
    return Bottleneck(
        "data",
        (f"Data limits this run: ranks wait {format_percent(data)} of the time for their next batch.",),
        (
            Remedy("Prefetch batches", loader),
            Remedy("Prepare the data once", "tokenised, decoded, on a local disk"),
        ),
    )


def _uneven(uneven: float, exposed: float) -> Bottleneck:
    return Bottleneck(
        "uneven",
        (
            f"Ranks wait for each other: of the {format_percent(exposed)} of exposed communication, "
            f"{format_percent(uneven)} are spent waiting for the last rank, a different one each time; a faster "
            "network would not help.",
        ),
        (
            Remedy("Balance batches", "samples of similar length together, the same number on every rank"),
            Remedy("Leave the processors to the ranks", "paceline doctor; fewer ranks or threads than cores"),
            Remedy("Synchronise less often", "--accumulate: late and early steps even out", "waits shrink"),
        ),
    )


def _computing(summary: RunSummary) -> Bottleneck:
    speed = "" if summary.speed is None else f" at {format_count(summary.speed[0])} {summary.speed[1]}/s"
    return Bottleneck(
        "computing",
        (f"Computing limits this run{speed}: more or faster ranks would help, a faster network would not.",),
        (Remedy("Predict more ranks", "paceline bench parts, then paceline plan --world-size 1,2,4,8"),),
    )


# ---------------------------------------------------------------------- stragglers

_COMPUTING = ("forward", "backward", "optimizer")
_MORE = 1.15  # ratio from which two quantities count as different


def _straggler(summary: RunSummary) -> Bottleneck:
    found = summary.arrivals.straggler
    assert found is not None
    waits = fmean(each.imbalance for each in summary.arrivals.ranks if each.rank != found.rank)
    step = _step_seconds(summary)
    without = f"steps of {format_seconds(max(0.0, step - found.lateness))} if it kept up"
    return Bottleneck(
        "straggler",
        (
            f"Rank {found.rank} limits this run: it is the last to reach the exchange in "
            f"{format_percent(found.last_share)} of the steps, {format_seconds(found.lateness)} after the others, "
            f"which wait {format_percent(waits / step)} of the time for it.",
            straggler_cause(found),
        ),
        (Remedy(*straggler_remedy(found), without),),
    )


def straggler_cause(straggler: StragglerBreakdown) -> str:
    """Return one sentence on the part of its step that takes longer than on the other ranks, and why."""
    part = _longest_excess(straggler)
    mine, theirs = straggler.parts[part], straggler.other_parts[part]
    compared = f"{format_seconds(mine)} per step, {format_seconds(theirs)} on the others"
    if _more_samples(straggler):
        return f"It has more to do: {straggler.samples:g} samples per step, the others {straggler.others_samples:g}."
    match part:
        case "data":
            return f"It waits for its data: {compared}."
        case "between":
            return f"It does more between steps (held-out losses, checkpoints): {compared}."
        case "other":
            return f"User code around its step takes longer: {compared}."
    ratio = format_ratio(mine / theirs) if theirs > 0 else "many times"
    computing = f"Its {part} takes {ratio} as long ({compared})"
    if straggler.cpu >= _MORE * straggler.others_cpu:
        return f"{computing} and more processor time: its processor is slower, or it computes more."
    if straggler.preempted >= 5 + 2 * straggler.others_preempted:
        return (
            f"{computing} with the same processor time: other programs preempt it {straggler.preempted:.0f} times "
            "per step."
        )
    return (
        f"{computing} without more processor time: it sleeps or waits for a disk, a lock or another process."
    )


def straggler_remedy(straggler: StragglerBreakdown) -> tuple[str, str]:
    """Return the action against a straggler and how to take it."""
    rank = straggler.rank
    if _more_samples(straggler):
        how = 'paceline.Loader(…, uneven="rebalance"), or shares that fit the ranks\' speeds'
        return "Distribute samples evenly", how
    match _longest_excess(straggler):
        case "data":
            how = "more num_workers in paceline.Loader, a local copy of the data"
            return f"Speed up the data of rank {rank}", how
        case "between":
            how = "paceline.evaluate and paceline.Checkpoint share such work among ranks"
            return "Do the same work on every rank", how
        case "other":
            return f"Check what only rank {rank} does", "logging, printing, saving: less often, or later"
    if straggler.cpu >= _MORE * straggler.others_cpu:
        how = 'paceline.Loader(…, shares="measured") distributes by speed; or paceline.AsyncDataParallel'
        return f"Give rank {rank} less work", how
    how = 'paceline doctor and top on that host; paceline.Loader(…, shares="measured") if it stays so'
    return f"Stop other programs on the host of rank {rank}", how


def _longest_excess(straggler: StragglerBreakdown) -> str:
    return max(straggler.excess, key=lambda part: straggler.excess[part])


def _more_samples(straggler: StragglerBreakdown) -> bool:
    computing = sum(straggler.excess[part] for part in _COMPUTING)
    return computing > 0 and straggler.samples > _MORE * straggler.others_samples > 0


# ---------------------------------------------------------------------- communication


def _communication(summary: RunSummary, exposed: float, facts: Mapping[str, object]) -> Bottleneck:
    step = _step_seconds(summary)
    rate = transfer_rate(summary.timelines)
    one_host = _on_one_host(facts)
    sent = f" for {format_bytes(summary.nbytes)} per step" if summary.nbytes else ""
    where = "between processes of this host" if one_host else "over the network"
    through = f", sent {where} at {format_decimal(rate)}/s" if rate and sent else ""
    sentence = (
        f"Communication limits this run: ranks wait {format_percent(exposed)} of the time{sent}{through}."
    )
    smaller = [] if one_host else _send_less(summary, facts, rate, step)
    return Bottleneck("communication", (sentence,), (*smaller, *_send_less_often(step, exposed)))


def _on_one_host(facts: Mapping[str, object]) -> bool:
    """Return whether all ranks share a host, where compressing bytes takes longer than moving them."""
    world = facts.get("world")
    return isinstance(world, Mapping) and world.get("nodes") == 1


def _send_less(
    summary: RunSummary, facts: Mapping[str, object], rate: float | None, step: float
) -> list[Remedy]:
    """Return ways to send fewer bytes with the predicted step time; none if too little is known."""
    parameters, size = facts.get("parameters"), len(summary.ranks)
    if not isinstance(parameters, int) or not rate or summary.nbytes is None:
        return []
    if summary.nbytes < 3.5 * parameters:  # already compressed
        return []
    unexposed = step - fmean(rank.seconds["exposed"] for rank in summary.ranks)
    if unexposed <= 0:
        return []
    advice = advise_network(parameters, size, rate, unexposed)
    int8 = next(option for option in advice.options if option.compression == "int8")
    options = {option.flags: option for option in (int8, advice.chosen) if option.flags}
    return [
        Remedy(
            f"Send {option.name}",
            f"{option.flags}, or {_in_python(option)}",
            f"steps of {format_seconds(option.step_seconds)} at best instead of {format_seconds(step)}; "
            f"effect on the loss: {option.effect}",
        )
        for option in options.values()
    ]


def _in_python(option: SyncOption) -> str:
    if option.every == 1:
        return f'paceline.Sync(compression="{option.compression}")'
    block = "paceline.LocalSGD" if option.outer == "average" else "paceline.DiLoCo"
    more = f", fragments={option.fragments}" if option.fragments > 1 else ""
    more += f", delay={option.delay}" if option.delay else ""
    more += ", keep_local_steps=True" if option.delay and option.outer == "diloco" else ""
    return f'{block}(model, optim, every={option.every}, compression="{option.compression}"{more})'


def _send_less_often(step: float, exposed: float) -> list[Remedy]:
    halved = format_seconds(step * (1 - exposed) + step * exposed / 2)
    return [
        Remedy(
            "Send half as often",
            "twice the batch per rank, or --accumulate 2 (with model.accumulate(): …)",
            f"about {halved} instead of {format_seconds(step)} for the same number of samples; the global batch "
            "doubles",
        ),
        Remedy(
            "Tune synchronisation automatically",
            '--strategy auto, or paceline.DataParallel(net, sync="auto")',
            "exact; bucket size and sharding",
        ),
    ]


def transfer_rate(timelines: Mapping[int, RankTrace]) -> float | None:
    """Return the bytes per second that rank 0 sent while calls were in transfer; None if unknown.

    A call is in transfer from its launch on the last rank until it is done.

    Args:
        timelines: each rank's steps.
    """
    if len(timelines) < 2:
        return None
    steps_of_rank = [{step.step: step for step in each.warm} for each in timelines.values()]
    nbytes = seconds = 0.0
    for number in set.intersection(*(set(steps) for steps in steps_of_rank)):
        steps = [each[number] for each in steps_of_rank]
        nbytes, seconds = (
            nbytes + sum(call.sent for call in steps[0].calls),
            seconds + _transfer_seconds(steps),
        )
    return nbytes / seconds if seconds else None


def _transfer_seconds(steps: Sequence[TracedStep]) -> float:
    """Return how long calls of the first rank were in transfer in a step."""
    launched: dict[tuple[str, int], float] = {}
    for step in steps:
        for call in step.calls:
            key = (call.kind, call.bucket)
            launched[key] = max(launched.get(key, 0.0), step.start + call.launched)
    first, busy = steps[0], []
    for call in first.calls:
        begin = launched[call.kind, call.bucket] - first.start
        busy.append(StepInterval("call", begin, max(begin, call.end)))
    return sum(interval.end - interval.start for interval in merge_intervals(busy))
