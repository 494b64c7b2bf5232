"""What became of scenes, as rows of words (pure); they are as `SceneOutcome.to_json` gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline._core.format import format_seconds

__all__ = ["COLUMNS", "FOOTER", "cells", "is_exact", "sentence", "title"]

Scene = Mapping[str, Any]

COLUMNS = (
    "training",
    "a rank without batches",
    "the others",
    "that rank",
    "after",
    "error, a rank dry",
    "error, unequal",
    "samples lost",
)
"""The first four hold words."""

FOOTER = (
    "After: from the start of the step that failed until the others knew.\n"
    "Error: of the gradient that a step applied, against one process over all ranks' batches of that step,\n"
    "‖g − true‖ / ‖true‖, the largest of the steps in which a rank has no batch, or batches are unequal.\n"
    "Samples lost: of the epoch, used by no step."
)

_EXACT = 1e-12


def cells(scene: Scene) -> list[str]:
    """Return the row of a scene; see `COLUMNS`."""
    lost = scene["samples_lost"]
    return [
        scene["under"],
        scene["does"],
        _others(scene),
        _words([one for one in scene["ranks"] if one["rank"] in scene["dry_ranks"]], scene["finished"]),
        _after(scene),
        _error(scene["gradient_error_with_a_dry_rank"]),
        _error(scene["gradient_error_with_unequal_batches"]),
        f"{lost} ({lost / scene['samples']:.1%})" if lost else "0",
    ]


def is_exact(scene: Scene) -> bool:
    """Tell whether all ranks finished, and used every sample with the right weight."""
    error = scene["gradient_error"]
    return scene["finished"] and not scene["samples_lost"] and error is not None and error <= _EXACT


def sentence(scene: Scene) -> str:
    """Return one line about a scene, for those who wait for the rest."""
    after = _after(scene)
    what = f"{scene['under']}, {scene['does']} → the others: {_others(scene)}"
    return what + f" ({after})" * bool(after)


def title(settings: Mapping[str, Any]) -> str:
    """Return what the scenes have in common; see `Setup.told`."""
    batches = ", ".join(map(str, settings["batches_of_rank"]))
    return (
        f"{settings['ranks']} ranks, {settings['samples']} samples in blocks of {settings['block']}, "
        f"batches of {settings['batch_size']}: {batches} batches; "
        f"{settings['backend']}, time-out {settings['timeout_s']:g} s"
    )


def _others(scene: Scene) -> str:
    others = [one for one in scene["ranks"] if one["rank"] not in scene["dry_ranks"]]
    return _words(others, scene["finished"])


def _after(scene: Scene) -> str:
    """Return how long the last of the others took until it knew; nothing where all went well."""
    waited = [one["seconds"] for one in scene["ranks"] if one["rank"] not in scene["dry_ranks"]]
    known = [seconds for seconds in waited if seconds is not None]
    return format_seconds(max(known)) if known else ""


def _words(ranks: Sequence[Mapping[str, Any]], finished: bool) -> str:
    return "; ".join(dict.fromkeys(_told(one, finished) for one in ranks))


def _told(one: Mapping[str, Any], finished: bool) -> str:
    """Return what became of a rank; `finished`: whether all came to their end."""
    kind, error, message = one["kind"], one["error"], one["message"]
    if kind == "finished":
        return "finish" if finished else "notices nothing"
    if kind == "hung":
        return "hang for ever"
    if kind == "signal":
        return f"{error}: {message.partition(': ')[0]}"
    short = message.partition(" waiting ")[0]  # Timed out | waiting 10000ms for recv operation to complete
    return "hang, then " * (kind == "time-out") + f"{error}: {short}"


def _error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.1%}" if error >= 1e-4 else f"{error:.0e}"
