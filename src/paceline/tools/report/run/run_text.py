"""The numbers of a run in words: what it reached, where its time went, what limits it.

What a run's numbers do not mean, in words for its reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from paceline._core.format import format_seconds
from paceline.tools.report.run.bottleneck import Bottleneck, mean_share, percent
from paceline.tools.report.run.run_summary import RankTime, RunSummary

__all__ = ["run_headline", "timing_caveats"]


def run_headline(summary: RunSummary, limit: Bottleneck | None = None) -> tuple[str, ...]:
    """Return a few sentences: what the run reached, where its time went and what limits it.

    Example:
        >>> headline(summarize(run), limit)  # doctest: +SKIP
        ('600 steps of 152 ms; the loss went from 5.55 to 2.10, on held-out text to 2.21.',
         'Of each step 82 % is computing and 11 % is waiting for communication.',
         'Computing limits this run: …')
    """
    sentences = [_what_was_reached(summary)]
    if summary.ranks:
        sentences.append(_where_time_went(summary.ranks))
    if limit is not None:
        sentences += limit.sentences
    return tuple(sentences)


def _what_was_reached(summary: RunSummary) -> str:
    if not summary.steps:
        return "No step was finished."
    each = f" of {format_seconds(summary.step_seconds)}" if summary.step_seconds else ""
    text = f"{summary.steps} step{'s' if summary.steps > 1 else ''}{each}"
    if summary.loss_first is None or summary.loss_last is None:
        return f"{text}."
    text += "; "
    if not math.isfinite(summary.loss_last):
        return text + "the loss is no longer a number: the run diverged (first try a lower learning rate)."
    went = "stayed at" if summary.steps == 1 else f"went from {summary.loss_first:.2f} to"
    text += f"the loss {went} {summary.loss_last:.2f}"
    return text + (
        f", on held-out text to {summary.val_loss_last:.2f}." if summary.val_loss_last is not None else "."
    )


def _where_time_went(ranks: Sequence[RankTime]) -> str:
    computing = fmean(rank.computing for rank in ranks)
    parts = [f"{percent(computing)} is computing"]
    names = {"exposed": "waiting for communication", "data": "getting data", "other": "anything else"}
    parts += [
        f"{percent(share)} is {words}"
        for phase, words in names.items()
        if (share := mean_share(ranks, phase)) >= 0.005
    ]
    text = ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"Of each step {text}."


def timing_caveats(facts: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each thing that the times of this run can't tell.

    Args:
        facts: the content of ``run.json``.
    """
    world = facts.get("world")
    if str(facts.get("synchronised", "")).startswith("full-shard"):
        yield (
            "With full-shard PyTorch waits inside of forward and backward: more communication is exposed than shown."
        )
    if isinstance(world, Mapping) and (
        str(world.get("device", "")).startswith("cuda") or "nccl" in str(world.get("backend", ""))
    ):
        yield "Times are those of the host: a GPU's work ends later than the phase that handed it over."
