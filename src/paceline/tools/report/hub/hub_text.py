"""Sentences about an asynchronous run: progress, staleness, traffic, and what stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline._core.format import (
    format_count,
    format_decimal,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    plural,
)
from paceline.tools.report.hub.hub_records import HubRun
from paceline.tools.report.hub.hub_summary import ContributionRow, ddp_nbytes, dominant_row, finite_ratio

__all__ = [
    "contributions_caption",
    "decisions_caption",
    "format_refusals",
    "hub_headline",
    "scores_caption",
    "staleness_caption",
    "traffic_caption",
]

_MOSTLY_REFUSED = 0.5
_RATE_TOLERANCE = 1.1  # of the reserved rate, see `paceline.transport.token_bucket`


def hub_headline(run: HubRun, rows: Sequence[ContributionRow]) -> tuple[str, ...]:
    """Return a few sentences about progress, staleness, traffic, and what stands out.

    Example:
        >>> hub_headline(run, contribution_rows(run))  # doctest: +SKIP
        ('In 45 s the hub accepted 147 updates of 5 workers, trained on 3.21 k samples; none was refused.',
         "The global model's score went from 0.733 to 0.28 (lower is better).", …)
    """
    if not run.updates:
        return (_no_updates(run), *_separate_workers(run), *_refused_workers(rows))
    every = [_progress(run), _score(run), _staleness(run), _merges(run), _traffic(run)]
    every += _refused_workers(rows)
    return tuple(sentence for sentence in [*every, _dominant(rows), _saturated(run)] if sentence)


def _no_updates(run: HubRun) -> str:
    if not run.records:
        return "There are no records yet: no worker has joined, and the hub has just started."
    joined = f"{plural(len(run.workers), 'worker')} joined" if len(run.workers) else "no worker joined"
    refused = sum(run.refused.values())
    more = f"; {plural(refused, 'update')} {_was(refused)} refused" if refused else ""
    return f"No update has been accepted yet: in {format_seconds(run.seconds)} {joined}{more}."


def _separate_workers(run: HubRun) -> list[str]:
    """Return the best score of workers that train separately."""
    scores = {number: curve.points()[-1][1] for number, curve in run.scores.items()}
    if not scores or run.merged_at is not None:
        return []
    best = min(scores, key=lambda each: scores[each])
    name = run.workers.names().get(best, str(best))
    verb = "trains" if len(scores) == 1 else "train"
    return [
        f"{plural(len(scores), 'worker')} {verb} separately; the best score is {format_number(scores[best])}, "
        f"of {name}."
    ]


def _progress(run: HubRun) -> str:
    refused = sum(run.refused.values())
    refusals = "none was refused"
    if refused:
        share = finite_ratio(refused, refused + run.updates)
        refusals = f"{refused} {_was(refused)} refused ({format_percent(share)})"
    others = run.workers.others
    contributors = sum(each.updates > 0 for each in run.workers) + (others.count if others.updates else 0)
    samples = "1 sample" if run.samples == 1 else f"{format_count(run.samples)} samples"
    return (
        f"In {format_seconds(run.seconds)} the hub accepted {plural(run.updates, 'update')} of "
        f"{plural(contributors, 'worker')}, trained on {samples}; {refusals}."
    )


def _score(run: HubRun) -> str:
    first, last, best = run.first_score, run.last_score, run.best_score
    if first is None or last is None or best is None:
        return "No worker reported a score of the global model, so its quality is unknown."
    if run.global_scores.count == 1:
        return f"The global model was scored once: {format_number(last.score)} (lower is better)."
    text = f"The global model's score went from {format_number(first.score)} to {format_number(last.score)}"
    if last.score > first.score:
        text += ", worse than at the beginning"
    if format_number(best.score) != format_number(last.score):
        text += f"; its best was {format_number(best.score)} after {format_seconds(best.at - run.begin)}"
    return f"{text} (lower is better)."


def _staleness(run: HubRun) -> str:
    return (
        f"Half of all updates were at most {run.staleness.median or 0.0:.2g} rounds stale on arrival, the worst "
        f"{run.staleness.largest:.3g}; in a round every worker sends one."
    )


def _merges(run: HubRun) -> str:
    """Return a sentence on merges by quorum; empty if there are none."""
    if not run.merges:
        return ""
    return (
        f"{plural(run.merges, 'merge')} by quorum took {run.merged / run.merges:.2g} updates on average; half of them "
        f"waited at most {format_seconds(run.grace.median or 0.0)} for more than the quorum, and "
        f"{format_percent(finite_ratio(run.late, run.merged))} of the updates were late and joined the next merge."
    )


def _traffic(run: HubRun) -> str:
    traffic, ddp = run.traffic, ddp_nbytes(run)
    if not traffic.record_count:
        return ""
    total = traffic.sent + traffic.received
    text = f"The hub received {format_decimal(traffic.received)} and sent {format_decimal(traffic.sent)}"
    if ddp is None or not total:
        return f"{text}."
    ratio = ddp / total
    compared = f"{format_ratio(ratio)} as much" if ratio >= 1 else f"only {format_percent(ratio)} of that"
    return f"{text}; torch DDP would have sent {format_decimal(ddp)} for the same steps, {compared}."


def _refused_workers(rows: Sequence[ContributionRow]) -> list[str]:
    """Return one sentence about workers most of whose updates are refused."""
    bad = []
    for row in rows:
        refused = sum(row.worker.refused.values())
        if row.worker.count == 1 and refused > _MOSTLY_REFUSED * (row.worker.updates + refused):
            bad.append(row)
    if not bad:
        return []
    first = bad[0]
    text = f"Most updates of {first.name} were refused ({format_refusals(first.worker.refused)})"
    if len(bad) > 1:
        text += f", as were those of {plural(len(bad) - 1, 'more worker')}"
    return [f"{text}: investigate this first."]


def _dominant(rows: Sequence[ContributionRow]) -> str:
    row = dominant_row(rows)
    return "" if row is None else f"{row.name} alone contributed {format_percent(row.share)} of the training."


def _saturated(run: HubRun) -> str:
    share = finite_ratio(run.traffic.saturated, run.traffic.with_reservation)
    if share < 0.5:
        return ""
    return (
        f"The reserved rate limits this run: more than 90 % of it was used {format_percent(share)} of the time. "
        "Send updates less often, or compress them more."
    )


# ---------------------------------------------------------------------- captions


def scores_caption(run: HubRun, drawn: int, *, losses: bool) -> str:
    """Return the caption of the score chart.

    Args:
        run: the run.
        drawn: number of workers in the chart.
        losses: whether the chart shows training losses instead of scores.
    """
    if losses:
        text = (
            f"Training losses reported by {plural(drawn, 'worker')}; there are no scores of the global model."
        )
    else:
        text = "Scores on held-out data, lower is better: of the global model, as measured by workers"
        text += f", and of {plural(drawn, 'worker')} themselves." if drawn else "."
    marks = []
    if run.merged_at is not None:
        marks.append("dashed line: all workers adopt the best one's parameters")
    if run.replacements:
        marks.append("cross: a worker is replaced by the best")
    if run.downtime.downtimes:
        marks.append("grey: the hub is down")
    more = len(run.workers) - drawn
    if drawn and more > 0:
        text += f" {plural(more, 'more worker')} {'is' if more == 1 else 'are'} not drawn."
    if marks:
        described = "; ".join(marks)
        text += f" {described[0].upper()}{described[1:]}."
    return text


def contributions_caption(run: HubRun, rows: Sequence[ContributionRow]) -> str:
    """Return the caption of the chart of contributions."""
    unit = "samples" if run.samples > 0 else "updates"
    text = (
        f"Share of all {unit} the global model was trained on. Weight: share of the weights the hub gave to updates. "
        "Stale: rounds between the version an update started from and its arrival."
    )
    steps = sum(each.steps for each in [*run.workers, run.workers.others])
    if run.samples > 0 and run.samples == steps:
        text += " Workers of this run count each step as one sample."
    if rows and rows[-1].worker.count > 1:
        text += f" The largest {len(rows) - 1} of {len(run.workers)} workers."
    return text


def staleness_caption(run: HubRun) -> str:
    """Return the caption of the staleness histogram."""
    old = sum(count for begin, _, count in run.staleness_bars.rows() if begin >= 4)
    share = f"{format_percent(finite_ratio(old, run.updates))} were" if old else "none was"
    return (
        "Rounds by which the global model had advanced when an update arrived: updates accepted since the version the "
        f"worker started from, divided by the number of workers; {share} 4 rounds stale or more."
    )


def traffic_caption(run: HubRun) -> str:
    """Return the caption of the traffic chart."""
    traffic = run.traffic
    text = (
        f"Bytes of messages per second at the hub, recorded every few seconds: at most "
        f"{format_decimal(traffic.peak_received.rate)}/s received and {format_decimal(traffic.peak_sent.rate)}/s sent."
    )
    if not traffic.reserved:
        return f"{text} No rate is reserved: the whole link may be used."
    reserved = traffic.reserved[-1]
    text += f" {format_decimal(reserved.rate)}/s are reserved in each direction (dashed)"
    if len(traffic.reserved) > 1:
        return f"{text}; last changed after {format_seconds(max(0.0, reserved.begin - run.begin))}."
    most = max(traffic.peak_received.rate, traffic.peak_sent.rate) / reserved.rate
    return f"{text}; at most {format_percent(most)} of it was used{': too much' if most > _RATE_TOLERANCE else ''}."


def decisions_caption(run: HubRun) -> str:
    """Return the caption of the table of decisions."""
    text = "Workers that joined or left, refused updates and other decisions of the hub; the newest is last."
    hidden = run.decisions.hidden
    return text + (f" {hidden:,} more are not shown." if hidden else "")


def format_refusals(refused: Mapping[str, int], limit: int = 4) -> str:
    """Return reasons of refusals with their counts, the most frequent first.

    Example:
        >>> format_refusals({"stale": 1, "not finite": 3})
        'not finite 3, stale 1'
    """
    ranked = sorted(refused.items(), key=lambda each: (-each[1], each[0]))
    texts = [f"{why} {count}" for why, count in ranked[:limit]]
    rest = sum(count for _, count in ranked[limit:])
    return ", ".join([*texts, f"others {rest}"] if rest else texts)


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
