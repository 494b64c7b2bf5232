"""What limits a run, and what to do about it: by rules over the shares of its phases.

How fast a run's gradients went through its network: bytes over the time in which they were under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline._core.format import format_bytes, format_count, format_decimal, format_seconds
from paceline.tools.plan.slow_network import Option, advise
from paceline.tools.report.run.run_summary import RankTime, RunSummary
from paceline.tools.report.run.step_breakdown import Piece, merge_intervals
from paceline.tools.report.run.straggler_text import straggler_cause, straggler_remedy
from paceline.tools.report.run.trace_reader import RankTrace, TracedStep

__all__ = ["Bottleneck", "Remedy", "find_bottleneck", "mean_share", "percent", "transfer_rate"]

_LEAST_SHARE = {
    "tasks": 0.20,
    "data": 0.10,
    "straggler": 0.03,
    "uneven": 0.10,
    "communication": 0.10,
    "other": 0.20,
}
"""Of the step (of all time, for tasks), below which it is not said to limit."""


@dataclass(frozen=True)
class Remedy:
    """What to do, how, and what that is expected to bring."""

    what: str
    how: str
    expected: str = ""


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run.

    Attributes:
        kind: ``"tasks"``, ``"data"``, ``"straggler"``, ``"uneven"``, ``"communication"``, ``"other"``, ``"computing"``.
        sentences: it in words, first what it is, then why.
        remedies: what to do, the most useful first.
    """

    kind: str
    sentences: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()


def find_bottleneck(summary: RunSummary, facts: Mapping[str, object]) -> Bottleneck:
    """Return what limits a run.

    Args:
        summary: its numbers, with the ranks' times. facts: the content of ``run.json``.
    """
    shares = _shares(summary)
    large = {kind: share for kind, share in shares.items() if share >= _LEAST_SHARE[kind]}
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
            return _other(shares[kind])
    return _computing(summary)


def _shares(summary: RunSummary) -> dict[str, float]:
    """Return the share of the step that each limit takes, by kind; of what nothing is known, 0.

    Where one rank waits for its data, the others wait for it: that is a straggler, and no limit of the data.
    """
    ranks, arrivals, step = summary.ranks, summary.arrivals, _step(summary)
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
    """Return the share of a phase, mean of the ranks."""
    return fmean(rank.share(phase) for rank in ranks)


def _tasks(between: float) -> Bottleneck:
    return Bottleneck(
        "tasks",
        (
            f"Work outside of the training step limits this run: {percent(between)} of the time goes into held-out "
            "losses and checkpoints.",
        ),
        (
            Remedy("Do it less often", "--eval-every, --checkpoint-every; paceline.Checkpoint(every=…)"),
            Remedy("Measure on less text", "--eval-windows"),
        ),
    )


def _data(data: float) -> Bottleneck:
    return Bottleneck(
        "data",
        (f"Data limits this run: ranks wait {percent(data)} of the time for their next batch.",),
        (
            Remedy(
                "Fetch ahead", "paceline.Loader(…, num_workers=4, persistent_workers=True, prefetch_factor=4)"
            ),
            Remedy("Prepare the data once", "tokenised, decoded, on a local disk"),
        ),
    )


def _other(other: float) -> Bottleneck:
    return Bottleneck(
        "other", (f"Other work inside of the step limits this run: {percent(other)} are in no phase.",)
    )


def _straggler(summary: RunSummary) -> Bottleneck:
    found = summary.arrivals.straggler
    assert found is not None, "there is one"
    waits = fmean(each.imbalance for each in summary.arrivals.ranks if each.rank != found.rank)
    step = _step(summary)
    return Bottleneck(
        "straggler",
        (
            f"Rank {found.rank} limits this run: it comes last to the exchange in {percent(found.last)} of the steps, "
            f"{format_seconds(found.late)} after the others, who wait {percent(waits / step)} of the time for it.",
            straggler_cause(found),
        ),
        (
            Remedy(
                *straggler_remedy(found),
                f"steps of {format_seconds(max(0.0, step - found.late))}, if it kept up",
            ),
        ),
    )


def _uneven(uneven: float, exposed: float) -> Bottleneck:
    return Bottleneck(
        "uneven",
        (
            f"Ranks wait for each other: of the {percent(exposed)} of the time in which they stand still, "
            f"{percent(uneven)} are until the last one has come, now one rank and now another; a faster network would "
            "not help.",
        ),
        (
            Remedy("Make batches alike", "samples of like length together, the same number on every rank"),
            Remedy("Leave the processors to the ranks", "paceline doctor; fewer ranks or threads than cores"),
            Remedy("Synchronise less often", "--accumulate: late and early steps even out", "waits shrink"),
        ),
    )


def _step(summary: RunSummary) -> float:
    return fmean(rank.total for rank in summary.ranks)


