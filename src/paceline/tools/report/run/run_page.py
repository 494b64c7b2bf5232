"""HTML report of a run: summary, step time by phase, bottleneck, curves, tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline._core.format import format_bytes, format_count, format_percent, format_seconds, plural
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
from paceline.tools.report.run.bottleneck import Bottleneck, find_bottleneck, mean_share
from paceline.tools.report.run.bucket_timeline import make_bucket_view
from paceline.tools.report.run.predicted_vs_measured import compare_with_prediction
from paceline.tools.report.run.run_records import LoggedStep, RecordedRun, RestartRecord, read_run
from paceline.tools.report.run.run_summary import RankTime, RunSummary, summarise_run
from paceline.tools.report.run.run_traffic import summarise_sent_bytes
from paceline.tools.report.run.step_breakdown import PHASES

__all__ = ["render_run_page", "run_headline", "timing_caveats", "write_run_report"]

_RANKS_SHOWN = 16
_NUMBERS_SHOWN = 8
_OWN_SECTION = ("sent",)


def write_run_report(run_dir: Path, profile: Path | None = None) -> Path:
    """Write ``report.html`` atomically into the run folder and return its path.

    Args:
        run_dir: the run folder.
        profile: a profile whose prediction is compared with the run's steps.

    Raises:
        UsageError: `run_dir` is no run folder or not writable, the ``report`` extra is not installed, or the profile
            has no such step.
    """
    return write_page(run_dir, render_run_page(read_run(run_dir), profile))


def render_run_page(run: RecordedRun, profile: Path | None = None) -> str:
    """Return the report of `run` as HTML; see `write_run_report`.

    Raises:
        UsageError: the ``report`` extra is not installed, or the profile has no such step.
    """
    summary = summarise_run(run)
    bottleneck = find_bottleneck(summary, run.facts) if summary.ranks else None
    straggler = summary.arrivals.straggler
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
        figures=_figures(run, summary),
        buckets=make_bucket_view(summary.timelines, straggler.rank if straggler else None),
        sent=summarise_sent_bytes(run.facts),
        tables=[*_arrivals(summary), *predicted, *_restarts(run.restarts), *_memory(summary)],
        sample=run.sample.strip("\n"),
        groups=_groups(run.facts),
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
        str(world.get("device", "")).startswith("cuda") or "nccl" in str(world.get("backend", ""))
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
        tiles.append(Tile("step", format_seconds(summary.step_seconds), "median"))
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


# ---------------------------------------------------------------------- charts


def _figures(run: RecordedRun, summary: RunSummary) -> list[PageFigure]:
    figures = []
    if summary.ranks:
        figures.append(_step_time(summary.ranks))
    if len(run.steps) <= 1:
        return figures
    unit = summary.speed[1] if summary.speed else ""
    later = run.steps[1:]  # the first step includes one-time costs
    speed = _points(later, lambda step: getattr(step, f"{unit}_per_second", None))
    exposed = _points(later, lambda step: None if step.exposed_share is None else 100 * step.exposed_share)
    return [
        *figures,
        *_loss(run),
        *_curve("Speed", f"{unit.capitalize()} per second of all ranks together.", f"{unit}/s", speed),
        *_curve(
            "Exposed communication",
            "Share of each step that rank 0 waited for communication.",
            "% of the step",
            exposed,
        ),
        *_logged_numbers(run),
    ]


def _step_time(ranks: Sequence[RankTime]) -> PageFigure:
    shown = ranks[:_RANKS_SHOWN]
    bars = [
        StackedBar(f"rank {rank.rank}", {phase: 1e3 * rank.seconds[phase] for phase in PHASES})
        for rank in shown
    ]
    table = [["rank", *PHASES, "step"]]
    for rank in shown:
        shares = (format_percent(rank.share(phase)) for phase in PHASES)
        table.append([str(rank.rank), *shares, format_seconds(rank.total)])
    caption = "Mean time of a step on each rank. Exposed: communication not hidden by computing."
    if len(ranks) > len(shown):
        caption += f" The first {len(shown)} of {len(ranks)} ranks."
    return responsive_figure(
        "Step time", caption, "time", lambda wide: breakdown_chart({"": bars}, wide=wide), table
    )


def _points(
    steps: Iterable[LoggedStep], value_of: Callable[[LoggedStep], float | None]
) -> list[tuple[float, float]]:
    values = ((step.step, value_of(step)) for step in steps)
    return [(number, value) for number, value in values if value is not None]


def _loss(run: RecordedRun) -> list[PageFigure]:
    """Return the loss curves; none if no loss was logged."""
    training = _points(run.steps, lambda step: step.loss)
    held_out = _points(run.steps, lambda step: step.val_loss)
    if not training:
        return []
    lines = [ChartLine("training", training)] + ([ChartLine("held out", held_out)] if held_out else [])
    caption, unit = "Loss of the training batches as logged.", "loss"
    if "model" in run.facts:  # the reference model
        caption = "Cross-entropy of the training batches" + (" and of held-out text." if held_out else ".")
        unit = "loss (nats per token)"
    return [_step_figure("Loss", caption, "loss", lines, unit)]


def _logged_numbers(run: RecordedRun) -> list[PageFigure]:
    """Return curves of other logged numbers, of the first few names."""
    names = list(dict.fromkeys(name for step in run.steps for name in step.numbers))[:_NUMBERS_SHOWN]
    caption = "As logged: mean over all ranks, weighted by samples."
    figures = []
    for number, name in enumerate(names):
        points = [(step.step, step.numbers[name]) for step in run.steps if name in step.numbers]
        title = _readable(name)
        figures += _curve(title, caption, title, points, key=f"number{number}", from_zero=False)
    return figures


def _curve(
    title: str,
    caption: str,
    unit: str,
    points: Sequence[tuple[float, float]],
    *,
    key: str = "",
    from_zero: bool = True,
) -> list[PageFigure]:
    """Return a curve over steps; none with fewer than two points. `key` makes element ids unique."""
    if len(points) < 2:
        return []
    key = key or title.split()[0].lower()
    return [_step_figure(title, caption, key, [ChartLine("", points)], unit, from_zero=from_zero)]


def _step_figure(
    title: str, caption: str, key: str, lines: Sequence[ChartLine], unit: str, *, from_zero: bool = False
) -> PageFigure:
    def draw(wide: bool) -> Any:
        return step_curve_chart(lines, x="optimizer step", y=unit, wide=wide, from_zero=from_zero)

    return responsive_figure(title, caption, key, draw)


# ---------------------------------------------------------------------- tables


def _arrivals(summary: RunSummary) -> list[PageTable]:
    """Return the table of waiting by rank; none for fewer than two ranks with recorded steps."""
    arrivals = summary.arrivals
    if not arrivals.ranks:
        return []
    shown = sorted(arrivals.ranks, key=lambda each: -each.lateness)[:_RANKS_SHOWN]
    slowed = {rank.rank: rank.slowed for rank in summary.ranks}
    head = [
        "rank",
        "last in",
        "after the others' median",
        "95th percentile",
        "waits for ranks",
        "waits for the network",
        "backward slowed by",
    ]
    rows = [
        [
            str(each.rank),
            format_percent(each.last_share),
            _signed(each.lateness),
            _signed(each.lateness_p95),
            format_seconds(each.imbalance),
            format_seconds(each.transfer),
            format_seconds(slowed.get(each.rank, 0.0)),
        ]
        for each in shown
    ]
    caption = (
        f"Arrival of each rank at the last exchange of a step, over {arrivals.steps} steps. Exposed communication "
        "consists of waiting for the last rank, waiting for the network after that, and backward slowed by concurrent "
        "calls; mean per step."
    )
    if arrivals.clock_error:
        caption += f" Clocks of hosts are known to {format_seconds(arrivals.clock_error)}."
    if len(arrivals.ranks) > len(shown):
        caption += f" The latest {len(shown)} of {len(arrivals.ranks)} ranks."
    return [PageTable("Waiting by rank", [head, *rows], caption)]


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _restarts(restarts: Sequence[RestartRecord]) -> list[PageTable]:
    if not restarts:
        return []
    rows = [["restart", "time", "first failure", "ranks"]]
    for each in restarts:
        after = str(each.ranks_after) if each.ranks_after else "ended"
        time = each.time[:19].replace("T", " ")
        rows.append([str(each.number), time, each.reason, f"{each.ranks_before} → {after}"])
    return [PageTable("Restarts", rows)]


def _memory(summary: RunSummary) -> list[PageTable]:
    """Return the table of peak memory by rank; none if not recorded."""
    memory_of_rank = {rank: each.memory for rank, each in summary.timelines.items() if each.memory}
    if not memory_of_rank:
        return []
    kinds = sorted({kind for memory in memory_of_rank.values() for kind in memory}, reverse=True)
    names = {"resident": "of the process, resident", "allocated": "allocated on its GPU"}
    rows = [["peak", *(names.get(kind, kind) for kind in kinds)]]
    for rank, memory in list(memory_of_rank.items())[:_RANKS_SHOWN]:
        cells = (format_bytes(memory[kind]) if kind in memory else "–" for kind in kinds)
        rows.append([f"rank {rank}", *cells])
    return [PageTable("Memory", rows)]


def _groups(facts: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return the facts of ``run.json`` by titled group, without those shown elsewhere on the page."""
    hidden = ("command", "started", *_OWN_SECTION)
    groups: dict[str, Mapping[Any, object]] = {"run": {}}
    groups["run"] = {
        key: value for key, value in facts.items() if not isinstance(value, Mapping) and key not in hidden
    }
    groups |= {
        key: value for key, value in facts.items() if isinstance(value, Mapping) and key not in _OWN_SECTION
    }
    return {
        _readable(title): {_readable(key): _readable_value(value) for key, value in group.items()}
        for title, group in groups.items()
        if group
    }


def _readable(name: object) -> str:
    return str(name).replace("_", " ")


def _readable_value(value: object) -> str:
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
            return ", ".join(_readable_value(item) for item in value)
        case Mapping():
            return ", ".join(f"{_readable(key)} {_readable_value(item)}" for key, item in value.items())
    return str(value)
