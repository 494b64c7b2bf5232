"""One HTML page about a run: what ran, where the time went, what limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline._core.format import format_bytes, format_count, format_seconds
from paceline.tools.report.charts.chart_style import ChartLine
from paceline.tools.report.charts.training_charts import StackedBar, breakdown_chart, step_curve_chart
from paceline.tools.report.html_page import (
    PageFigure,
    PageTable,
    ReportPage,
    Tile,
    responsive_figure,
    write_page,
)
from paceline.tools.report.run.bottleneck import find_bottleneck
from paceline.tools.report.run.bucket_timeline import make_bucket_view
from paceline.tools.report.run.bytes_sent import summarise_sent_bytes
from paceline.tools.report.run.predicted_vs_measured import compare_with_prediction
from paceline.tools.report.run.run_records import RecordedRun, RestartRecord, read_run
from paceline.tools.report.run.run_summary import RankTime, RunSummary, summarise_run
from paceline.tools.report.run.run_text import run_headline, timing_caveats
from paceline.tools.report.run.step_breakdown import PHASES
from paceline.tools.report.run.straggler_text import arrivals_table

__all__ = ["render_run_page", "write_run_report"]

_RANKS_SHOWN = 16
_NUMBERS_SHOWN = 8
_OWN_SECTION = ("sent",)


def write_run_report(run_dir: Path, profile: Path | None = None) -> Path:
    """Write ``report.html`` into the run folder and return its path; the file is whole or not there at all.

    Args:
        run_dir: the run folder. profile: what the steps are predicted from, to be shown beside.

    Raises:
        UsageError: `run_dir` is no run folder or can't be written, the ``report`` extra is not installed, or the
            profile does not know the run's steps.
    """
    return write_page(run_dir, render_run_page(read_run(run_dir), profile))


def render_run_page(run: RecordedRun, profile: Path | None = None) -> str:
    """Return the page about `run` as HTML; see `write_run_report`.

    Raises:
        UsageError: the ``report`` extra is not installed, or the profile does not know the run's steps.
    """
    summary = summarise_run(run)
    limit = find_bottleneck(summary, run.facts) if summary.ranks else None
    straggler = summary.arrivals.straggler
    planned = [] if profile is None else [compare_with_prediction(profile, run.facts, summary)]
    return ReportPage(
        title=f"Run {run.folder.resolve().name}",
        subtitle=_subtitle(run, summary),
        command=str(run.facts.get("command", "")),
        notes=[*run.notes, *timing_caveats(run.facts)],
        sentences=run_headline(summary, limit),
        actions=[(each.what, each.how, each.expected) for each in (limit.remedies if limit else ())],
        tiles=_tiles(summary),
        figures=_figures(run, summary),
        buckets=make_bucket_view(summary.timelines, straggler.rank if straggler else None),
        sent=summarise_sent_bytes(run.facts),
        listings=[*arrivals_table(summary), *planned, *_restarts(run.restarts), *_memory(summary)],
        sample=run.sample.strip("\n"),
        groups=_groups(run.facts),
    ).html()


def _subtitle(run: RecordedRun, summary: RunSummary) -> str:
    world = run.facts.get("world")
    size = world.get("size") if isinstance(world, Mapping) else None
    ranks = size if isinstance(size, int) else len(run.spans_of_rank)
    parts = [f"{ranks} rank{'' if ranks == 1 else 's'}"] if ranks else []
    parameters = run.facts.get("parameters")
    if isinstance(parameters, int | float):
        parts.append(f"{format_count(parameters)} parameters")
    parts.append(f"{summary.steps} steps")
    if started := run.facts.get("started"):
        parts.append(f"started {str(started).replace('T', ' ')}")
    return " · ".join(parts)


def _tiles(summary: RunSummary) -> list[Tile]:
    """Return the numbers that stand on top, those that the run recorded."""
    tiles = []
    if summary.speed is not None:
        speed, what = summary.speed
        tiles.append(Tile("speed", f"{format_count(speed)}/s", f"{what}, all ranks, median"))
    if summary.step_seconds is not None:
        tiles.append(Tile("step", format_seconds(summary.step_seconds), "median"))
    if summary.exposed_share is not None:
        note = "for communication, " + ("mean of ranks" if summary.ranks else "rank 0")
        tiles.append(Tile("waiting", _percent(summary.exposed_share), note))
    if summary.nbytes is not None:
        calls = (
            f"in {summary.calls:.0f} collective{'s' * (round(summary.calls) != 1)}"
            if summary.calls is not None
            else "handed to collectives"
        )
        tiles.append(Tile("traffic a step", format_bytes(summary.nbytes), calls))
    if summary.val_loss_last is not None:
        tiles.append(
            Tile("held-out loss", f"{summary.val_loss_last:.3f}", f"from {summary.val_loss_first:.3f}")
        )
    elif summary.loss_last is not None:
        tiles.append(Tile("training loss", f"{summary.loss_last:.3f}", f"from {summary.loss_first:.3f}"))
    return tiles


def _figures(run: RecordedRun, summary: RunSummary) -> list[PageFigure]:
    figures = []
    if summary.ranks:
        figures.append(_where_time_goes(summary.ranks))
    if len(run.steps) > 1:
        figures += _loss(run)
        what = summary.speed[1] if summary.speed else ""
        later = run.steps[1:]  # the first step pays for what happens once
        speed = _points((step.step, getattr(step, f"{what}_per_second", None)) for step in later)
        caption = f"{what.capitalize()} per second of all ranks together."
        figures += _over_steps("Speed", caption, f"{what}/s", speed)
        exposed = _points(
            (step.step, None if step.exposed_share is None else 100 * step.exposed_share) for step in later
        )
        caption = "Share of each step in which rank 0 stood still for communication."
        figures += _over_steps("Exposed communication", caption, "% of the step", exposed)
        figures += _others(run)
    return figures


def _restarts(restarts: Sequence[RestartRecord]) -> list[PageTable]:
    """Return the table of failures; none where there were none."""
    head = ["restart", "when", "what failed first", "ranks"]
    return [PageTable("Restarts", [head, *map(_restart_row, restarts)])] if restarts else []


def _memory(summary: RunSummary) -> list[PageTable]:
    """Return the table of the most memory that each rank has used; none where no rank told."""
    caption = {rank: each.memory for rank, each in summary.timelines.items() if each.memory}
    if not caption:
        return []
    kinds = sorted({kind for memory in caption.values() for kind in memory}, reverse=True)
    rows = [
        [f"rank {rank}", *(format_bytes(memory[kind]) if kind in memory else "–" for kind in kinds)]
        for rank, memory in list(caption.items())[:_RANKS_SHOWN]
    ]
    names = {"resident": "of the process, resident", "allocated": "allocated on its GPU"}
    return [PageTable("Memory", [["at most", *(names.get(kind, kind) for kind in kinds)], *rows])]


def _restart_row(restart: RestartRecord) -> list[str]:
    """Return the cells of a restart: number, when, why, world size."""
    after = str(restart.ranks_after) if restart.ranks_after else "ended"
    when = restart.time[:19].replace("T", " ")
    return [str(restart.number), when, restart.reason, f"{restart.ranks_before} → {after}"]


def _where_time_goes(ranks: Sequence[RankTime]) -> PageFigure:
    shown = ranks[:_RANKS_SHOWN]
    bars = [
        StackedBar(f"rank {rank.rank}", {phase: 1e3 * rank.seconds[phase] for phase in PHASES})
        for rank in shown
    ]
    table = [["rank", *PHASES, "a step"]]
    for rank in shown:
        shares = (_percent(rank.share(phase)) for phase in PHASES)
        table.append([str(rank.rank), *shares, format_seconds(rank.total)])
    caption = "Mean time of a step on each rank. Exposed: the rank stands still for communication."
    if len(ranks) > len(shown):
        caption += f" The first {len(shown)} of {len(ranks)} ranks."
    return responsive_figure(
        "Where the time goes", caption, "time", lambda wide: breakdown_chart({"": bars}, wide=wide), table
    )


def _points(pairs: Iterable[tuple[int, float | None]]) -> list[tuple[float, float]]:
    return [(at, value) for at, value in pairs if value is not None]


def _loss(run: RecordedRun) -> list[PageFigure]:
    """Return the curve of the loss; none where none was logged."""
    training = _points((step.step, step.loss) for step in run.steps)
    held_out = _points((step.step, step.val_loss) for step in run.steps)
    if not training:
        return []
    lines = [ChartLine("training", training)] + ([ChartLine("held out", held_out)] if held_out else [])
    caption, unit = "Loss of the training batches, as it was logged.", "loss"
    if "model" in run.facts:  # the reference model's
        caption = "Cross-entropy of the training batches" + (" and of held-out text." if held_out else ".")
        unit = "loss (nats per token)"
    return [
        responsive_figure(
            "Loss",
            caption,
            "loss",
            lambda wide: step_curve_chart(lines, x="optimizer step", y=unit, wide=wide),
        )
    ]


def _others(run: RecordedRun) -> list[PageFigure]:
    """Return a curve for each other number that was logged; of a great many the first ones."""
    names = list(dict.fromkeys(name for step in run.steps for name in step.numbers))[:_NUMBERS_SHOWN]
    return [
        figure
        for at, name in enumerate(names)
        for figure in _over_steps(
            _plain(name),
            "As it was logged: mean over all ranks, weighted by samples.",
            _plain(name),
            _points((step.step, step.numbers.get(name)) for step in run.steps),
            key=f"number{at}",
            from_zero=False,
        )
    ]


def _over_steps(
    title: str,
    caption: str,
    unit: str,
    points: Sequence[tuple[float, float]],
    *,
    key: str = "",
    from_zero: bool = True,
) -> list[PageFigure]:
    """Return a curve over the steps; none of fewer than two points. `key` keeps its ids apart, else its title does."""
    if len(points) < 2:
        return []
    return [
        responsive_figure(
            title,
            caption,
            key or title.split()[0].lower(),
            lambda wide: step_curve_chart(
                [ChartLine("", points)], x="optimizer step", y=unit, wide=wide, from_zero=from_zero
            ),
        )
    ]


def _groups(facts: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return the facts of ``run.json`` as titled groups of names and values; what stands on top is left out."""
    on_top = ("command", "started")
    single = {
        key: value for key, value in facts.items() if not isinstance(value, Mapping) and key not in on_top
    }
    groups: dict[str, Mapping[Any, object]] = {"run": single}
    groups |= {
        key: value for key, value in facts.items() if isinstance(value, Mapping) and key not in _OWN_SECTION
    }
    return {
        _plain(title): {_plain(key): _shown(value) for key, value in group.items()}
        for title, group in groups.items()
        if group
    }


def _plain(name: object) -> str:
    return str(name).replace("_", " ")


def _shown(value: object) -> str:
    """Return a value of ``run.json`` for people."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}" if value >= 10_000 else str(value)
        case float():
            return f"{value:g}"
        case list():
            return ", ".join(_shown(item) for item in value)
        case Mapping():
            return ", ".join(f"{_plain(key)} {_shown(item)}" for key, item in value.items())
    return str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"
