"""HTML report of a run: summary, step time by phase, bottleneck, curves, tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, quantiles

from paceline._core.format import format_bytes, format_count, format_percent, format_seconds, plural
from paceline.tools.report.page.html_page import ReportPage, Tile, write_page
from paceline.tools.report.run.bottleneck import Bottleneck, find_bottleneck, mean_share
from paceline.tools.report.run.bucket_timeline import make_bucket_view
from paceline.tools.report.run.predicted_vs_measured import compare_with_prediction
from paceline.tools.report.run.rank_selection import select_ranks
from paceline.tools.report.run.run_figures import run_figures
from paceline.tools.report.run.run_records import RecordedRun, read_run
from paceline.tools.report.run.run_summary import RankTime, RunSummary, summarise_run
from paceline.tools.report.run.run_tables import (
    fact_groups,
    memory_table,
    recovery_table,
    restart_table,
    waiting_table,
)
from paceline.tools.report.run.run_traffic import summarise_sent_bytes

__all__ = ["render_run_page", "run_headline", "timing_caveats", "write_run_report"]


def write_run_report(run_dir: Path, profile: Path | None = None) -> Path:
    """Write ``report.html`` atomically into the run folder and return its path.

    Args:
        run_dir: the run folder.
        profile: a profile whose prediction is compared with the run's steps.

    Raises:
        UsageError: `run_dir` is no run folder or not writable, the ``report`` extra is not installed, or the profile
            has no such step.
    """
    return write_page(run_dir / "report.html", render_run_page(read_run(run_dir), profile))


def render_run_page(run: RecordedRun, profile: Path | None = None) -> str:
    """Return the report of `run` as HTML; see `write_run_report`.

    Raises:
        UsageError: the ``report`` extra is not installed, or the profile has no such step.
    """
    summary = summarise_run(run)
    bottleneck = find_bottleneck(summary, run.facts) if summary.ranks else None
    selection = select_ranks(summary)
    predicted = [] if profile is None else [compare_with_prediction(profile, run.facts, summary)]
    remedies = bottleneck.remedies if bottleneck else ()
    return ReportPage(
        title=f"Run {run.folder.resolve().name}",
        subtitle=_subtitle(run, summary),
        command=str(run.facts.get("command", "")),
        notes=[*run.notes, *timing_caveats(run.facts)],
        sentences=run_headline(summary, bottleneck),
        actions=[(each.action, each.how, each.expected) for each in remedies],
        tiles=_tiles(summary),
        figures=run_figures(run, summary, selection),
        buckets=make_bucket_view(summary.timelines, selection),
        sent=summarise_sent_bytes(run.facts),
        tables=[
            *waiting_table(summary, selection),
            *predicted,
            *restart_table(run.restarts),
            *recovery_table(run),
            *memory_table(summary, selection),
        ],
        sample=run.sample.strip("\n"),
        groups=fact_groups(run.facts),
    ).html()


# ---------------------------------------------------------------------- summary


def run_headline(summary: RunSummary, bottleneck: Bottleneck | None = None) -> tuple[str, ...]:
    """Return a few sentences about progress, step time by phase, and the bottleneck.

    Example:
        >>> run_headline(summarise_run(run), bottleneck)  # doctest: +SKIP
        ('600 steps of 152 ms; the loss went from 5.55 to 2.10, on held-out text to 2.21.',
         'Of each step 82 % is computing and 11 % is waiting for communication.',
         'Computing limits this run: …')
    """
    sentences = [_progress(summary)]
    if summary.ranks:
        sentences.append(_time_by_phase(summary.ranks))
    if bottleneck is not None:
        sentences += bottleneck.sentences
    return tuple(sentences)


def _progress(summary: RunSummary) -> str:
    if not summary.steps:
        return "No step was completed."
    each = f" of {format_seconds(summary.step_seconds)}" if summary.step_seconds else ""
    text = f"{summary.steps} step{'s' if summary.steps > 1 else ''}{each}"
    if summary.loss_first is None or summary.loss_last is None:
        return f"{text}."
    if not math.isfinite(summary.loss_last):
        return f"{text}; the loss is no longer finite: the run diverged (try a lower learning rate first)."
    went = "stayed at" if summary.steps == 1 else f"went from {summary.loss_first:.2f} to"
    held_out = "" if summary.val_loss_last is None else f", on held-out text to {summary.val_loss_last:.2f}"
    return f"{text}; the loss {went} {summary.loss_last:.2f}{held_out}."


def _time_by_phase(ranks: Sequence[RankTime]) -> str:
    parts = [f"{format_percent(fmean(rank.computing for rank in ranks))} is computing"]
    names = {"exposed": "waiting for communication", "data": "waiting for data", "other": "anything else"}
    for phase, name in names.items():
        share = mean_share(ranks, phase)
        if share >= 0.005:
            parts.append(f"{format_percent(share)} is {name}")
    text = ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"Of each step {text}."


def timing_caveats(facts: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence on each limitation of this run's times.

    Args:
        facts: the content of ``run.json``.
    """
    world = facts.get("world")
    if str(facts.get("synchronised", "")).startswith("full-shard"):
        yield (
            "With full-shard, PyTorch waits inside forward and backward: more communication is exposed than shown."
        )
    if isinstance(world, Mapping) and (
        str(world.get("device") or "cpu") != "cpu"
        or any(each.endswith("ccl") for each in str(world.get("backend", "")).split(","))  # nccl, xccl
    ):
        yield "Times are host times: work on a GPU ends later than the phase that enqueued it."


