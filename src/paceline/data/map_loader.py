"""Serving a map-style dataset: every rank computes which samples are its own, and fetches those."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.data import Sampler

from paceline._core.step_state import wait_counters
from paceline.data.counted_batch import with_samples
from paceline.data.epoch_plan import SampleOrder
from paceline.data.loader_position import DispatchSettings, LoaderPosition
from paceline.data.sampling.rank_shares import (
    WORTH_IT,
    ThroughputEstimate,
    blended,
    largest_change,
    shares_of,
)
from paceline.data.torch_dataloader import BatchFetcher, LoaderOptions
from paceline.errors import DataError, UsageError
from paceline.world.object_collectives import gather_rows

__all__ = ["Learning", "MapLoader"]

log = logging.getLogger("paceline.data")

CHUNK = 16384
"""Samples whose numbers are computed at once."""

FILLER = 2
"""Samples of a batch that only fills a place: one alone is too few for BatchNorm."""

_UNSEEN = (
    "shares stay as they are: how long ranks wait for one another is known with paceline.DataParallel "
    "on CPUs only, and not with full-shard"
)


class Numbers(Sampler[list[int]]):
    """The numbers of the samples of each batch of one rank, from a position to the end of its epoch."""

    def __init__(self, rank: int, position: LoaderPosition) -> None:
        self.rank, self.position = rank, position
        self.sizes: deque[int] = deque()
        """How many samples the batches have that were asked for and not handed out."""

    def __iter__(self) -> Iterator[list[int]]:
        epoch, step = self.position.epoch, self.position.step
        portions, rank = epoch.portions, self.rank
        filler = list(range(min(FILLER, epoch.row.samples)))
        at_once = max(1, CHUNK // portions.batch_size)
        self.sizes.clear()
        while step < portions.steps:
            end = min(step + at_once, portions.steps)
            first, *ends = portions.edges(rank, step, end)
            numbers, low = epoch.samples(rank, first, ends[-1]).tolist(), 0
            for each in ends:
                high = each - first
                self.sizes.append(high - low)
                yield numbers[low:high] or filler
                low = high
            step = end


@dataclass
class Learning:
    """Shares that are learnt from the ranks' speeds.

    Attributes:
        every: steps between two looks at them; None: between epochs.
        speeds: samples per second of each rank; None: not known.
    """

    every: int | None = None
    speeds: list[float] | None = None


class MapLoader:
    """The course of one rank through a map-style dataset.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        row: its samples in the order of the first epoch.
        recipe: how they are dealt and cut.
        place: (rank, ranks) of this process.
        group: the ranks.
        fetch: how samples become batches.
        learning: how shares are learnt; None: they are not.
    """

    def __init__(
        self,
        dataset: Any,
        row: SampleOrder,
        recipe: DispatchSettings,
        place: tuple[int, int],
        group: ProcessGroup | None,
        fetch: LoaderOptions,
        learning: Learning | None,
    ) -> None:
        self.dataset, self.group, self.learning = dataset, group, learning
        self.rank, self.ranks = place
        self.recipe = recipe
        self.position = LoaderPosition.start(row, recipe)
        self._pace, self._waits = ThroughputEstimate(), wait_counters.waits
        self._begun = False  # an iteration from this position has begun
        self._asked = False  # for this epoch, though nothing may be left of it
        self._said = False  # that speeds can't be seen
        self._earlier = 0  # steps of this epoch before it was dealt again
        self._numbers = Numbers(self.rank, self.position)
        self._fetcher = BatchFetcher(dataset, fetch, self.rank, row.seed, batch_sampler=self._numbers)

    # ------------------------------------------------------------------ where it stands

    @property
    def position(self) -> LoaderPosition:
        """The place in the epoch."""
        if self._position.step != self._step:
            self._position = LoaderPosition(self._position.epoch, self._step)
        return self._position

    @position.setter
    def position(self, position: LoaderPosition) -> None:
        self._position, self._step = position, position.step

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.position.epoch.row.epoch

    @property
    def steps(self) -> int:
        """Steps of the epoch, as it is dealt now."""
        return self._earlier + self.position.epoch.portions.steps

    def tell(self) -> str:
        """Return what becomes of the data in this epoch."""
        epoch = self.position.epoch
        shares = "" if len(set(epoch.dealing.shares.parts)) == 1 else f", shares {epoch.dealing.shares}"
        return f"{epoch.dealing.samples} samples to {self.ranks} ranks{shares}: {epoch.portions.tell()}"

    @property
    def harmless(self) -> bool:
        """Whether every sample is used once, and no rank runs dry."""
        portions = self.position.epoch.portions
        return not (portions.dropped or portions.repeated or portions.empty)

    def facts(self) -> list[str]:
        """Return what must be the same on all ranks before an epoch begins."""
        recipe, state = self.recipe, self.position.state()
        return [
            f"{len(self.dataset)} samples",
            f"seed={state['seed']}, shuffle={state['shuffle']!r}",
            f"batch_size={recipe.batch_size}, uneven={recipe.uneven!r}",
            f"dispatch={recipe.scheme!r}, block={recipe.block}, shares {recipe.shares}",
            f"learning {self.learning}",
            f"epoch {state['epoch']}, step {state['step']}",
            f"position {json.dumps(state)}",
        ]

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`, unless a loaded state stands in it."""
        if self._begun or epoch != self.epoch:
            self._start(epoch)
        self._asked = True

    def state(self) -> dict[str, Any]:
        """Return the position, as plain JSON."""
        state = self.position.state()
        if self.learning is not None:
            state["speeds"] = self.learning.speeds
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state` tells, dealt to the present ranks.

        Raises:
            UsageError: it is of another dataset, order or seed, or damaged.
        """
        if isinstance(state, Mapping) and state.get("kind") == "stream":
            raise UsageError(
                "the state is of a loader of an iterable dataset; this one's is map-style",
                remedy="resume with the dataset that the state was taken with",
            )
        found = LoaderPosition.of(state)
        _check_same_row(found.epoch.row, self.position.epoch.row)
        if self.learning is not None and found.recipe.shares.ranks == self.ranks:
            self.learning.speeds = _speeds_in(state, self.ranks)
            self.recipe = replace(self.recipe, shares=found.recipe.shares)
        self.position, self._earlier = self._dealt_again(found), 0
        self._begun = self._asked = False

    def _dealt_again(self, found: LoaderPosition) -> LoaderPosition:
        """Return `found`, dealt to the present ranks; its end, where that leaves no step to be made."""
        if not found.left:
            return found
        try:
            return found.dealt_again(self.recipe)
        except UsageError:
            if self.recipe.uneven not in ("truncate", "drop"):
                raise
            log.warning(
                "what is left of epoch %d makes no step on %d ranks", found.epoch.row.epoch, self.ranks
            )
            return LoaderPosition(found.epoch, found.epoch.portions.steps)

    def begin(self) -> None:
        """Go on from the place that was loaded or asked for, else to the next epoch."""
        if self._begun or not (self.position.left or self._asked):
            self._start(self.epoch + 1)
        self._begun, self._asked = True, False

    def _start(self, epoch: int) -> None:
        row = replace(self.position.epoch.row, epoch=epoch)
        self.position, self._earlier = LoaderPosition.start(row, self.recipe), 0
        self._begun = False

    # ------------------------------------------------------------------ batches

    def batches(self) -> Iterator[Any]:
        """Yield what is left of the epoch."""
        there, before = len(self.dataset), self.position.epoch.row.samples
        if there != before:
            raise UsageError(
                f"the dataset had {before} samples, and now has {there}",
                rank=self.rank,
                remedy="make a new Loader for a dataset of another length",
            )
        self._learn()
        while self.position.left:
            yield from self._until_dealt_again()

    def _until_dealt_again(self) -> Iterator[Any]:
        epoch, first = self.position.epoch, self.position.step
        self._numbers.position = self.position
        learning, sizes, started, waited = self.learning, self._numbers.sizes, 0.0, 0.0
        every = learning.every if learning is not None else None
        fetched = self._fetcher.run((epoch.row.epoch, len(epoch.layers)), first, self._contents)
        if learning is not None:
            started, waited = time.perf_counter(), wait_counters.waited_seconds
        for step, batch in enumerate(fetched, first):
            samples = sizes.popleft()
            self._step = step + 1
            yield with_samples(batch, samples)
            if learning is None:
                continue
            if step > first:  # what is slow only once, at the start, says nothing
                self._pace.note(
                    samples, time.perf_counter() - started - (wait_counters.waited_seconds - waited)
                )
            if every is not None and (step + 1) % every == 0 and self._learn():
                return
            started, waited = time.perf_counter(), wait_counters.waited_seconds
        if self._step < epoch.portions.steps:
            raise DataError(
                f"batch {self._step} of epoch {epoch.row.epoch} ended the iteration{self._contents(self._step)}",
                rank=self.rank,
                remedy="let the dataset or collate_fn raise another exception than StopIteration",
            )

    def _contents(self, step: int) -> str:
        epoch = self.position.epoch
        if not epoch.portions.size(self.rank, step):
            return ""
        numbers = epoch.batch(self.rank, step).tolist()
        return f" (samples {', '.join(map(str, numbers[:8]))}{', …' * (len(numbers) > 8)})"

    # ------------------------------------------------------------------ shares that are learnt

    def _learn(self) -> bool:
        """Deal what is left by the speeds that were measured; return whether that changed anything.

        All ranks come here at the same step. One gather tells all of them every speed.
        """
        if self.learning is None or self.ranks == 1 or not self.position.left:
            return False
        waits, self._waits = wait_counters.waits - self._waits, wait_counters.waits
        told = torch.tensor([self._pace.take(), float(waits)], dtype=torch.float64)
        speeds, waits_of_rank = zip(*(row.tolist() for row in gather_rows(told, self.group)), strict=True)
        if not any(speeds):
            return False
        if not all(waits_of_rank):
            if self.rank == 0 and not self._said:
                log.warning(_UNSEEN)
            self._said = True
            return False
        self.learning.speeds = blended(self.learning.speeds, speeds)
        shares = shares_of(self.learning.speeds)
        if largest_change(self.recipe.shares, shares) <= WORTH_IT:
            return False
        self.recipe = replace(self.recipe, shares=shares)
        self._earlier += self.position.step
        self.position = self.position.dealt_again(self.recipe)
        if self.rank == 0:
            measured = ", ".join(f"{speed:.4g}" for speed in self.learning.speeds)
            log.info("ranks reach %s samples/s: dealt again, %s", measured, self.tell())
        return True


def _speeds_in(state: Mapping[str, Any], ranks: int) -> list[float] | None:
    speeds = state.get("speeds")
    if speeds is None:
        return None
    if not (
        isinstance(speeds, list)
        and len(speeds) == ranks
        and all(isinstance(speed, int | float) and 0 <= speed < math.inf for speed in speeds)
    ):
        raise UsageError(
            f"a loader's state with speeds {speeds!r} of {ranks} ranks",
            remedy="pass what Loader.state_dict() gave",
        )
    return speeds


def _check_same_row(found: SampleOrder, own: SampleOrder) -> None:
    """Raise unless both are the same samples in the same order, but for the epoch."""
    for name, told in (
        ("samples", "a dataset of {} samples"),
        ("seed", "seed={}"),
        ("shuffle", "shuffle={!r}"),
    ):
        theirs, mine = getattr(found, name), getattr(own, name)
        if theirs != mine:
            raise UsageError(
                f"the state is of {told.format(theirs)}; this loader has {told.format(mine)}",
                remedy="resume with the dataset, seed and shuffle that the state was taken with",
            )
    if found.shuffle == "blocks" and found.block != own.block:
        raise UsageError(
            f"the state's blocks of {found.block} samples were shuffled; this loader's have {own.block}",
            remedy="resume with the same block size, or shuffle=True",
        )
