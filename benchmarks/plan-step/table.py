"""Predicted steps beside measured ones: the comparison as JSON, charts, and the tables of README.md.

    python benchmarks/plan-step/table.py

Reads the ``profile-….json`` and ``steps-….json`` beside this file. No figure in the README is typed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench_harness.markdown import fill, table
from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline._core.units import MIB
from paceline.cost_model.collective_fit import PredictionError
from paceline.cost_model.profile import Profile
from paceline.cost_model.step_costs import StepCosts, pick_step_costs
from paceline.cost_model.step_strategy import StepStrategy
from paceline.cost_model.step_time import StepTime, best_simulated_bucket, predict_steps
from paceline.tools.bench.bench_results import (
    MeasuredStep,
    load_measured_steps,
    measured_by_strategy,
    pair_with_measured,
    step_prediction_error,
)
from paceline.tools.bench.step.step_strategies import NO_SYNC
from paceline.tools.cli.plan.plan_step_command import draw_breakdown, draw_buckets
from paceline.tools.result_files import result_head

HERE = Path(__file__).parent
DRAWN = ("steps-4x200Mbit", "steps-2x1Gbit")
BOUNDS = "full-shard"  # predicted is a lower bound: in the tables, not in the accuracy

Pairs = Sequence[tuple[StepTime, MeasuredStep]]


def main(folder: Annotated[Path, typer.Argument(help="Where the results and README.md lie.")] = HERE) -> None:
    """Compare every setting, write predicted.json and charts, and fill the tables."""
    pairs_of, costs_of, quiet_of = {}, {}, {}
    for path in sorted(folder.glob("steps-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        settings = result["settings"]
        profile = Profile.load(path.with_name(path.name.replace("steps-", "profile-")))
        name, ranks = settings["model"]["name"], settings["ranks"]
        costs = pick_step_costs(
            profile, name, ranks=ranks, backend=settings["backend"], network=settings["network"]
        )
        seen = measured_by_strategy(load_measured_steps(path), name, ranks)
        times = predict_steps(costs, seen)
        setting = f"{ranks} ranks, {settings['network']}, {settings['backend']}"
        pairs_of[setting], costs_of[setting] = pair_with_measured(times, seen), costs
        bare = next(row["step_ms"] for row in result["rows"] if row["strategy"] == NO_SYNC) / 1e3
        quiet_of[setting] = bare / costs.bare_seconds
        if path.stem in DRAWN:
            _draw(folder, path.stem, costs, times, seen)
    settings = {setting: _facts(pairs, costs_of[setting].ranks) for setting, pairs in pairs_of.items()}
    counted = [pair for pairs in pairs_of.values() for pair in _counted(pairs)]
    whole = step_prediction_error(counted, 0)
    write_json(
        folder / "predicted.json",
        result_head("plan-step-accuracy")
        | {"accuracy": vars(whole) if whole else None, "settings": settings},
    )
    text = (folder / "README.md").read_text(encoding="utf-8")
    text = fill(text, "accuracy", accuracy_figures(pairs_of, quiet_of, whole))
    text = fill(text, "steps", step_figures(pairs_of))
    text = fill(text, "buckets", bucket_figures(pairs_of, costs_of))
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(folder / "README.md")


def accuracy_figures(
    pairs_of: Mapping[str, Pairs], quiet_of: Mapping[str, float], whole: PredictionError | None
) -> str:
    """Return the table of errors: a row per setting, and all of them.

    Args:
        quiet_of: a step without synchronisation among the steps, over that of the profile: 1 on a quiet machine.
    """
    rows = []
    for setting, pairs in pairs_of.items():
        found = step_prediction_error(_counted(pairs), 0)
        if found is not None:
            rows.append([setting, *_error_cells(found, _counted(pairs)), f"{quiet_of[setting]:.2f}"])
    if whole is not None:
        every = [pair for pairs in pairs_of.values() for pair in _counted(pairs)]
        rows.append(["**all**", *_error_cells(whole, every), ""])
    titles = ["", "points", "median error", "9 in 10", "largest", "within the range", "no synchronisation ÷"]
    return table(titles, rows)


def step_figures(pairs_of: Mapping[str, Pairs]) -> str:
    """Return the table of steps: a row per way, for each setting measured, predicted and how far that was off."""
    labels = list(dict.fromkeys(time.name.label for pairs in pairs_of.values() for time, _ in pairs))
    rows = []
    for label in labels:
        cells = [label]
        for pairs in pairs_of.values():
            found = next(((time, seen) for time, seen in pairs if time.name.label == label), None)
            cells.append("" if found is None else _beside(*found))
        rows.append(cells)
    return table(["", *pairs_of], rows)


def bucket_figures(pairs_of: Mapping[str, Pairs], costs_of: Mapping[str, StepCosts]) -> str:
    """Return the table of bucket sizes: by simulation, by the closed form, and what the best measured one was."""
    rows = []
    for setting, pairs in pairs_of.items():
        costs = costs_of[setting]
        job, simulated = costs.equal_buckets(), best_simulated_bucket(costs)
        formula = None if job is None else job.best()
        tried = [(time, seen) for time, seen in pairs if time.name.name == "bucketed"]
        fastest = min(tried, key=lambda pair: pair[1].seconds)
        chosen = min(tried, key=lambda pair: pair[0].seconds)
        rows.append(
            [
                setting,
                f"{simulated.cap / MIB:.3g}",
                "" if formula is None else f"{formula.nbytes / MIB:.3g}",
                f"{fastest[0].strategy.bucket_mib:g}",
                f"{chosen[0].strategy.bucket_mib:g}",
                f"{100 * (chosen[1].seconds / fastest[1].seconds - 1):.1f} %",
            ]
        )
    titles = [
        "",
        "simulated, MiB",
        "closed form, MiB",
        "fastest measured",
        "fastest predicted",
        "costs more by",
    ]
    return table(titles, rows)


def _counted(pairs: Pairs) -> list[tuple[StepTime, MeasuredStep]]:
    return [(time, seen) for time, seen in pairs if time.name.name != BOUNDS]


def _error_cells(found: PredictionError, pairs: Pairs) -> list[str]:
    inside = sum(time.low <= seen.seconds <= time.high for time, seen in pairs)
    errors = (f"{100 * value:.1f} %" for value in (found.median, found.p90, found.maximum))
    return [str(found.points), *errors, f"{inside} of {found.points}"]


def _beside(time: StepTime, seen: MeasuredStep) -> str:
    off = f"{100 * (time.seconds / seen.seconds - 1):+.0f} %".replace("-", "−")
    return f"{seen.seconds:.3g} · {time.seconds:.3g} · {off}"


def _facts(pairs: Pairs, ranks: int) -> dict[str, Any]:
    found = step_prediction_error(_counted(pairs), ranks)
    rows = [
        {
            "way": time.name.label,
            "predicted": {
                name: value for name, value in vars(time).items() if name not in ("strategy", "beyond")
            },
            "predicted_seconds": time.seconds,
            "measured": {name: value for name, value in vars(seen).items() if name != "strategy"},
            "error": time.seconds / seen.seconds - 1,
        }
        for time, seen in pairs
    ]
    parts = ("forward", "backward", "exposed", "optimizer")
    off = {name: median(getattr(time, name) - getattr(seen, name) for time, seen in pairs) for name in parts}
    return {"accuracy": None if found is None else vars(found), "median_seconds_off": off, "rows": rows}


def _draw(
    folder: Path,
    stem: str,
    costs: StepCosts,
    times: Sequence[StepTime],
    seen: Mapping[StepStrategy, MeasuredStep],
) -> None:
    """Draw the two figures of one setting."""
    place = stem.removeprefix("steps-")
    draw_breakdown(folder / f"step-breakdown-{place}.png", costs, times, seen)
    draw_buckets(folder / f"step-buckets-{place}.png", costs, times, seen)


if __name__ == "__main__":
    run_program(main)
