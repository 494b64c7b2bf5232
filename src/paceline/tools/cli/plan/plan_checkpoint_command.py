"""``paceline plan checkpoint``: how often to save, from what saves, restarts and failures cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from paceline._core.files import write_json
from paceline._core.format import format_duration, format_seconds, plural
from paceline._core.units import parse_seconds
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.cli.simulate.simulate_options import parse_named, parse_positive
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import checked_files

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.tools.plan.checkpoint_interval import CheckpointPlan, FailureRate, IntervalLosses, SaveCosts
    from paceline.tools.report.run.checkpoint_times import CheckpointTimes

__all__ = ["checkpoint"]

_UNLIKELY = -math.log(0.05)
"""Expected failures of which none happens with a probability of 5 %."""

_Writer = Callable[[Path, "CheckpointPlan", "_Sources"], None]


@dataclass(frozen=True)
class _Sources:
    """Where the numbers of a plan are from.

    Attributes:
        run: the run folder; empty: none.
        of: source of each number by its name in `_NAMES`.
        departures: ranks of the run that others replaced without going back to a checkpoint.
        notes: what is missing or damaged in the run folder.
    """

    run: str
    of: Mapping[str, str]
    departures: int
    notes: tuple[str, ...]


_OPTIONS = {
    "stall": "--checkpoint-time",
    "complete": "--complete-time",
    "restart": "--restart-time",
    "step": "--step-time",
    "present": "--checkpoint-interval",
}
_NAMES = {
    "stall": "training waits for a save",
    "complete": "until it is complete",
    "restart": "restart",
    "step": "step",
    "mtbf": "failures: one in",
    "present": "training between two saves at present",
}


def checkpoint(
    run: Annotated[
        Path | None,
        Argument(
            metavar="RUN", help="Folder of a run: what it measured replaces the options that are left out."
        ),
    ] = None,
    checkpoint_time: Annotated[str | None, shared("checkpoint-time", ": 200ms")] = None,
    complete_time: Annotated[
        str | None,
        own(
            "TIME",
            "Time until a checkpoint is complete, from the begin of the wait; default: no longer than that.",
        ),
    ] = None,
    restart_time: Annotated[str | None, shared("restart-time", ": 30s; default: not counted")] = None,
    step_time: Annotated[
        str | None, own("TIME", "Time of a step, with synchronisation: to count in steps, too.")
    ] = None,
    checkpoint_interval: Annotated[
        str | None, shared("checkpoint-interval", " at present, to compare with")
    ] = None,
    mtbf: Annotated[str | None, shared("mtbf", ": 30d; default: from the failures of RUN")] = None,
    nnodes: Annotated[int | None, shared("nnodes", ", with --mtbf; default: those of RUN, or 1")] = None,
    json_file: JsonOption = None,
    out: Annotated[Path | None, shared("out", ": chart of the time lost at every interval")] = None,
) -> None:
    """Plan how often to save: the interval at which saves, lost work and restarts cost the least time.

    Examples: paceline plan checkpoint runs/mine

    paceline plan checkpoint runs/mine --mtbf 30d --nnodes 16

    paceline plan checkpoint --checkpoint-time 200ms --complete-time 20s --restart-time 30s --mtbf 30d --nnodes 16
    """
    from paceline.tools.console_table import print_wide
    from paceline.tools.plan.checkpoint_interval import plan_checkpoints
    from paceline.tools.plan.checkpoint_interval_text import checkpoint_findings

    in_folder: dict[str, _Writer] = {f"checkpoint-interval{suffix}": _draw for suffix in (".png", ".svg")}
    writer_of = checked_files(json_file, _write_facts, out, in_folder)
    measured, nodes, notes = _measure(run)
    given = {
        "stall": checkpoint_time,
        "complete": complete_time,
        "restart": restart_time,
        "step": step_time,
        "present": checkpoint_interval,
    }
    times, sources = _times(given, measured)
    costs = _costs(run, times, complete_is_given=complete_time is not None)
    rate, sources["mtbf"] = _rate(run, measured, mtbf, nnodes, nodes)
    plan = plan_checkpoints(costs, rate, times["present"])
    known = _Sources("" if run is None else str(run), sources, measured.departures, notes)
    print_wide(_inputs_table(plan, known))
    print_wide(_losses_table(plan))
    typer.echo("\n".join([*checkpoint_findings(plan), *_notes(plan, known)]))
    for path, write in writer_of.items():
        write(path, plan, known)
        typer.echo(path)


# ---------------------------------------------------------------------- numbers


def _measure(run: Path | None) -> tuple[CheckpointTimes, int, tuple[str, ...]]:
    """Return what a run measured, its number of hosts, and what is missing or damaged in its folder."""
    from paceline.tools.report.run.checkpoint_times import CheckpointTimes, measure_checkpoints
    from paceline.tools.report.run.run_records import read_run

    if run is None:
        return CheckpointTimes(), 1, ()
    recorded = read_run(run)
    world = recorded.facts.get("world")
    nodes = world.get("nodes") if isinstance(world, Mapping) else None
    hosts = nodes if isinstance(nodes, int) and nodes > 0 else 1
    return measure_checkpoints(recorded), hosts, recorded.notes


def _times(
    given: Mapping[str, str | None], measured: CheckpointTimes
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Return each time in seconds, as given or else as measured (None: unknown), and its source.

    Raises:
        UsageError: a time that was given is not valid.
    """
    found = {
        "stall": (measured.stall, plural(measured.saves, "save")),
        "complete": (measured.complete, plural(measured.completed, "checkpoint")),
        "restart": (measured.restart, plural(measured.restarted, "restart")),
        "step": (measured.step, "trace"),
        "present": (measured.interval, "trace"),
    }
    times: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    for name, text in given.items():
        option = _OPTIONS[name]
        if text is None:
            times[name], source = found[name]
            sources[name] = "" if times[name] is None else source
        else:
            sources[name] = option
            if name == "restart":  # the only one that may be 0
                times[name] = parse_named(option, text, parse_seconds)
            else:
                times[name] = parse_positive(option, text, parse_seconds, "200ms or 5min")
    return times, sources


