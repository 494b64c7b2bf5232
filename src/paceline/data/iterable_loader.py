"""Serves an iterable dataset: since its length is not known, ranks announce one step ahead whether they have a batch.

[Note: one step ahead] Before a batch is served, the next one is fetched, and announced: one gather of a few numbers,
which overlaps with the user's computation. So when a rank requests the next batch, it knows whether all, some or no
ranks have one, and no rank waits for one that does not continue.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from paceline.data.batch_sample_count import with_samples
from paceline.data.dataloader_workers import BatchFetcher, LoaderOptions
from paceline.data.iterable_loader_state import StreamState
from paceline.data.iterable_sharding import (
    CollateStream,
    PrepareWorker,
    RankReader,
    RankStream,
    StreamBatch,
    StreamLayer,
)
from paceline.data.sampling.block_dispatch import DispatchScheme
from paceline.data.sampling.rank_shares import RankShares
from paceline.errors import DataError, UnevenData, UsageError
from paceline.world.control_collectives import PendingRows, gather_rows_async
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


class Announcement(NamedTuple):
    """A rank's next batch: whether it has one, its worker and number of samples, and `StreamBatch.first`."""

    has: int = 0  # 1, 0, or FAILED
    worker: int = 0
    samples: int = 0
    first: int = 0


FAILED = -1


class IterableLoader:
    """Serves one rank's batches of an iterable dataset.

    Args:
        dataset: iterable.
        settings: assignment and batches.
        place: (rank, ranks) of this process.
        group: the ranks.
        options: of torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        settings: StreamSettings,
        place: tuple[int, int],
        group: ProcessGroup | None,
        options: LoaderOptions,
    ) -> None:
        self.dataset, self.settings, self.group = dataset, settings, group
        self.rank, self.ranks = place
        self.epoch = self.step = 0
        self._options = options
        self._fetcher: tuple[list[StreamLayer], BatchFetcher] | None = None
        self._started = self._over = self._epoch_set = False
        self._layers = [self._new_layer()]
        self._fetcher_for(self._layers)  # so that torch's DataLoader refuses invalid options now

    def _new_layer(self) -> StreamLayer:
        settings = self.settings
        taken = tuple({} for _ in range(self.ranks))
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
        return f"{streams} ({self.ranks} ranks): {_EFFECTS[self.settings.uneven]}"

    @property
    def lossless(self) -> bool:
        """True if the policy uses every sample once; that a rank may run out is not known before."""
        return self.settings.uneven in ("join", "error")

    def facts(self) -> list[str]:
        """Return what must be the same on all ranks before an epoch starts."""
        return [
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
        return StreamState(self.epoch, self.step, self._over, workers, self._layers).to_json()

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
        self._layers, self.epoch, self.step, self._over = layers, found.epoch, found.step, found.over
        self._started = self._epoch_set = False

    def begin(self) -> None:
        """Go to where the next iteration starts: the loaded position, or the epoch that was set, or the next epoch.

        An iteration starts with its first batch: libraries create iterators that they never use.
        """
        if self._started or (self._over and not self._epoch_set):
            self._go_to(self.epoch + 1)

    def _go_to(self, epoch: int) -> None:
        self.epoch, self.step, self._started, self._over = epoch, 0, False, False
        self._layers = [self._new_layer()]

    # ------------------------------------------------------------------ batches

    def batches(self) -> Iterator[Any]:
        """Yield the rest of the epoch; see [Note: one step ahead]."""
        self._started, self._epoch_set = True, False
        if self._over:
            return
        fetched, repeated = self._fetch(self._layers), self._repeat(self._layers[:-1])
        failed: list[DataError] = []  # of this rank; a list, since its traceback would hold a variable
        batch = _next(fetched, failed)
        pending = self._announce(batch, failed)
        placeholder, first_step = None, True
        while True:
            ranks = [Announcement(*(int(each) for each in row.tolist())) for row in pending.wait()]
            if failed:
                raise failed.pop()
            self._raise_failed(ranks)
            if not self._continues(ranks):
                self._over = True
                return
            if first_step:
                self._check_first_samples(ranks)
                placeholder, first_step = self._broadcast_placeholder(batch, ranks), False
            served, batch = batch, None
            if served is not None:
                placeholder = served.batch
                batch = _next(fetched, failed)
            elif self.settings.uneven == "pad":
                served = _next(repeated, failed)
            pending = self._announce(batch, failed)
            self._count(ranks)
            if served is None:
                yield with_samples(placeholder, 0)
            else:
                yield with_samples(served.batch, served.samples)

    def _fetch(self, layers: list[StreamLayer]) -> Iterator[StreamBatch]:
        """Yield this rank's batches after `layers`, as counted now."""
        return self._fetcher_for(layers).run((self.epoch,), self.step, lambda _step: "")

    def _fetcher_for(self, layers: list[StreamLayer]) -> BatchFetcher:
        layers = [layer.copy() for layer in layers]
        if self._fetcher is None or self._fetcher[0] != layers:
            options = replace(
                self._options,
                collate_fn=CollateStream(self._options.collate_fn),
                worker_init_fn=PrepareWorker(self._options.worker_init_fn),
            )
            stream = RankStream(self.dataset, RankReader(self.rank, layers))
            more = {"batch_size": self.settings.batch_size, "drop_last": self.settings.uneven == "drop"}
            self._fetcher = layers, BatchFetcher(stream, options, self.rank, self.settings.seed, **more)
        return self._fetcher[1]

    def _repeat(self, before: list[StreamLayer]) -> Iterator[StreamBatch]:
        """Yield this rank's batches of the present layer from the first, again and again; none if it has none."""
        while True:
            some = False
            for batch in self._fetch([*before, self._new_layer()]):
                some = True
                yield batch
            if not some:
                return

    def _announce(self, batch: StreamBatch | None, failed: list[DataError]) -> PendingRows:
        own = Announcement() if batch is None else Announcement(1, batch.worker, batch.samples, batch.first)
        if failed:
            own = Announcement(FAILED)
        return gather_rows_async(torch.tensor(own, dtype=torch.int64), self.group)

    def _raise_failed(self, ranks: list[Announcement]) -> None:
        failed = [rank for rank, each in enumerate(ranks) if each.has == FAILED]
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

    def _broadcast_placeholder(self, batch: StreamBatch | None, ranks: list[Announcement]) -> Any:
        """Return another rank's batch for ranks without one in the first step; all ranks take part."""
        if all(each.has for each in ranks):
            return None
        source = next(rank for rank, each in enumerate(ranks) if each.has)
        try:
            return broadcast_value(None if batch is None else batch.batch, source, self.group)
        except UsageError as error:
            dry = [rank for rank, each in enumerate(ranks) if not each.has]
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"rank {dry[0]} has no sample, and a placeholder batch can't be sent to it: {reason}",
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


def _next(fetched: Iterator[StreamBatch], failed: list[DataError]) -> StreamBatch | None:
    try:
        return next(fetched, None)
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