def _communication(summary: RunSummary, exposed: float, facts: Mapping[str, object]) -> Bottleneck:
    step = _step(summary)
    rate = transfer_rate(summary.timelines)
    one_host = _on_one_host(facts)
    sent = f" for {format_bytes(summary.nbytes)} a step" if summary.nbytes else ""
    where = "between processes of this host" if one_host else "through the network"
    through = f", which go {where} at {format_decimal(rate)}/s" if rate and sent else ""
    sentence = (
        f"Communication limits this run: ranks stand still {percent(exposed)} of the time{sent}{through}."
    )
    smaller = [] if one_host else _smaller(summary, facts, rate, step)
    return Bottleneck("communication", (sentence,), (*smaller, *_rarer(step, exposed)))


def _on_one_host(facts: Mapping[str, object]) -> bool:
    """Tell whether all ranks are known to share a host, where packing bytes takes longer than moving them."""
    world = facts.get("world")
    return isinstance(world, Mapping) and world.get("nodes") == 1


def _smaller(
    summary: RunSummary, facts: Mapping[str, object], rate: float | None, step: float
) -> list[Remedy]:
    """Return ways to send less, each with the step that is expected of it; none where too little is known."""
    parameters, size = facts.get("parameters"), len(summary.ranks)
    if not isinstance(parameters, int) or not rate or summary.nbytes is None:
        return []
    if summary.nbytes < 3.5 * parameters:  # it sends fewer bytes already
        return []
    alone = step - fmean(rank.seconds["exposed"] for rank in summary.ranks)
    if alone <= 0:
        return []
    advice = advise(parameters, size, rate, alone)
    exact = next(option for option in advice.options if option.compression == "int8")
    options = {option.flags: option for option in (exact, advice.chosen) if option.flags}
    return [
        Remedy(
            f"Send {option.name}",
            f"{option.flags}, or {_in_python(option)}",
            f"steps of {format_seconds(option.step_seconds)} at best instead of {format_seconds(step)}; "
            f"effect on the loss: {option.effect}",
        )
        for option in options.values()
    ]


def _in_python(option: Option) -> str:
    """Return how a loop of one's own asks for it."""
    if option.every == 1:
        return f'paceline.Sync(compression="{option.compression}")'
    block = "paceline.LocalSGD" if option.outer == "average" else "paceline.DiLoCo"
    more = f", fragments={option.fragments}" if option.fragments > 1 else ""
    more += f", delay={option.delay}" if option.delay else ""
    return f'{block}(model, optim, every={option.every}, compression="{option.compression}"{more})'


def _rarer(step: float, exposed: float) -> list[Remedy]:
    twice = step * (1 - exposed) + step * exposed / 2
    return [
        Remedy(
            "Send half as often",
            "twice the batch a rank, or --accumulate 2 (with model.accumulate(): …)",
            f"about {format_seconds(twice)} instead of {format_seconds(step)} for as many samples; the global batch is "
            "twice as large",
        ),
        Remedy(
            "Let it be tuned",
            '--sync auto, or paceline.DataParallel(net, sync="auto")',
            "exact; bucket size and sharding",
        ),
    ]


def _computing(summary: RunSummary) -> Bottleneck:
    pace = "" if summary.speed is None else f" at {format_count(summary.speed[0])} {summary.speed[1]}/s"
    return Bottleneck(
        "computing",
        (f"Computing limits this run{pace}: more ranks or faster ones would help, a faster network hardly.",),
        (
            Remedy(
                "See what more ranks would bring",
                "paceline bench parts, then paceline plan --devices 1,2,4,8",
            ),
        ),
    )


def percent(share: float) -> str:
    """Return a share in per cent."""
    return f"{100 * share:.0f}\u00a0%"


def transfer_rate(timelines: Mapping[int, RankTrace]) -> float | None:
    """Return the bytes a second that a rank sent while calls were under way; None where nothing was, or nobody knows.

    A call is under way from the moment at which the last rank has launched it until it is through.

    Args:
        timelines: each rank's steps.
    """
    if len(timelines) < 2:
        return None
    lines_of_rank = [{line.step: line for line in each.warm} for each in timelines.values()]
    nbytes = seconds = 0.0
    for step in set.intersection(*(set(lines) for lines in lines_of_rank)):
        lines = [each[step] for each in lines_of_rank]
        nbytes, seconds = nbytes + sum(call.sent for call in lines[0].calls), seconds + _busy(lines)
    return nbytes / seconds if seconds else None


def _busy(lines: Sequence[TracedStep]) -> float:
    """Return for how long calls of the first rank were under way in a step."""
    launched: dict[tuple[str, int], float] = {}
    for line in lines:
        for call in line.calls:
            key = (call.kind, call.bucket)
            launched[key] = max(launched.get(key, 0.0), line.start + call.launched)
    first, busy = lines[0], []
    for call in first.calls:
        begin = launched[call.kind, call.bucket] - first.start
        busy.append(Piece("call", begin, max(begin, call.end)))
    return sum(piece.end - piece.start for piece in merge_intervals(busy))
