"""What the rank that runs dry does, and who trains (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.errors import unknown

__all__ = ["SCENES", "Scene", "Then", "scenes_named"]

Then = Literal[
    "ends",
    "idles",
    "barrier",
    "reduces one",
    "reduces many",
    "next epoch",
    "join",
    "stops early",
    "takes part",
]


@dataclass(frozen=True)
class Scene:
    """One way to meet unequal numbers of batches.

    Attributes:
        name: what it is called.
        trainer: ``"DDP"``, ``"FSDP2"``, or one of Paceline's strategies.
        then: what a rank does that has no batches left, while others have.
        told: the same in words.
        divide_by_initial: of torch's Join: whether gradients are divided by the number of all ranks, or of
            those that still have batches.
    """

    name: str
    trainer: str
    then: Then
    told: str
    divide_by_initial: bool = True

    @property
    def under(self) -> str:
        """Whose training it is, in words."""
        return f"torch {self.trainer}" if self.trainer in ("DDP", "FSDP2") else f"Paceline, {self.trainer}"


_TAKES_PART = "takes part with 0 samples"

SCENES = (
    Scene("exits", "DDP", "ends", "its process ends"),
    Scene("idles", "DDP", "idles", "does something else"),
    Scene("barrier", "DDP", "barrier", "waits in a barrier"),
    Scene("metric", "DDP", "reduces one", "all-reduces its metric, one number"),
    Scene("larger", "DDP", "reduces many", "all-reduces more than the gradient has"),
    Scene("next-epoch", "DDP", "next epoch", "begins its next epoch"),
    Scene("fsdp2", "FSDP2", "idles", "does something else"),
    Scene("join", "DDP", "join", "waits in Join, ÷ all ranks (default)"),
    Scene("join-active", "DDP", "join", "waits in Join, ÷ ranks with data", divide_by_initial=False),
    Scene("truncated", "DDP", "stops early", "all stop after min(batches)"),
    Scene("bucketed", "bucketed", "takes part", _TAKES_PART),
    Scene("sharded", "sharded", "takes part", _TAKES_PART),
    Scene("full-shard", "full-shard", "takes part", _TAKES_PART),
)


def scenes_named(names: Iterable[str]) -> list[Scene]:
    """Return the scenes with these names, in their usual order; all of them for no names.

    Raises:
        UsageError: no scene has that name.
    """
    wanted, valid = list(names), [scene.name for scene in SCENES]
    for name in wanted:
        if name not in valid:
            raise unknown("scene", name, valid)
    return [scene for scene in SCENES if not wanted or scene.name in wanted]