def _costs(run: Path | None, times: Mapping[str, float | None], *, complete_is_given: bool) -> SaveCosts:
    """Return the costs.

    Raises:
        UsageError: the wait for a save is unknown, or longer than the time given until a save is complete.
    """
    from paceline.tools.plan.checkpoint_interval import SaveCosts

    stall, complete, restart = times["stall"], times["complete"], times["restart"]
    if stall is None:
        where = "" if run is None else f": no save is in the trace of {run}"
        raise UsageError(
            f"how long training waits for a checkpoint is unknown{where}",
            remedy="pass --checkpoint-time, such as 200ms, or the folder of a run that has saved",
        )
    if complete_is_given and complete is not None and complete < stall:
        raise UsageError(
            f"--complete-time {format_seconds(complete)} is less than the {format_seconds(stall)} that training waits",
            remedy="give the whole time of a save, from when training begins to wait until the checkpoint is complete",
        )
    return SaveCosts(
        stall=stall, complete=max(stall, complete or 0.0), restart=restart or 0.0, step=times["step"]
    )


def _rate(
    run: Path | None, measured: CheckpointTimes, mtbf: str | None, nnodes: int | None, nodes: int
) -> tuple[FailureRate, str]:
    """Return how often the job fails, and the source.

    Raises:
        UsageError: it is unknown.
    """
    from paceline.tools.plan.checkpoint_interval import FailureRate, observed_rate

    if mtbf is not None:
        hosts = nodes if nnodes is None else nnodes
        if hosts < 1:
            raise UsageError(f"--nnodes {nnodes}", remedy="give the number of hosts, 1 or more")
        seconds = parse_positive("--mtbf", mtbf, parse_seconds, "30d") / hosts
        return FailureRate(seconds, seconds, seconds), f"--mtbf {mtbf}, {plural(hosts, 'host')}"
    if nnodes is not None:
        raise UsageError(
            f"--nnodes {nnodes} without --mtbf",
            remedy="pass the mean time between failures of a host too, or omit --nnodes: a run logs those of all",
        )
    remedy = "pass --mtbf, the mean time between failures of a host, such as 30d, and --nnodes"
    if run is None:
        raise UsageError("how often the job fails is unknown", remedy=remedy)
    if not measured.seconds:
        raise UsageError(f"how often the job fails is unknown: {run} has no trace", remedy=remedy)
    if not measured.failures:
        least = format_duration(measured.seconds / _UNLIKELY)
        raise UsageError(
            f"{run} had no failure in {format_duration(measured.seconds)}, which shows only that the mean time between "
            f"failures of the whole job is above {least} (with 95 % confidence)",
            remedy=remedy,
        )
    counted = f"{plural(measured.failures, 'failure')} in {format_duration(measured.seconds)}"
    return observed_rate(measured.failures, measured.seconds), counted


