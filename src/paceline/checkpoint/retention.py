"""Which complete checkpoints stay, and which are removed once a newer one is complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.interop.dcp_reader import is_plain_dcp
from paceline.checkpoint.storage.checkpoint_store import CheckpointStore
from paceline.checkpoint.storage.local_folder import checkpoint_name, step_of
from paceline.errors import PacelineError, UsageError

__all__ = ["Retention", "remove_old"]


@dataclass(frozen=True)
class Retention:
    """Policy for complete checkpoints; one stays if any of three rules keeps it, and the newest always does.

    [Note: every so many steps] Saves by time or at the end of epochs rarely fall on a multiple of `keep_every`, so a
    multiple is represented by the first checkpoint at or after it: with 1000 and saves at 990, 1010, 1030 and 2500,
    those at 1010 and 2500 stay. That is the oldest of the checkpoints between two multiples, so what stays can be
    found from the checkpoints that are there, however many have been removed.

    Attributes:
        keep: number of newest checkpoints that stay, 1 or more. With 2, one is left if a disk damages the newest.
        keep_every: optimizer steps; the first checkpoint at or after each multiple of it stays forever. None: no rule.
        keep_best: number of checkpoints with the lowest metric that stay; of equal ones, the newer is better. A
            checkpoint without a metric, or with one that is not finite, is never one of the best. For a metric that
            should be high, save its negative.

    Raises:
        UsageError: a number is not valid.

    Example:
        >>> Retention(keep=2, keep_every=1000).steps_to_remove([(2500, None), (1030, None), (1010, None), (990, None)])
        [990]
        >>> Retention(keep=1, keep_best=1).steps_to_remove([(400, 2.1), (300, 1.9), (200, 1.8), (100, 2.4)])
        [100, 300]
    """

    keep: int = 2
    keep_every: int | None = None
    keep_best: int = 0

    def __post_init__(self) -> None:
        if type(self.keep) is not int or self.keep < 1:
            raise UsageError(f"keep={self.keep!r}", remedy="keep at least 1 checkpoint, the newest")
        if self.keep_every is not None and (type(self.keep_every) is not int or self.keep_every < 1):
            raise UsageError(
                f"keep_every={self.keep_every!r}",
                remedy="pass a number of optimizer steps, such as 1000, or None to keep none forever",
            )
        if type(self.keep_best) is not int or self.keep_best < 0:
            raise UsageError(
                f"keep_best={self.keep_best!r}",
                remedy="pass how many checkpoints with the lowest metric to keep, or 0",
            )

    def steps_to_remove(self, checkpoints: Sequence[tuple[int, float | None]]) -> list[int]:
        """Return the steps of the checkpoints to remove, oldest first.

        Args:
            checkpoints: (step, metric or None) of every complete checkpoint, newest first; the newest has the highest
                step.

        Raises:
            ValueError: the steps do not decrease.
        """
        steps = [step for step, _ in checkpoints]
        if any(step <= following for step, following in pairwise(steps)):
            raise ValueError(f"checkpoints must be given newest first, each step once: {steps}")
        kept = {*steps[: self.keep], *self._first_at_multiples(steps), *self._best(checkpoints)}
        return [step for step in reversed(steps) if step not in kept]

    def _first_at_multiples(self, steps: Sequence[int]) -> list[int]:
        """Return the oldest step from each multiple of `keep_every` to the next; [Note: every so many steps]."""
        if self.keep_every is None:
            return []
        oldest = {
            step // self.keep_every: step for step in steps
        }  # newest first: the oldest overwrites the others
        return [step for multiple, step in oldest.items() if multiple > 0]

    def _best(self, checkpoints: Sequence[tuple[int, float | None]]) -> list[int]:
        known = [
            (metric, -step) for step, metric in checkpoints if metric is not None and math.isfinite(metric)
        ]
        return [-step for _, step in sorted(known)[: self.keep_best]]


def remove_old(
    store: CheckpointStore, policy: Retention, metrics: dict[str, float | None], *, spared: str = ""
) -> None:
    """Remove the checkpoints that a policy does not keep; those of other programs stay.

    Args:
        store: the checkpoints.
        policy: which stay.
        metrics: of checkpoints by name, as far as known; the others are read and added.
        spared: name of one that stays now, as it is still being read.
    """
    named = [name for name in store.names() if name == checkpoint_name(step_of(name))]
    names = [name for name in named if not is_plain_dcp(store.files(name))]
    for name in names if policy.keep_best else []:
        if name not in metrics:
            _learn(store, name, metrics, names)
    if len(names) >= policy.keep:
        steps = policy.steps_to_remove([(step_of(name), metrics.get(name)) for name in names])
        removed = [name for name in map(checkpoint_name, steps) if name != spared]
        store.remove(removed)
        for name in removed:
            metrics.pop(name, None)


def _learn(store: CheckpointStore, name: str, metrics: dict[str, float | None], names: Sequence[str]) -> None:
    """Add the metrics of `names` that a checkpoint has, after those of newer ones, which know more."""
    try:
        manifest = Manifest.read(store.files(name).read)
    except PacelineError:  # damaged: never one of the best
        metrics[name] = None
        return
    for known, metric in {name: manifest.metric, **manifest.metrics}.items():
        if known in names:
            metrics.setdefault(known, metric)
