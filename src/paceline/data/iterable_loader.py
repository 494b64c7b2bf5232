"""Serves an iterable dataset: since its length is not known, ranks announce one step ahead whether they have a batch.

[Note: one step ahead] Before a batch is served, the next one is fetched, and announced: one gather of a few numbers,
which overlaps with the user's computation. So when a rank requests the next batch, it knows whether all, some or no
ranks have one, and no rank waits for one that does not continue.

With virtual ranks each of these is such a rank: a process fetches and announces the batches of all that it serves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from paceline._core.keyed_random import derive_key
from paceline.data.batch_sample_count import with_samples
from paceline.data.dataloader_workers import BatchFetcher, LoaderOptions, PrepareWorker
from paceline.data.iterable_loader_state import StreamState
from paceline.data.iterable_sharding import (
    CollateStream,
    RankReader,
    RankStream,
    StreamBatch,
    StreamLayer,
)
from paceline.data.leaf_random import LeafPlace
from paceline.data.leaf_streams import CollateLeaves, LeafBatches, LeafStream
from paceline.data.rank_place import RankPlace
from paceline.data.sampling.block_dispatch import DispatchScheme
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.stream_announcements import FAILED, Announcement, announce, read_announcements
from paceline.errors import DataError, UnevenData, UsageError
from paceline.world.value_collectives import broadcast_value

__all__ = ["IterableLoader", "StreamSettings"]

log = logging.getLogger("paceline.data")


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How a stream is assigned to ranks and cut into batches.

    Attributes:
        shares: of the ranks, if all read the same stream; None: each has its own.
        block, scheme, seed: as in `BlockDispatch`, if all read the same stream.
        batch_size: samples of a full batch.
        uneven: the policy; a stream can't be rebalanced.
    """

    shares: RankShares | None
    block: int
    scheme: DispatchScheme
    seed: int
    batch_size: int
    uneven: str