# ---------------------------------------------------------------------- tables and notes


def _inputs_table(plan: CheckpointPlan, sources: _Sources) -> Table:
    from paceline.tools.console_table import make_table

    present = plan.present
    values = {
        "stall": plan.costs.stall,
        "complete": plan.costs.complete if sources.of["complete"] else None,
        "restart": plan.costs.restart if sources.of["restart"] else None,
        "step": plan.costs.step,
        "mtbf": plan.rate.mtbf,
        "present": None if present is None else present.interval,
    }
    rows = [
        (_NAMES[name], "unknown" if value is None else format_duration(value), sources.of[name])
        for name, value in values.items()
        if value is not None or name in ("complete", "restart")
    ]
    title = "Measured and given" if not sources.run else f"Measured in {sources.run}, or given"
    table = make_table(("", "time", "from"), rows, title=title)
    table.columns[-1].justify = "left"
    return table


def _losses_table(plan: CheckpointPlan) -> Table:
    """Return what is lost at intervals around the best one; the recommended and the present one are marked."""
    from paceline.tools.console_table import make_table
    from paceline.tools.plan.checkpoint_interval_text import format_loss

    step, is_certain = plan.costs.step, plan.rate.low == plan.rate.high
    columns = ["", "training between saves", *([] if step is None else ["steps"])]
    columns += ["saves", "lost work", "restarts", "in all", *([] if is_certain else ["95 %"])]
    rows = []
    for row in plan.table:
        cells = ["→" if row == plan.recommended else "now" if row == plan.present else ""]
        cells.append(format_duration(row.interval))
        if step is not None:
            count = row.interval / step
            cells.append(f"{count:,.0f}" if count >= 9.5 else f"{count:.2g}")
        cells += map(format_loss, (row.saves, row.work, row.restarts, row.total))
        if not is_certain:
            cells.append(f"{format_loss(row.low)} – {format_loss(row.high)}")
        rows.append(cells)
    return make_table(columns, rows, title="Lost of all time")


def _notes(plan: CheckpointPlan, sources: _Sources) -> list[str]:
    """Return what is not known or not counted."""
    notes = []
    if not sources.of["complete"]:
        notes.append(
            "How long a save takes until it is complete is unknown, and counts as the time that training waits: with "
            "saves in the background, pass --complete-time."
        )
    if not sources.of["restart"]:
        notes.append("Restarts are not counted: their time is unknown, pass --restart-time.")
    if sources.departures:
        notes.append(
            f"{plural(sources.departures, 'rank')} ended while the others trained on from the same state: no failure "
            "that checkpoints are for."
        )
    return [*notes, *sources.notes]


# ---------------------------------------------------------------------- files


def _write_facts(path: Path, plan: CheckpointPlan, sources: _Sources) -> None:
    from paceline.tools.plan.checkpoint_interval_text import checkpoint_findings
    from paceline.tools.result_files import paceline_command, result_head

    record = result_head("plan-checkpoint", ("paceline",), command=paceline_command()) | {
        "run": sources.run or None,
        "sources": dict(sources.of),
        "costs": asdict(plan.costs),
        "rate": asdict(plan.rate),
        "every": plan.every,
        "every_seconds": plan.seconds,
        "every_steps": plan.steps,
        "best_seconds": plan.best,
        "is_bound": plan.is_bound,
        "flat": list(plan.flat),
        "best_range": list(plan.best_range),
        "regret": plan.regret,
        "recommended": _row(plan.recommended),
        "present": None if plan.present is None else _row(plan.present),
        "rows": [_row(row) for row in plan.table],
        "sentences": [*checkpoint_findings(plan), *_notes(plan, sources)],
    }
    write_json(path, record)


def _row(losses: IntervalLosses) -> dict[str, Any]:
    return asdict(losses) | {"total": losses.total}


def _draw(path: Path, plan: CheckpointPlan, sources: _Sources) -> None:
    from paceline.tools.report.charts.plan_charts import checkpoint_chart

    title = f"A save that training waits {format_seconds(plan.costs.stall)} for, a failure every "
    checkpoint_chart(plan, title=title + format_duration(plan.rate.mtbf)).save(path)
