"""Serves a map-style dataset: every rank computes the indices of its own samples, and fetches those."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any

from torch.distributed import ProcessGroup
from torch.utils.data import Sampler

from paceline._core.step_state import wait_counters
from paceline.data.batch_sample_count import with_samples
from paceline.data.dataloader_workers import (
    BatchFetcher,
    KeyedDataset,
    KeyedIndices,
    LoaderOptions,
    PrepareWorker,
)
from paceline.data.leaf_random import LeafPlace, fetch_seed
from paceline.data.map_loader_state import DispatchSettings, LoaderPosition
from paceline.data.measured_shares import MeasuredShares
from paceline.data.rank_place import RankPlace
from paceline.data.resumable_batch_indices import EpochPlan, SampleOrder
from paceline.errors import DataError, UsageError

__all__ = ["MapLoader"]

log = logging.getLogger("paceline.data")

_CHUNK = 16384  # samples whose indices are computed at once
_PLACEHOLDER_SAMPLES = 2  # of a batch without own samples: one alone is too few for BatchNorm


class BatchIndices(Sampler[Any]):
    """Yields the indices of the samples in each batch of a process, from a position to the end of its epoch.

    With virtual ranks a step has a batch for each of the process's own, as `KeyedIndices`.

    Attributes:
        position: from which to start.
        sizes: number of samples in each batch that was fetched and not served yet.
    """

    def __init__(self, place: RankPlace, position: LoaderPosition) -> None:
        self._place, self.position = place, position
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list[int] | KeyedIndices]:
        epoch, step = self.position.epoch, self.position.step
        portions, own = epoch.portions, self._place.own
        placeholder = list(range(min(_PLACEHOLDER_SAMPLES, epoch.order.samples)))
        at_once = max(1, _CHUNK // (portions.batch_size * len(own)))
        self.sizes.clear()
        while step < portions.steps:
            end = min(step + at_once, portions.steps)
            of_ranks = [self._cut(rank, step, end) for rank in own]
            for at in range(step, end):
                for rank, batches in zip(own, of_ranks, strict=True):
                    indices = next(batches)
                    self.sizes.append(len(indices))
                    yield self._keyed(indices or placeholder, at, rank)
            step = end

    def _cut(self, rank: int, step: int, end: int) -> Iterator[list[int]]:
        """Yield the batches of a rank from `step` to before `end`."""
        epoch = self.position.epoch
        first, *ends = epoch.portions.edges(rank, step, end)
        indices, low = epoch.samples(rank, first, ends[-1]).tolist(), 0
        for each in ends:
            high = each - first
            yield indices[low:high]
            low = high

    def _keyed(self, indices: list[int], step: int, rank: int) -> list[int] | KeyedIndices:
        if self._place.virtual_ranks is None:
            return indices
        return KeyedIndices(fetch_seed(*leaf_place(self.position.epoch, step, rank)), indices)


def leaf_place(epoch: EpochPlan, step: int, leaf: int) -> LeafPlace:
    """Return the place of a leaf in a step of `epoch`."""
    return LeafPlace(epoch.order.seed, epoch.order.epoch, step, leaf, len(epoch.layers))


class MapLoader:
    """Serves the batches of one rank, or of its virtual ranks, of a map-style dataset.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        order: of its samples in the first epoch.
        settings: assignment and batches.
        place: the ranks that this process serves.
        group: the ranks.
        options: of torch's DataLoader.
        measured: derives shares from throughput; None: they are fixed.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        settings: DispatchSettings,
        *,
        place: RankPlace,
        group: ProcessGroup | None,
        options: LoaderOptions,
        measured: MeasuredShares | None,
    ) -> None:
        self.dataset, self.group, self.measured = dataset, group, measured
        self.place, self.rank, self.ranks = place, place.rank, place.ranks
        self.settings = settings
        self.position = LoaderPosition.start(order, settings)
        self._started = False  # an iteration from this position
        self._epoch_set = False  # explicitly, though it may have no batches left
        self._earlier_steps = 0  # of this epoch, before its samples were redistributed
        self._indices = BatchIndices(place, self.position)
        if place.virtual_ranks is not None:
            dataset = KeyedDataset(dataset)
            options = replace(options, worker_init_fn=PrepareWorker(options.worker_init_fn, KeyedDataset))
        self._fetcher = BatchFetcher(dataset, options, self.rank, order.seed, batch_sampler=self._indices)

    # ------------------------------------------------------------------ position

    @property
    def position(self) -> LoaderPosition:
        """Position in the epoch."""
        if self._position.step != self._step:
            self._position = LoaderPosition(self._position.epoch, self._step)
        return self._position

    @position.setter
    def position(self, position: LoaderPosition) -> None:
        self._position, self._step = position, position.step

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.position.epoch.order.epoch

    @property
    def steps(self) -> int:
        """Steps of the epoch, as it is assigned now."""
        return self._earlier_steps + self.position.epoch.portions.steps

    @property
    def steps_left(self) -> int:
        """Steps of the epoch that were not served yet."""
        return self.position.epoch.portions.steps - self._step

    @property
    def over(self) -> bool:
        """Whether all steps of the epoch were served."""
        return not self.position.remaining

    def describe(self) -> str:
        """Return one sentence on the use of the data in this epoch."""
        epoch = self.position.epoch
        shares = "" if len(set(epoch.dispatch.shares.parts)) == 1 else f", shares {epoch.dispatch.shares}"
        ranks = f"{self.ranks} ranks" if self.place.virtual_ranks is None else self.place
        return f"{epoch.dispatch.samples} samples to {ranks}{shares}: {epoch.portions.describe()}"

    @property
    def lossless(self) -> bool:
        """True if every sample is used once, and no rank runs out."""
        portions = self.position.epoch.portions
        return not (portions.dropped or portions.repeated or portions.empty)

    def facts(self) -> list[str]:
        """Return what must be the same on all ranks before an epoch starts."""
        settings, state = self.settings, self.position.state()
        measured = self.measured
        return [
            f"virtual_ranks={self.place.virtual_ranks}",
            f"{len(self.dataset)} samples",
            f"seed={state['seed']}, shuffle={state['shuffle']!r}",
            f"batch_size={settings.batch_size}, uneven={settings.uneven!r}",
            f"dispatch={settings.scheme!r}, block={settings.block}, shares {settings.shares}",
            f"measured shares: {measured and f'redeal_every={measured.every}, speeds={measured.speeds}'}",
            f"epoch {state['epoch']}, step {state['step']}",
            f"position {json.dumps(state)}",
        ]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, unless a loaded state is within it."""
        if self._started or epoch != self.epoch:
            self._go_to(epoch)
        self._epoch_set = True

    def state(self) -> dict[str, Any]:
        """Return the position as plain JSON."""
        state = self.position.state()
        if self.measured is not None:
            state["speeds"] = self.measured.speeds
        return state

    def load(self, state: Mapping[str, Any], *, moved: bool = False) -> None:
        """Go to the position of `state`, assigned to the present ranks.

        Args:
            state: the position.
            moved: it is of other ranks, even if as many. Without virtual ranks the rest of the epoch is assigned anew:
                so it depends on neither the number of moves nor the ranks in between, which differ among processes.

        Raises:
            UsageError: it belongs to another dataset, order or seed, or is invalid.
        """
        if isinstance(state, Mapping) and state.get("kind") == "stream":
            raise UsageError(
                "the state is of a loader of an iterable dataset; this one's is map-style",
                remedy="resume with the dataset that the state was taken with",
            )
        found = LoaderPosition.of(state)
        _check_same_order(found.epoch.order, self.position.epoch.order)
        if self.measured is not None and not moved and found.settings.shares.ranks == self.ranks:
            self.measured.speeds = _read_speeds(state, self.ranks)
            self.settings = replace(self.settings, shares=found.settings.shares)
        anew = moved and self.place.virtual_ranks is None
        self.position, self._earlier_steps = self._redistribute(found, anew=anew), 0
        self._started = self._epoch_set = False

    def _redistribute(self, found: LoaderPosition, *, anew: bool) -> LoaderPosition:
        """Return `found`, assigned to the present ranks; the end of its epoch if too little is left for a step."""
        if not found.remaining:
            return found
        try:
            return found.redistribute(self.settings, anew=anew)
        except UsageError:
            if self.settings.uneven not in ("truncate", "drop"):
                raise
            log.warning(
                "the rest of epoch %d is too small for a step on %s",
                found.epoch.order.epoch,
                self.place,
            )
            return LoaderPosition(found.epoch, found.epoch.portions.steps)

    def begin(self) -> None:
        """Go to where the next iteration starts: the loaded position, or the epoch that was set, or the next epoch.

        An iteration starts with its first batch: libraries create iterators that they never use.
        """
        if self._started or not (self.position.remaining or self._epoch_set):
            self._go_to(self.epoch + 1)

    def _go_to(self, epoch: int) -> None:
        order = replace(self.position.epoch.order, epoch=epoch)
        self.position, self._earlier_steps = LoaderPosition.start(order, self.settings), 0
        self._started = False

    # ------------------------------------------------------------------ batches

    def batches(self) -> Iterator[tuple[Any, LeafPlace | None]]:
        """Yield the rest of the epoch: batches, with virtual ranks each with its leaf's place."""
        self._started, self._epoch_set = True, False
        samples, before = len(self.dataset), self.position.epoch.order.samples
        if samples != before:
            raise UsageError(
                f"the dataset had {before} samples, and now has {samples}",
                rank=self.rank,
                remedy="create a new Loader for a dataset of another length",
            )
        self._update_shares()
        while self.position.remaining:
            if self.place.virtual_ranks is None:
                yield from self._batches_until_redistributed()
            else:
                yield from self._leaves()

    def _fetch(self) -> Iterator[Any]:
        """Yield the fetched batches of the rest of the epoch, as it is assigned now."""
        epoch, first, own = self.position.epoch, self.position.step, self.place.own
        self._indices.position = self.position

        def describe(number: int) -> tuple[int, str]:
            step = first + number // len(own)
            return step, self._list_samples(step, own[number % len(own)])

        fetched = 0
        for batch in self._fetcher.run((epoch.order.epoch, len(epoch.layers)), first, describe):
            fetched += 1
            yield batch
        step, contents = describe(fetched)
        if step < epoch.portions.steps:
            raise DataError(
                f"batch {step} of epoch {epoch.order.epoch} ended the iteration{contents}",
                rank=self.rank,
                remedy="let the dataset or collate_fn raise another exception than StopIteration",
            )

    def _batches_until_redistributed(self) -> Iterator[tuple[Any, None]]:
        first, measured, sizes, started, waited = self._step, self.measured, self._indices.sizes, 0.0, 0.0
        every = measured.every if measured is not None else None
        if measured is not None:
            started, waited = time.perf_counter(), wait_counters.waited_seconds
        for step, batch in enumerate(self._fetch(), first):
            samples = sizes.popleft()
            self._step = step + 1
            yield with_samples(batch, samples), None
            if measured is None:
                continue
            if step > first:  # the first step includes one-time costs
                seconds = time.perf_counter() - started - (wait_counters.waited_seconds - waited)
                measured.record(samples, seconds)
            if every is not None and (step + 1) % every == 0 and self._update_shares():
                return
            started, waited = time.perf_counter(), wait_counters.waited_seconds

    def _leaves(self) -> Iterator[tuple[Any, LeafPlace]]:
        """Yield a batch for each own leaf of each step; the position changes with the last one of a step."""
        epoch, step, own, fetched = self.position.epoch, self._step, self.place.own, self._fetch()
        for leaf, batch in zip(cycle(own), fetched):
            ends_step = leaf == own[-1]
            step += ends_step
            self._step = step
            counted = with_samples(batch, self._indices.sizes.popleft(), ends_step)
            yield counted, leaf_place(epoch, step - ends_step, leaf)

    def _list_samples(self, step: int, rank: int) -> str:
        epoch = self.position.epoch
        if not epoch.portions.size(rank, step):
            return ""
        samples = epoch.batch(rank, step).tolist()
        return f" (samples {', '.join(map(str, samples[:8]))}{', …' * (len(samples) > 8)})"

    def _update_shares(self) -> bool:
        """Redistribute the remaining samples by measured throughput; return whether that changed anything."""
        measured = self.measured
        if measured is None or self.ranks == 1 or not self.position.remaining:
            return False
        shares = measured.update(self.settings.shares, self.rank, self.group)
        if shares is None:
            return False
        self.settings = replace(self.settings, shares=shares)
        self._earlier_steps += self.position.step
        self.position = self.position.redistribute(self.settings)
        if self.rank == 0:
            speeds = ", ".join(f"{speed:.4g}" for speed in measured.speeds or ())
            log.info("ranks reach %s samples/s: data redistributed, %s", speeds, self.describe())
        return True


def _read_speeds(state: Mapping[str, Any], ranks: int) -> list[float] | None:
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
            remedy="pass a state that Loader.state_dict() returned",
        )
    return speeds


def _check_same_order(found: SampleOrder, own: SampleOrder) -> None:
    """Raise unless both are the same samples in the same order, except for the epoch."""
    for name, description in (
        ("samples", "a dataset of {} samples"),
        ("seed", "seed={}"),
        ("shuffle", "shuffle={!r}"),
    ):
        theirs, ours = getattr(found, name), getattr(own, name)
        if theirs != ours:
            raise UsageError(
                f"the state is of {description.format(theirs)}; this loader has {description.format(ours)}",
                remedy="resume with the dataset, seed and shuffle that the state was taken with",
            )
    if found.shuffle == "blocks" and found.block != own.block:
        raise UsageError(
            f"the state's blocks of {found.block} samples were shuffled; this loader's have {own.block}",
            remedy="resume with the same block size, or shuffle=True",
        )