class IterableLoader:
    """Serves the batches of one rank, or of its virtual ranks, of an iterable dataset.

    Args:
        dataset: iterable.
        settings: assignment and batches.
        place: the ranks that this process serves.
        group: the ranks.
        options: of torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        settings: StreamSettings,
        place: RankPlace,
        group: ProcessGroup | None,
        options: LoaderOptions,
    ) -> None:
        self.dataset, self.settings, self.group = dataset, settings, group
        self.place, self.rank, self.ranks = place, place.rank, place.ranks
        self.epoch = self.step = 0
        self._options = options
        self._fetcher: tuple[list[StreamLayer], range, BatchFetcher] | None = None
        self._fetched_step = 0  # of the batches that are being fetched
        self._epoch_read = torch.zeros((), dtype=torch.int64)
        if place.virtual_ranks is not None and options.num_workers:
            self._epoch_read.share_memory_()  # workers that persist read it anew
        self._started = self.over = self._epoch_set = False
        self._layers = [self._new_layer()]
        self._fetcher_for(self._layers, place.own)  # so that torch's DataLoader refuses invalid options now

    def _new_layer(self) -> StreamLayer:
        settings = self.settings
        taken = tuple({} for _ in range(self.place.served))
        return StreamLayer(settings.shares, settings.block, settings.scheme, settings.seed, taken)

    # ------------------------------------------------------------------ position

    @property
    def steps(self) -> int:
        """Not known.

        Raises:
            TypeError: always, as by torch's DataLoader.
        """
        raise TypeError("an iterable dataset has no length, so its Loader has none")

    @property
    def steps_left(self) -> None:
        """Not known."""
        return

    def describe(self) -> str:
        """Return one sentence on the use of the data."""
        streams = (
            "every rank reads its own stream"
            if self.settings.shares is None
            else "one stream, divided among all"
        )
        ranks = f"{self.ranks} ranks" if self.place.virtual_ranks is None else self.place
        return f"{streams} ({ranks}): {_EFFECTS[self.settings.uneven]}"

    @property
    def lossless(self) -> bool:
        """True if the policy uses every sample once; that a rank may run out is not known before."""
        return self.settings.uneven in ("join", "error")

    def facts(self) -> list[str]:
        """Return what must be the same on all ranks before an epoch starts."""
        return [
            f"virtual_ranks={self.place.virtual_ranks}",
            f"{self.settings}",
            f"num_workers={self._options.num_workers}",
            f"epoch {self.epoch}, step {self.step}",
            f"position {json.dumps(self.state())}",
        ]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, unless a loaded state is within it."""
        if self._started or epoch != self.epoch:
            self._go_to(epoch)
        self._epoch_set = True

    def state(self) -> dict[str, Any]:
        """Return the position as plain JSON."""
        workers = self._options.num_workers
        return StreamState(self.epoch, self.step, self.over, workers, self._layers).to_json()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to the position of `state`, assigned to the present ranks.

        Raises:
            UsageError: it is invalid, or has another number of workers, or each rank has its own stream and the
                number of ranks has changed.
        """
        found = StreamState.from_json(state)
        if found.workers != self._options.num_workers:
            raise UsageError(
                f"the state was taken with num_workers={found.workers}; this loader has {self._options.num_workers}",
                remedy="resume an iterable dataset with the same number of workers: each reads its own stream",
            )
        per_rank = self.settings.shares is None
        if per_rank != found.per_rank:
            kinds = ("one stream for all ranks (stream='whole')", "a stream for every rank (stream='own')")
            raise UsageError(
                f"the state is of {kinds[found.per_rank]}; this loader has {kinds[per_rank]}",
                remedy="resume with the stream= that the state was taken with",
            )
        if per_rank and found.ranks != self.ranks:
            raise UsageError(
                f"the state is of {found.ranks} ranks with a stream each; now there are {self.ranks}",
                remedy="resume on the same number of ranks, or start anew with one stream for all (stream='whole')",
            )
        fresh, layers = self._new_layer(), found.layers
        if replace(fresh, taken=layers[-1].taken) != layers[-1]:
            layers = [*layers, fresh]
        self._layers, self.epoch, self.step, self.over = layers, found.epoch, found.step, found.over
        self._started = self._epoch_set = False

    def begin(self) -> None:
        """Go to where the next iteration starts: the loaded position, or the epoch that was set, or the next epoch.

        An iteration starts with its first batch: libraries create iterators that they never use.
        """
        if self._started or (self.over and not self._epoch_set):
            self._go_to(self.epoch + 1)

    def _go_to(self, epoch: int) -> None:
        self.epoch, self.step, self._started, self.over = epoch, 0, False, False
        self._layers = [self._new_layer()]

    # ------------------------------------------------------------------ batches

    def batches(self) -> Iterator[tuple[Any, LeafPlace | None]]:
        """Yield the rest of the epoch, see [Note: one step ahead]; with virtual ranks, each batch with its place."""
        self._started, self._epoch_set = True, False
        if self.over:
            return
        own, self._fetched_step = self.place.own, self.step
        next_of = self._open(self._layers)
        repeated = {rank: self._repeat(rank, self._layers[:-1]) for rank in own}
        failed: list[DataError] = []  # of this rank; a list, since its traceback would hold a variable
        upcoming = [_next(next_of, rank, failed) for rank in own]
        pending = announce(upcoming, self.place, self.group, failed=bool(failed))
        placeholders, first_step = [None] * len(own), True
        while True:
            announced = read_announcements(pending, self.place)
            if failed:
                raise failed.pop()
            self._raise_failed(announced)
            with self.place.naming_virtual_ranks():
                continues = self._continues(announced)
            if not continues:
                self.over = True
                return
            if first_step:
                self._check_first_samples(announced)
                placeholders = [self._broadcast_placeholder(upcoming, announced)] * len(own)
                first_step = False
            served, self._fetched_step = upcoming, self.step + 1
            placeholders = [
                old if new is None else new.batch for old, new in zip(placeholders, served, strict=True)
            ]
            upcoming = [
                None if each is None else _next(next_of, rank, failed)
                for rank, each in zip(own, served, strict=True)
            ]
            if self.settings.uneven == "pad":
                served = [
                    _next(lambda rank: next(repeated[rank], None), rank, failed) if each is None else each
                    for rank, each in zip(own, served, strict=True)
                ]
            pending = announce(upcoming, self.place, self.group, failed=bool(failed))
            yield from self._serve(served, placeholders, announced)

    def _serve(
        self, served: list[StreamBatch | None], placeholders: list[Any], announced: list[Announcement]
    ) -> Iterator[tuple[Any, LeafPlace | None]]:
        """Yield the batches of a step, which counts with the last one."""
        step, own, virtual = self.step, self.place.own, self.place.virtual_ranks is not None
        for rank, found, placeholder in zip(own, served, placeholders, strict=True):
            last = rank == own[-1]
            if last:
                self._count(announced)
            batch, samples = (placeholder, 0) if found is None else (found.batch, found.samples)
            place = LeafPlace(self.settings.seed, self.epoch, step, rank) if virtual else None
            yield with_samples(batch, samples, last if virtual else None), place

    def _open(self, layers: list[StreamLayer]) -> Callable[[int], StreamBatch | None]:
        """Return a function that returns the next batch of a rank that this process serves; None at its end."""
        fetched = self._fetch(layers, self.place.own)
        if self.place.virtual_ranks is None:
            return lambda _rank: next(fetched, None)
        workers = max(1, self._options.num_workers)
        return LeafBatches(fetched, self.place.own, workers, layers[-1], self.settings.batch_size).next_of

    def _fetch(self, layers: list[StreamLayer], own: range) -> Iterator[StreamBatch]:
        """Yield the batches of the ranks `own` after `layers`, as counted now."""
        first, virtual = self.step, self.place.virtual_ranks is not None
        self._epoch_read.fill_(derive_key(self.epoch) >> 1)  # of any size
        return self._fetcher_for(layers, own).run(
            (self.epoch,), first, lambda number: (self._fetched_step if virtual else first + number, "")
        )

    def _fetcher_for(self, layers: list[StreamLayer], own: range) -> BatchFetcher:
        layers, settings, wrapper = [layer.copy() for layer in layers], self.settings, RankStream
        if self._fetcher is not None and self._fetcher[:2] == (layers, own):
            return self._fetcher[2]
        collate: Callable[[Any], Any] = CollateStream(self._options.collate_fn)
        more: dict[str, Any] = {"batch_size": settings.batch_size, "drop_last": settings.uneven == "drop"}
        stream: RankStream | LeafStream = RankStream(self.dataset, RankReader(self.rank, layers))
        if self.place.virtual_ranks is not None:
            stream = LeafStream(self.dataset, layers, own, seed=settings.seed, epoch=self._epoch_read, **more)
            collate, more, wrapper = CollateLeaves(self._options.collate_fn), {"batch_size": None}, LeafStream
        options = replace(
            self._options,
            collate_fn=collate,
            worker_init_fn=PrepareWorker(self._options.worker_init_fn, wrapper),
        )
        self._fetcher = layers, own, BatchFetcher(stream, options, self.rank, settings.seed, **more)
        return self._fetcher[2]

    def _repeat(self, rank: int, before: list[StreamLayer]) -> Iterator[StreamBatch]:
        """Yield a rank's batches of the present layer from the first, again and again; none if it has none."""
        while True:
            some = False
            for batch in self._fetch([*before, self._new_layer()], range(rank, rank + 1)):
                if batch.samples:  # not the mark of the end
                    some = True
                    yield batch
            if not some:
                return

    def _raise_failed(self, ranks: list[Announcement]) -> None:
        failed = [self.place.server(served) for served, each in enumerate(ranks) if each.has == FAILED]
        if failed:
            raise DataError(
                f"rank {failed[0]} could not load its batch {self.step} of epoch {self.epoch}",
                rank=failed[0],
                remedy="look at the output of that rank: the error there is the cause",
            )

    def _continues(self, ranks: list[Announcement]) -> bool:
        """Return whether the policy requires another step."""
        some, every = any(each.has for each in ranks), all(each.has for each in ranks)
        if self.settings.uneven == "error" and some and not every:
            dry = [rank for rank, each in enumerate(ranks) if not each.has]
            raise UnevenData(
                f"after {self.step} steps of epoch {self.epoch} rank {dry[0]} has no batch, and others have",
                rank=dry[0],
                remedy="use uneven='join' (every sample once), or 'truncate', 'drop' or 'pad'",
            )
        return every if self.settings.uneven in ("truncate", "drop") else some

    def _check_first_samples(self, ranks: list[Announcement]) -> None:
        """Warn if ranks that should read different streams read the same one, or vice versa."""
        firsts = [each.first for each in ranks if each.has and each.worker == 0 and each.first]
        if self.rank or len(firsts) < 2 or self.step:
            return
        if self.settings.shares is None and len(set(firsts)) == 1:
            log.warning(
                "all ranks' streams begin with the same sample: if they are the same, every sample is used %d "
                "times; split them by rank, or let the loader divide one stream (stream='whole')",
                self.ranks,
            )
        if self.settings.shares is not None and len(set(firsts)) > 1:
            log.warning(
                "ranks read different streams, of which each keeps its part only: the rest is never used; "
                "with stream='whole' every rank must read the same samples in the same order"
            )

    def _broadcast_placeholder(self, batches: list[StreamBatch | None], ranks: list[Announcement]) -> Any:
        """Return the first batch of all for ranks without one in the first step; all ranks take part."""
        if all(each.has for each in ranks):
            return None
        first = next(served for served, each in enumerate(ranks) if each.has)
        source, own = self.place.server(first), self.place.own
        batch = batches[first - own.start] if first in own else None
        try:
            return broadcast_value(None if batch is None else batch.batch, source, self.group)
        except UsageError as error:
            dry = [rank for rank, each in enumerate(ranks) if not each.has]
            reason = str(error).partition("\n")[0]
            kind = "rank" if self.place.virtual_ranks is None else "virtual rank"
            raise DataError(
                f"{kind} {dry[0]} has no sample, and a placeholder batch can't be sent to it: {reason}",
                rank=source,
                remedy="let collate_fn return tensors, numbers, texts, and lists, dicts, named tuples or dataclasses "
                "of them; or give every rank a sample",
            ) from error

    def _count(self, ranks: list[Announcement]) -> None:
        """Count the samples that all ranks use in this step."""
        self.step += 1
        layer = self._layers[-1]
        for taken, each in zip(layer.taken, ranks, strict=True):
            if each.has:
                taken[each.worker] = taken.get(each.worker, 0) + each.samples


def _next(
    next_of: Callable[[int], StreamBatch | None], rank: int, failed: list[DataError]
) -> StreamBatch | None:
    if failed:
        return None
    try:
        return next_of(rank)
    except DataError as error:
        failed.append(error)
        return None


_EFFECTS = {
    "join": "every sample is used once; a rank that runs out takes part without data until all have",
    "truncate": "the epoch ends when the first rank runs out; remaining samples are never used",
    "drop": "the epoch ends when the first rank has no full batch; remaining samples are never used",
    "pad": "the epoch ends when the last rank runs out; the others repeat their own samples until then",
    "error": "every sample is used once; if a rank runs out before another, that is an error",
}
