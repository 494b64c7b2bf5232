"""What was planned beside what came: a run's step as a profile predicts it, and as the timeline tells it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from paceline._core.format import format_seconds
from paceline.cost_model.profile import Profile
from paceline.cost_model.step_costs import pick_step_costs
from paceline.cost_model.step_strategy import STRATEGIES, StepStrategy
from paceline.cost_model.step_time import StepTime, predict_step
from paceline.errors import UsageError
from paceline.tools.report.html_page import PageTable
from paceline.tools.report.run.run_summary import RunSummary

__all__ = ["compare_with_prediction", "predict_run_step"]


def compare_with_prediction(profile: Path, facts: Mapping[str, object], summary: RunSummary) -> PageTable:
    """Return the table of predicted and measured parts of a step.

    Args:
        profile: what ``paceline bench parts`` measured. facts: the content of ``run.json``. summary: the run's numbers.

    Raises:
        UsageError: the run tells too little, or the profile does not know its steps.
    """
    if not summary.ranks:
        raise UsageError("the run has no timeline to hold a plan against", remedy="leave --profile out")
    planned = predict_run_step(Profile.load(profile), facts)
    mean = {phase: fmean(rank.seconds[phase] for rank in summary.ranks) for phase in summary.ranks[0].seconds}
    rows = [
        ("forward", planned.forward, mean["forward"]),
        ("backward", planned.backward, mean["backward"]),
        ("exposed communication", planned.exposed, mean["exposed"]),
        ("optimizer", planned.optimizer, mean["optimizer"]),
        ("data and anything else", 0.0, mean["data"] + mean["other"]),
        ("a step", planned.seconds, sum(mean.values())),
    ]
    table = [["", "planned", "came", "came ÷ planned"]]
    for name, plan, came in rows:
        ratio = f"{came / plan:.2f}" if plan else "–"
        table.append([name, format_seconds(plan) if plan else "–", format_seconds(came), ratio])
    caption = (
        f"{planned.way.label}, predicted by {profile.name}: a step of {format_seconds(planned.low)} to "
        f"{format_seconds(planned.high)}."
    )
    return PageTable("Plan and reality", table, caption)


def predict_run_step(profile: Profile, facts: Mapping[str, object]) -> StepTime:
    """Return the step that a profile predicts for a run of ``paceline train``.

    Raises:
        UsageError: the run tells too little, or the profile does not know its steps.
    """
    settings, world, model = (_group(facts, name) for name in ("settings", "world", "model"))
    strategy, size = _strategy(facts, settings), settings.get("bucket_mib")
    ranks, batch, name = world.get("size"), settings.get("batch_size"), model.get("name")
    if not isinstance(ranks, int) or not isinstance(batch, int) or not isinstance(name, str):
        raise UsageError(
            "the run does not tell its ranks, batch size and model, so no step can be predicted for it",
            remedy="leave --profile out: it goes with runs of paceline train",
        )
    backend = world.get("backend")
    costs = pick_step_costs(
        profile, name, ranks=ranks, batch=batch, backend=backend if isinstance(backend, str) else None
    )
    compression = settings.get("compression") or "none"
    bucket = float(size) if isinstance(size, int | float) and strategy in ("bucketed", "sharded") else None
    return predict_step(costs, StepStrategy(strategy, bucket, str(compression)))


def _strategy(facts: Mapping[str, object], settings: Mapping[str, object]) -> str:
    """Return the name of the strategy that a run used."""
    for caption in (
        settings.get("sync"),
        str(facts.get("synchronised", "")).partition(",")[0].partition(" ")[0],
    ):
        if isinstance(caption, str) and caption in STRATEGIES:
            return caption
    raise UsageError(
        f"how the run synchronised ({facts.get('synchronised', 'not told')}) has no predicted step",
        remedy="leave --profile out",
    )


def _group(facts: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}
