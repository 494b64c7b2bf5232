"""Serves a map-style dataset: every rank computes the indices of its own samples, and fetches those."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed import ProcessGroup
from torch.utils.data import Sampler

from paceline._core.step_state import wait_counters
from paceline.data.batch_sample_count import with_samples
from paceline.data.dataloader_workers import BatchFetcher, LoaderOptions
from paceline.data.map_loader_state import DispatchSettings, LoaderPosition
from paceline.data.measured_shares import MeasuredShares
from paceline.data.resumable_batch_indices import SampleOrder
from paceline.errors import DataError, UsageError

__all__ = ["MapLoader"]

log = logging.getLogger("paceline.data")

_CHUNK = 16384  # samples whose indices are computed at once
_PLACEHOLDER_SAMPLES = 2  # of a batch without own samples: one alone is too few for BatchNorm


class BatchIndices(Sampler[list[int]]):
    """Yields the indices of the samples in each batch of a rank, from a position to the end of its epoch.

    Attributes:
        position: from which to start.
        sizes: number of samples in each batch that was fetched and not served yet.
    """

    def __init__(self, rank: int, position: LoaderPosition) -> None:
        self._rank, self.position = rank, position
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        epoch, step = self.position.epoch, self.position.step
        portions, rank = epoch.portions, self._rank
        placeholder = list(range(min(_PLACEHOLDER_SAMPLES, epoch.order.samples)))
        at_once = max(1, _CHUNK // portions.batch_size)
        self.sizes.clear()
        while step < portions.steps:
            end = min(step + at_once, portions.steps)
            first, *ends = portions.edges(rank, step, end)
            indices, low = epoch.samples(rank, first, ends[-1]).tolist(), 0
            for each in ends:
                high = each - first
                self.sizes.append(high - low)
                yield indices[low:high] or placeholder
                low = high
            step = end


class MapLoader:
    """Serves one rank's batches of a map-style dataset.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        order: of its samples in the first epoch.
        settings: assignment and batches.
        place: (rank, ranks) of this process.
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
        place: tuple[int, int],
        group: ProcessGroup | None,
        options: LoaderOptions,
        measured: MeasuredShares | None,
    ) -> None:
        self.dataset, self.group, self.measured = dataset, group, measured
        self.rank, self.ranks = place
        self.settings = settings
        self.position = LoaderPosition.start(order, settings)
        self._started = False  # an iteration from this position
        self._epoch_set = False  # explicitly, though it may have no batches left
        self._earlier_steps = 0  # of this epoch, before its samples were redistributed
        self._indices = BatchIndices(self.rank, self.position)
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

    def describe(self) -> str:
        """Return one sentence on the use of the data in this epoch."""
        epoch = self.position.epoch
        shares = "" if len(set(epoch.dispatch.shares.parts)) == 1 else f", shares {epoch.dispatch.shares}"
        return f"{epoch.dispatch.samples} samples to {self.ranks} ranks{shares}: {epoch.portions.describe()}"

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

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to the position of `state`, assigned to the present ranks.

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
        if self.measured is not None and found.settings.shares.ranks == self.ranks:
            self.measured.speeds = _read_speeds(state, self.ranks)
            self.settings = replace(self.settings, shares=found.settings.shares)
        self.position, self._earlier_steps = self._redistribute(found), 0
        self._started = self._epoch_set = False

    def _redistribute(self, found: LoaderPosition) -> LoaderPosition:
        """Return `found`, assigned to the present ranks; the end of its epoch if too little is left for a step."""
        if not found.remaining:
            return found
        try:
            return found.redistribute(self.settings)
        except UsageError:
            if self.settings.uneven not in ("truncate", "drop"):
                raise
            log.warning(
                "the rest of epoch %d is too small for a step on %d ranks",
                found.epoch.order.epoch,
                self.ranks,
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

    def batches(self) -> Iterator[Any]:
        """Yield the rest of the epoch."""
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
            yield from self._batches_until_redistributed()

    def _batches_until_redistributed(self) -> Iterator[Any]:
        epoch, first = self.position.epoch, self.position.step
        self._indices.position = self.position
        measured, sizes, started, waited = self.measured, self._indices.sizes, 0.0, 0.0
        every = measured.every if measured is not None else None
        fetched = self._fetcher.run((epoch.order.epoch, len(epoch.layers)), first, self._list_samples)
        if measured is not None:
            started, waited = time.perf_counter(), wait_counters.waited_seconds
        for step, batch in enumerate(fetched, first):
            samples = sizes.popleft()
            self._step = step + 1
            yield with_samples(batch, samples)
            if measured is None:
                continue
            if step > first:  # the first step includes one-time costs
                seconds = time.perf_counter() - started - (wait_counters.waited_seconds - waited)
                measured.record(samples, seconds)
            if every is not None and (step + 1) % every == 0 and self._update_shares():
                return
            started, waited = time.perf_counter(), wait_counters.waited_seconds
        if self._step < epoch.portions.steps:
            contents = self._list_samples(self._step)
            raise DataError(
                f"batch {self._step} of epoch {epoch.order.epoch} ended the iteration{contents}",
                rank=self.rank,
                remedy="let the dataset or collate_fn raise another exception than StopIteration",
            )

    def _list_samples(self, step: int) -> str:
        epoch = self.position.epoch
        if not epoch.portions.size(self.rank, step):
            return ""
        samples = epoch.batch(self.rank, step).tolist()
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
