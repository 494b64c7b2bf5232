"""The numbers of a run in words: what it reached, where its time went, what limits it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from paceline.report.summary import RankTime, Summary
from paceline.units import format_bytes, format_count, format_seconds

__all__ = ["headline"]

_CONSIDERABLE = 0.10  # a share of the step below which nothing is said to limit


def headline(summary: Summary) -> tuple[str, ...]:
    """Return a few sentences: what the run reached, where its time went and what limits it.

    Example:
        >>> headline(summarize(run))  # doctest: +SKIP
        ('600 steps of 152 ms; the loss went from 5.55 to 2.10, on held-out text to 2.21.',
         'Of each step 82 % is computing and 11 % is waiting for communication.',
         'Computing limits this run: …')
    """
    sentences = [_what_was_reached(summary)]
    if summary.ranks:
        sentences += [_where_time_went(summary.ranks), _what_limits(summary)]
    return tuple(sentences)


def _what_was_reached(summary: Summary) -> str:
    if not summary.steps or summary.loss_first is None or summary.loss_last is None:
        return "No step was finished."
    each = f" of {format_seconds(summary.step_seconds)}" if summary.step_seconds else ""
    text = f"{summary.steps} step{'s' if summary.steps > 1 else ''}{each}; "
    if not math.isfinite(summary.loss_last):
        return text + "the loss is no longer a number: the run diverged (first try a lower learning rate)."
    went = "stayed at" if summary.steps == 1 else f"went from {summary.loss_first:.2f} to"
    text += f"the loss {went} {summary.loss_last:.2f}"
    return text + (
        f", on held-out text to {summary.val_loss_last:.2f}." if summary.val_loss_last is not None else "."
    )


def _mean_share(ranks: Sequence[RankTime], phase: str) -> float:
    return fmean(rank.share(phase) for rank in ranks)


def _where_time_went(ranks: Sequence[RankTime]) -> str:
    computing = fmean(rank.computing for rank in ranks)
    parts = [f"{_percent(computing)} is computing"]
    names = {"exposed": "waiting for communication", "data": "getting data", "other": "anything else"}
    parts += [
        f"{_percent(share)} is {words}"
        for phase, words in names.items()
        if (share := _mean_share(ranks, phase)) >= 0.005
    ]
    text = ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"Of each step {text}."


def _what_limits(summary: Summary) -> str:
    """Return one sentence that names what to change first, by rules over the shares of the phases."""
    ranks = summary.ranks
    slowest, fastest = (
        max(ranks, key=lambda rank: rank.computing),
        min(ranks, key=lambda rank: rank.computing),
    )
    between = fmean(rank.between / (rank.between + rank.total) for rank in ranks)
    if between >= 2 * _CONSIDERABLE:
        return (
            f"Work outside of the training step limits this run: {_percent(between)} of the time goes into "
            "held-out losses and checkpoints."
        )
    exposed, data = _mean_share(ranks, "exposed"), _mean_share(ranks, "data")
    lag = slowest.computing - fastest.computing
    if data >= _CONSIDERABLE and data >= exposed:
        return f"Data limits this run: ranks wait {_percent(data)} of the time for their next batch."
    if lag >= _CONSIDERABLE and exposed >= _CONSIDERABLE / 2:
        return (
            f"Rank {slowest.rank} limits this run: it computes {_percent(slowest.computing)} of the time, "
            f"rank {fastest.rank} only {_percent(fastest.computing)} and waits for it."
        )
    if exposed >= _CONSIDERABLE:
        volume = f" for {format_bytes(summary.nbytes)} a step" if summary.nbytes else ""
        return (
            f"Communication limits this run: ranks stand still {_percent(exposed)} of the time{volume}. "
            "A larger batch per rank or accumulation are the first things to try."
        )
    if (other := _mean_share(ranks, "other")) >= 2 * _CONSIDERABLE:
        return f"Other work inside of the step limits this run: {_percent(other)} of it are in no phase."
    pace = f" at {format_count(summary.tokens_per_second)} tokens/s" if summary.tokens_per_second else ""
    return f"Computing limits this run{pace}: more ranks or faster ones would help, a faster network hardly."


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\u00a0%"
