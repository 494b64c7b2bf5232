"""Comparison of a run's step with the prediction of a profile."""

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
from paceline.tools.report.page.html_page import PageTable
from paceline.tools.report.run.run_summary import RunSummary

__all__ = ["compare_with_prediction", "predict_run_step"]

_BUCKETED = ("bucketed", "sharded", "sharded-gradients")


def compare_with_prediction(profile: Path, facts: Mapping[str, object], summary: RunSummary) -> PageTable:
    """Return the table of predicted and measured parts of a step.

    Args:
        profile: file of ``paceline bench parts``.
        facts: the content of ``run.json``.
        summary: the run's numbers.

    Raises:
        UsageError: the run lacks facts, or the profile has no such step.
    """
    if not summary.ranks:
        raise UsageError("the run has no timeline to compare a prediction with", remedy="omit --profile")
    predicted = predict_run_step(Profile.load(profile), facts)
    mean = {phase: fmean(rank.seconds[phase] for rank in summary.ranks) for phase in summary.ranks[0].seconds}
    rows = [
        ("forward", predicted.forward, mean["forward"]),
        ("backward", predicted.backward, mean["backward"]),
        ("exposed communication", predicted.exposed, mean["exposed"]),
        ("optimizer", predicted.optimizer, mean["optimizer"]),
        ("data and anything else", 0.0, mean["data"] + mean["other"]),
        ("a step", predicted.seconds, sum(mean.values())),
    ]
    table = [["part", "predicted", "measured", "measured / predicted"]]
    for name, expected, measured in rows:
        ratio = f"{measured / expected:.2f}" if expected else "–"
        table.append([name, format_seconds(expected) if expected else "–", format_seconds(measured), ratio])
    caption = (
        f"{predicted.strategy.label}, predicted by {profile.name}: a step of {format_seconds(predicted.low)} to "
        f"{format_seconds(predicted.high)}."
    )
    return PageTable(title="Predicted and measured", table=table, caption=caption)


def predict_run_step(profile: Profile, facts: Mapping[str, object]) -> StepTime:
    """Return the predicted step of a run of ``paceline train``.

    Raises:
        UsageError: the run lacks facts, or the profile has no such step.
    """
    settings, world, model = (_group(facts, name) for name in ("settings", "world", "model"))
    strategy, size = _strategy(facts, settings), settings.get("bucket_mib")
    ranks, batch, name = world.get("size"), settings.get("micro_batch_size"), model.get("name")
    if not isinstance(ranks, int) or not isinstance(batch, int) or not isinstance(name, str):
        raise UsageError(
            "run.json lacks the number of ranks, the batch size or the model, so its step can't be predicted",
            remedy="omit --profile: it works with runs of paceline train",
        )
    backend = world.get("backend")
    costs = pick_step_costs(
        profile, name, ranks=ranks, batch=batch, backend=backend if isinstance(backend, str) else None
    )
    compression = settings.get("compression") or "none"
    bucket = float(size) if isinstance(size, int | float) and strategy in _BUCKETED else None
    return predict_step(costs, StepStrategy(strategy, bucket, str(compression)))


def _strategy(facts: Mapping[str, object], settings: Mapping[str, object]) -> str:
    synchronised = str(facts.get("synchronised", ""))
    for name in (settings.get("strategy"), synchronised.partition(",")[0].partition(" ")[0]):
        if isinstance(name, str) and name in STRATEGIES:
            return name
    raise UsageError(
        f"steps can't be predicted for the strategy of this run ({synchronised or 'unknown'})",
        remedy="omit --profile",
    )


def _group(facts: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}