def _subtitle(run: RecordedRun, summary: RunSummary) -> str:
    world = run.facts.get("world")
    size = world.get("size") if isinstance(world, Mapping) else None
    ranks = size if isinstance(size, int) else len(run.spans_of_rank)
    parts = [plural(ranks, "rank")] if ranks else []
    parameters = run.facts.get("parameters")
    if isinstance(parameters, int | float):
        parts.append(f"{format_count(parameters)} parameters")
    parts.append(f"{summary.steps} steps")
    if started := run.facts.get("started"):
        parts.append(f"started {str(started).replace('T', ' ')}")
    return " · ".join(parts)


def _tiles(summary: RunSummary) -> list[Tile]:
    tiles = []
    if summary.speed is not None:
        speed, unit = summary.speed
        tiles.append(Tile("speed", f"{format_count(speed)}/s", f"{unit}, all ranks, median"))
    if summary.step_seconds is not None:
        tiles.append(Tile("step", format_seconds(summary.step_seconds), _step_note(summary)))
    if summary.ranks:
        computing = fmean(rank.computing for rank in summary.ranks)
        tiles.append(Tile("utilisation", format_percent(computing), "of the step computing, mean of ranks"))
    if summary.exposed_share is not None:
        note = "for communication, " + ("mean of ranks" if summary.ranks else "rank 0")
        tiles.append(Tile("waiting", format_percent(summary.exposed_share), note))
    if summary.nbytes is not None:
        note = "passed to collectives"
        if summary.calls is not None:
            note = f"in {plural(round(summary.calls), 'collective')}"
        tiles.append(Tile("traffic per step", format_bytes(summary.nbytes), note))
    if summary.val_loss_last is not None:
        first, last = summary.val_loss_first, summary.val_loss_last
        tiles.append(Tile("held-out loss", f"{last:.3f}", f"from {first:.3f}"))
    elif summary.loss_last is not None:
        tiles.append(Tile("training loss", f"{summary.loss_last:.3f}", f"from {summary.loss_first:.3f}"))
    return tiles


def _step_note(summary: RunSummary) -> str:
    """Return "median" and, if there are enough steps, the 90th and 99th percentile of step time."""
    seconds = [each for _, each in summary.durations]
    if len(seconds) < 20:
        return "median"
    cuts = quantiles(seconds, n=100, method="inclusive")
    note = f"median; p90 {format_seconds(cuts[89])}"
    return note + (f", p99 {format_seconds(cuts[98])}" if len(seconds) >= 100 else "")
