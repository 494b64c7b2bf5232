"""An asynchronous run in words: what it reached, how old its updates were, what it sent, what stands out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline._core.format import format_count, format_decimal, format_seconds
from paceline.tools.report.hub.hub_records import HubRun
from paceline.tools.report.hub.hub_summary import ContributionRow, ddp_nbytes, dominant_row, finite_ratio

__all__ = [
    "contributions_caption",
    "decisions_caption",
    "format_refusals",
    "hub_headline",
    "number",
    "percent",
    "plural",
    "scores_caption",
    "staleness_caption",
    "traffic_caption",
]

_MOSTLY_REFUSED = 0.5
_KEPT = 1.1  # of what is reserved, at most: see `paceline.transport.token_bucket`


def hub_headline(run: HubRun, rows: Sequence[ContributionRow]) -> tuple[str, ...]:
    """Return a few sentences: what the run reached, how old updates were, what was sent, what stands out.

    Example:
        >>> headline(run, rows_of(run))  # doctest: +SKIP
        ('In 45 s the hub took in 147 updates of 5 workers, learnt from 3.21 k samples; none was refused.',
         "The centre's score went from 0.733 to 0.28 (lower is better).", …)
    """
    if not run.updates:
        return (_nothing_yet(run), *_apart(run), *_refused_workers(rows))
    every = [_reached(run), _score(run), _age(run), _sent(run), *_refused_workers(rows), _dominant(rows)]
    return tuple(sentence for sentence in [*every, _full(run)] if sentence)


def _nothing_yet(run: HubRun) -> str:
    if not run.records:
        return "Nothing was noted yet: no worker came, and the hub has just begun."
    who = f"{plural(len(run.crew), 'worker')} came" if len(run.workers) else "no worker came"
    refused = sum(run.refused.values())
    more = f"; {plural(refused, 'update')} {_was(refused)} refused" if refused else ""
    return f"No update was taken in yet: in {format_seconds(run.seconds)} {who}{more}."


def _apart(run: HubRun) -> list[str]:
    """Return what workers told that train apart."""
    told = {number: curve.points()[-1][1] for number, curve in run.scores.items()}
    if not told or run.merged_at is not None:
        return []
    best = min(told, key=lambda each: told[each])
    name = run.workers.names().get(best, str(best))
    verb = "trains" if len(told) == 1 else "train"
    return [f"{plural(len(told), 'worker')} {verb} apart; the best score is {number(told[best])}, of {name}."]


def _reached(run: HubRun) -> str:
    refused, share = sum(run.refused.values()), 0.0
    told = "none was refused"
    if refused:
        share = finite_ratio(refused, refused + run.updates)
        told = f"{refused} {_was(refused)} refused ({percent(share)})"
    return (
        f"In {format_seconds(run.seconds)} the hub took in {plural(run.updates, 'update')} of "
        f"{plural(_giving(run), 'worker')}, learnt from {_samples(run.samples)}; {told}."
    )


def _giving(run: HubRun) -> int:
    others = run.workers.others
    return sum(each.updates > 0 for each in run.workers) + (others.count if others.updates else 0)


def _score(run: HubRun) -> str:
    if run.first_score is None or run.last_score is None or run.best_score is None:
        return "No worker told a score of the centre, so how good it is can't be seen here."
    if run.centre_scores.count == 1:
        return f"The centre's score was told once: {number(run.lastly.score)} (lower is better)."
    text = f"The centre's score went from {number(run.firstly.score)} to {number(run.lastly.score)}"
    if run.last_score.score > run.first_score.score:
        text += ", worse than it began"
    if number(run.best_score.score) != number(run.last_score.score):
        text += f"; its best was {number(run.best.score)} after {format_seconds(run.best.at - run.begin)}"
    return f"{text} (lower is better)."


def _age(run: HubRun) -> str:
    median = run.staleness.median or 0.0
    return (
        f"Half of all updates were at most {median:.2g} rounds old when they came, the oldest "
        f"{run.staleness.largest:.3g}; in a round every worker sends one."
    )


def _sent(run: HubRun) -> str:
    link, ddp = run.traffic, ddp_nbytes(run)
    if not link.notes:
        return ""
    whole = link.sent + link.received
    text = f"{format_decimal(link.received)} came to the hub and {format_decimal(link.sent)} left it"
    if ddp is None or not whole:
        return f"{text}."
    ratio = ddp / whole
    than = f"{_times(ratio)} as much" if ratio >= 1 else f"only {percent(ratio)} of that"
    return f"{text}; for the same steps torch DDP would have sent {format_decimal(ddp)}, {than}."


def _refused_workers(rows: Sequence[ContributionRow]) -> list[str]:
    """Return one sentence about workers of which most is refused."""
    bad = [
        row
        for row in rows
        if row.worker.count == 1
        and sum(row.worker.refused.values()) > _MOSTLY_REFUSED * (row.worker.updates + _refusals(row))
    ]
    if not bad:
        return []
    first = bad[0]
    text = f"Most of what {first.name} sent was refused ({format_refusals(first.worker.refused)})"
    if len(bad) > 1:
        text += f", and so it is with {plural(len(bad) - 1, 'more worker')}"
    return [f"{text}: look there first."]


def _refusals(row: ContributionRow) -> int:
    return sum(row.worker.refused.values())


def _dominant(rows: Sequence[ContributionRow]) -> str:
    row = dominant_row(rows)
    return "" if row is None else f"{row.name} alone gave {percent(row.share)} of all that was learnt."


def _full(run: HubRun) -> str:
    share = finite_ratio(run.traffic.saturated, run.traffic.with_reservation)
    if share < 0.5:
        return ""
    return (
        f"The reserved rate limits this run: {percent(share)} of the time more than nine tenths of it were used. "
        "Rarer updates or stronger compression would help."
    )


# ---------------------------------------------------------------------- below the charts


def scores_caption(run: HubRun, drawn: int, *, losses: bool) -> str:
    """Return what the chart of scores or losses means.

    Args:
        run: of it. drawn: how many workers have a line. losses: it shows losses, for lack of scores.
    """
    if losses:
        text = f"Training losses as {plural(drawn, 'worker')} told them; none told a score of the centre."
    else:
        text = "Scores on held-out data, lower is better: the centre's, as workers measured it"
        text += f", and the own ones of {plural(drawn, 'worker')}." if drawn else "."
    marks = []
    if run.merged_at is not None:
        marks.append("dashed where all joined the best worker")
    if run.replacements:
        marks.append("a cross where a worker was replaced by the best")
    if run.traffic.downtimes:
        marks.append("grey where the hub was away")
    more = len(run.workers) - drawn
    if drawn and more > 0:
        text += f" {plural(more, 'more worker')} {'is' if more == 1 else 'are'} not drawn."
    return f"{text} {_sentence(marks)}".strip()


def contributions_caption(run: HubRun, rows: Sequence[ContributionRow]) -> str:
    """Return what the bars of workers mean."""
    of = "samples" if run.samples > 0 else "updates"
    text = (
        f"Share of all {of} that the centre was learnt from. Weight: how much the hub let it move the centre. "
        "Stale: rounds that passed between what an update began from and its arrival."
    )
    if _counts_steps(run):
        text += " Workers here count every step as one sample."
    if rows and rows[-1].worker.count > 1:
        text += f" The largest {len(rows) - 1} of {len(run.crew)} workers."
    return text


def _counts_steps(run: HubRun) -> bool:
    return run.samples > 0 and run.samples == sum(each.steps for each in [*run.workers, run.workers.others])


def staleness_caption(run: HubRun) -> str:
    """Return what the histogram of staleness means."""
    old = sum(count for begin, _, count in run.staleness_bars.rows() if begin >= 4)
    text = (
        "Rounds by which the centre had gone on when an update came: how many others it took in since the one "
        "that the worker began from, divided by the workers; "
    )
    share = finite_ratio(old, run.updates)
    return text + (f"{percent(share)} were 4 rounds old or more." if old else "none was as old as 4.")


def traffic_caption(run: HubRun) -> str:
    """Return what the chart of traffic means."""
    link = run.traffic
    text = (
        f"Bytes of messages per second at the hub, noted every few seconds: at most "
        f"{format_decimal(link.peak_in.rate)}/s came in and {format_decimal(link.peak_out.rate)}/s went out."
    )
    if not link.reserved:
        return f"{text} Nothing is reserved: as much as the link carries may be used."
    text += f" Reserved are {format_decimal(link.reserved[-1].rate)}/s each way (dashed)"
    if len(link.reserved) > 1:
        changed = max(0.0, link.reserved[-1].begin - run.begin)
        return f"{text}; that changed on the way, the last time after {format_seconds(changed)}."
    most = max(link.peak_received.rate, link.peak_sent.rate) / link.reserved[-1].rate
    return (
        f"{text}, of which at most {percent(most)} were in use{': more than that' if most > _KEPT else ''}."
    )


def decisions_caption(run: HubRun) -> str:
    """Return what the table of decisions holds."""
    text = "Who came and went, what was refused and what the hub decided; the newest is last."
    unseen = run.decisions.hidden
    return text + (f" {unseen:,} more are not shown." if unseen else "")


# ---------------------------------------------------------------------- numbers


def format_refusals(refused: Mapping[str, int], most: int = 4) -> str:
    """Return reasons of refusals with their counts, the commonest first.

    Example:
        >>> reasons({"stale": 1, "not finite": 3})
        'not finite 3, stale 1'
    """
    ranked = sorted(refused.items(), key=lambda each: (-each[1], each[0]))
    told = [f"{why} {count}" for why, count in ranked[:most]]
    rest = sum(count for _, count in ranked[most:])
    return ", ".join([*told, f"others {rest}"] if rest else told)


def number(value: float) -> str:
    """Return a score or loss for people: four significant digits.

    Example:
        >>> number(0.73274588), number(12345678.0)
        ('0.7327', '1.235e+07')
    """
    return f"{value:.4g}" if math.isfinite(value) else "not a number"


def percent(share: float) -> str:
    """Return a share as percent, small ones with a digit more.

    Example:
        >>> percent(0.123), percent(0.0123)
        ('12\\xa0%', '1.2\\xa0%')
    """
    return f"{100 * share:.0f}\u00a0%" if share >= 0.0995 or not share else f"{100 * share:.1f}\u00a0%"


def plural(count: float, noun: str) -> str:
    """Return a count with its noun.

    Example:
        >>> plural(1, "worker"), plural(12345, "update")
        ('1 worker', '12,345 updates')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _samples(samples: float) -> str:
    return "1 sample" if samples == 1 else f"{format_count(samples)} samples"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 9.95 else f"{ratio:.2g} times"


def _sentence(parts: Sequence[str]) -> str:
    if not parts:
        return ""
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."
